"""What a device map looks like and how it came about: as a table, as bars of text, as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from accel_bigmodel.byte_counts import convert_bytes
from accel_bigmodel.placement import Placement
from accel_state.settings.installed import Requirement

__all__ = ("DeviceMapReport",)

_MATPLOTLIB = Requirement("matplotlib", extra="accel-bigmodel[plots]")
_WIDTH = 40


@dataclass(frozen=True)
class DeviceMapReport:
    """A device map with its reasons; printing it shows the table and the bars.

    Args:
        device_map: name to device, with one entry wherever everything below a name lies on one device.
        blocks: the same without an entry for the whole model.
        placements: each piece in the order in which it was placed, with device and reason.
        budget: bytes that each device may give.
        used: bytes that each device gives.
    """

    device_map: dict[str, int | str]
    blocks: dict[str, int | str]
    placements: tuple[Placement, ...]
    budget: Mapping[int | str, int]
    used: Mapping[int | str, int]

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.bars()}"

    def table(self) -> str:
        """One line for each piece, with its reason; neighbours with the same device and reason share a line."""
        rows = [("piece", "size", "device", "why")]
        start = 0
        for end in range(1, len(self.placements) + 1):
            first = self.placements[start]
            same = end < len(self.placements) and (self.placements[end].device, self.placements[end].reason) == (
                first.device,
                first.reason,
            )
            if not same:
                rows.append(_row(self.placements[start:end]))
                start = end
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
        )

    def bars(self) -> str:
        """One bar for each device: what is used of its budget."""
        lines = []
        for device, used in self.used.items():
            budget = self.budget.get(device)
            if budget is None:
                lines.append(f"{device!s:>6}  {convert_bytes(used)} used, no bound")
                continue
            filled = round(_WIDTH * used / budget) if budget else 0
            bar = "#" * filled + "." * (_WIDTH - filled)
            lines.append(f"{device!s:>6}  [{bar}] {convert_bytes(used)} of {convert_bytes(budget)}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the bars with matplotlib: a segment for each piece, the budget as an outline.

        Raises:
            Missing: matplotlib is not installed.
        """
        _MATPLOTLIB.demand(f"Draw the device map in {os.fspath(path)!r}.")
        from matplotlib.figure import Figure

        devices = [device for device in self.used if device in self.budget or self.used[device]]
        figure = Figure(figsize=(8, 0.7 * len(devices) + 1), layout="constrained")
        axes = figure.add_subplot()
        left = dict.fromkeys(devices, 0)
        for number, placement in enumerate(self.placements):
            row, size = devices.index(placement.device), placement.piece.size
            axes.barh(row, size, left=left[placement.device], color=f"C{number % 10}", edgecolor="white", linewidth=0.5)
            left[placement.device] += size
        axes.barh(range(len(devices)), [self.budget.get(d, left[d]) for d in devices], fill=False, edgecolor="black")
        axes.set_yticks(range(len(devices)), [str(device) for device in devices])
        axes.invert_yaxis()
        axes.set_xlabel("bytes")
        figure.savefig(path)


def _row(run: tuple[Placement, ...]) -> tuple[str, str, str, str]:
    names = [name for placement in run for name in placement.piece.names]
    label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
    size = sum(placement.piece.size for placement in run)
    return label, convert_bytes(size), str(run[0].device), run[0].reason
