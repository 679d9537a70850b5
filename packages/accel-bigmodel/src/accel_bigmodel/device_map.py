"""Creates, checks, simplifies and explains device maps, which map names of modules or tensors to devices."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from accel_bigmodel.placement import (
    HOST,
    OFFLOADED,
    DevicePacking,
    MaxMemory,
    Misfit,
    Placement,
    get_max_memory,
    pieces_of,
)
from accel_bigmodel.sizes import Dtype, convert_bytes
from accel_bigmodel.tied import device_of_name
from accel_state.devices.select import best_family, family_of
from accel_state.errors import NotOffered, SettingError
from accel_state.library import stack_level
from accel_state.settings.installed import Requirement
from accel_state.settings.integers import as_int

__all__ = (
    "Device",
    "DeviceMap",
    "DeviceMapReport",
    "check_device_map",
    "check_device_same",
    "check_room",
    "clean_device_map",
    "explain_device_map",
    "infer_auto_device_map",
    "matching_entries",
    "resolve_device",
    "warn_of_unknown_names",
)

_log = logging.getLogger(__name__)

Device: TypeAlias = "int | str | torch.device"
"""Index of an accelerator, "cpu", "disk", or any argument of `torch.device`."""

DeviceMap: TypeAlias = "Mapping[str, Device]"


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Create a device map that fills the accelerators first, then the CPU, then the disk, within the budgets.

    The model may be on the meta device. `explain_device_map` takes the same arguments and shows the reasons.

    Args:
        max_memory: bytes, or text such as "10GB", by device; if None, the free memory.
        no_split_module_classes: names of classes whose modules stay on one device.
        dtype: count floating-point weights in this dtype.
        special_dtypes: dtypes of single weights, by full name.
        verbose: print the report.
        clean_result: write one entry for a module whose parts share a device.
        offload_buffers: offload buffers of offloaded modules too; otherwise log a warning if no accelerator has room
            for them.
        fallback_allocation: if the first accelerator or the CPU would stay empty, place the first later module there
            that fits.

    Raises:
        SettingError: the budget limits the disk too, and the model does not fit.

    Example:
        >>> infer_auto_device_map(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {0: 600, "cpu": 5000})
        {'0': 0, '1': 'cpu'}
    """
    report = explain_device_map(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, offload_buffers, fallback_allocation
    )
    if verbose:
        print(report)  # noqa: T201 - what verbose=True asks for
    return report.device_map if clean_result else report.blocks


def explain_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMapReport:
    """Report how `infer_auto_device_map` places a model with the same arguments; print the report, or draw it.

    Args:
        model: the model, which may be on the meta device.
        max_memory: bytes, or text such as "10GB", by device; if None, the free memory.
        no_split_module_classes: names of classes whose modules stay on one device.
        dtype: count floating-point weights in this dtype.
        special_dtypes: dtypes of single weights, by full name.
        offload_buffers: buffers of offloaded modules are offloaded too.
        fallback_allocation: if the first accelerator or the CPU would stay empty, place the first later module there
            that fits.

    Raises:
        SettingError: the budget limits the disk too, and the model does not fit.

    Example:
        print(explain_device_map(model, max_memory={0: "2GB", "cpu": "16GB"}))
    """
    classes = [no_split_module_classes] if isinstance(no_split_module_classes, str) else no_split_module_classes
    budget = get_max_memory(max_memory)
    pieces = pieces_of(model, classes, dtype, special_dtypes)
    packing = DevicePacking(pieces, budget, fallback_allocation)
    packing.run()
    if packing.misfit is not None:
        raise _too_large(packing, packing.misfit)
    missing = 0 if offload_buffers else _missing_for_buffers(packing)
    if missing:
        warnings.warn(
            f"Offloaded layers have {missing} bytes of buffers, which stay on an accelerator; none has room for them. "
            "Pass offload_buffers=True to offload them too, or raise a budget.",
            UserWarning,
            stacklevel=stack_level(),
        )
    blocks = _blocks(packing)
    return DeviceMapReport(_simplified(blocks), blocks, tuple(packing.placements), dict(budget), dict(packing.used))


def _blocks(packing: DevicePacking) -> dict[str, Any]:
    """Devices by the highest names that were not split: everything below is on the device that was being filled."""
    found = {name: placement for placement in packing.placements for name in placement.piece.names}
    placed = {name: found[name] for piece in packing.pieces for name in piece.names}
    reached: dict[str, Any] = {}
    split = {""}
    prefixes_of = _Prefixes()
    checked = None
    for name, placement in placed.items():
        device, module = placement.device, name.rpartition(".")[0]
        # Layers of one module often follow each other on one device.
        for prefix in prefixes_of[name] if checked != (module, device) else (name,):
            if device != reached.setdefault(prefix, placement.reached):
                split.add(prefix)
        checked = module, device
    blocks: dict[str, Any] = {}
    for name, placement in placed.items():
        for prefix in prefixes_of[name]:
            if prefix not in split:
                blocks[prefix] = placement.device
                break
        else:
            blocks[name] = placement.device
    return blocks


def _too_large(packing: DevicePacking, misfit: Misfit) -> SettingError:
    """The error for a model that does not fit the budget, with the nearest device map."""
    last = list(packing.used)[-1]
    left = ", ".join(f"{device}: {free}" for device, free in misfit.left.items())
    return SettingError(
        f"Cannot place the model under the budget {dict(packing.budget)}: {packing.missing} bytes are missing.",
        f"{misfit.piece.names[0]!r} takes {misfit.piece.size} bytes, and no device has enough memory (left: {left}).",
        f"Raise the budget of {last!r} to {packing.used[last]} bytes. The nearest device map that fits is then "
        f"{_nearest(packing)}. Without 'disk' in the budget, the disk has no limit.",
    )


def _nearest(packing: DevicePacking) -> str:
    """The device map of a packing as text."""
    nearest = _simplified(_blocks(packing))
    shown = ", ".join(f"{name!r}: {device!r}" for name, device in list(nearest.items())[:10])
    more = f", and {len(nearest) - 10} more" if len(nearest) > 10 else ""
    return f"{{{shown}{more}}}"


def check_room(
    model: nn.Module, device_map: DeviceMap, needed: Mapping[torch.device, int], dtype: Dtype | None = None
) -> None:
    """Check that each device has enough memory for its weights in a device map.

    For an accelerator the free memory counts, for the host the total memory. A device that does not report its memory
    is not checked.

    Args:
        needed: additional bytes that the weights need on each device.
        dtype: dtype of floating-point weights; if None, that of the model.

    Raises:
        SettingError: a device has too little memory; the message states the missing bytes and the nearest map that
            fits.
    """
    rooms = {device: room for device in needed if (room := _room_of(device, needed[device])) is not None}
    missing = {device: needed[device] - room for device, room in rooms.items() if needed[device] > room}
    if not missing:
        return
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    budget: dict[Any, int] = {}
    for entry in device_map.values():
        if str(entry) not in OFFLOADED and (device := resolve_device(entry)) in rooms:
            held = sum(tensor.nbytes for tensor in tensors if check_device_same(tensor.device, device))
            budget.setdefault(entry, rooms[device] + held)
    packing = DevicePacking(
        pieces_of(model, getattr(model, "_no_split_modules", None), dtype),
        {**budget, HOST: family_of(HOST).free_memory()},
    )
    packing.run()
    wanted = ", ".join(f"{needed[device]} on {device} ({rooms[device]} are free)" for device in missing)
    raise SettingError(
        f"Cannot place {type(model).__name__} by its device map: "
        f"{', '.join(f'{size} bytes are missing on {device}' for device, size in missing.items())}.",
        f"The weights that the map places there take {wanted}.",
        f"Free memory, or use the nearest device map that fits: {_nearest(packing)}. Its parts for 'disk', if it has "
        "any, need a folder.",
    )


def _room_of(device: torch.device, size: int) -> int | None:
    """Bytes that a device has for `size` bytes; None if it does not report its memory."""
    family = family_of(device)
    try:
        if family is family_of(HOST):
            return family.total_memory()
        room = family.free_memory(device.index)
        if room < size:
            # Memory in the cache of torch's allocator counts as free.
            family.empty_cache()
            room = family.free_memory(device.index)
        return room
    except NotOffered:
        return None


def _missing_for_buffers(packing: DevicePacking) -> int:
    """Bytes of the buffers of offloaded modules, which stay on an accelerator, if none has room for them; else 0."""
    offloaded = [p.piece for p in packing.placements if p.device in OFFLOADED]
    buffers = sum(piece.buffers for piece in offloaded)
    rooms = [packing.left[device] for device in packing.left if device not in OFFLOADED]
    return buffers if rooms and buffers > max(rooms) else 0


def clean_device_map(device_map: Mapping[str, Any], module_name: str = "") -> dict[str, Any]:
    """Simplify a device map: one entry for each name with everything below it on one device.

    Args:
        module_name: simplify only entries below this name.

    Example:
        >>> clean_device_map({"a.b": 0, "a.c": 0, "d": "cpu"})
        {'a': 0, 'd': 'cpu'}
    """
    if not module_name:
        return _simplified(device_map)
    inside = {name: device for name, device in device_map.items() if f"{name}.".startswith(f"{module_name}.")}
    cut = len(module_name) + 1
    cleaned = _simplified({name[cut:]: device for name, device in inside.items()})
    merged = {f"{module_name}.{name}" if name else module_name: device for name, device in cleaned.items()}
    return {**{name: device for name, device in device_map.items() if name not in inside}, **merged}


def _simplified(device_map: Mapping[str, Any]) -> dict[str, Any]:
    """One pass: which devices each name has below it, then the highest names that put several entries on one."""
    first: dict[str, Any] = {}
    several, mixed = set[str](), set[str]()
    prefixes_of = _Prefixes()
    for name, device in device_map.items():
        for prefix in prefixes_of[name]:
            if prefix not in first:
                first[prefix] = device
                continue
            several.add(prefix)
            if first[prefix] != device:
                mixed.add(prefix)
    merged = several - mixed
    result: dict[str, Any] = {}
    for name, device in device_map.items():
        result.setdefault(next((prefix for prefix in prefixes_of[name] if prefix in merged), name), device)
    return result


class _Prefixes(dict[str, tuple[str, ...]]):
    """Names of all modules above each name, from the root down, and the name itself."""

    def __missing__(self, name: str) -> tuple[str, ...]:
        made = self[name] = (*self[name.rpartition(".")[0]], name) if name else ("",)
        return made


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that a device map covers the model, and warn about entries that match nothing in it, which are ignored.

    Args:
        model: the model.
        device_map: devices by the names of modules and tensors; a name covers all below it.

    Raises:
        SettingError: it names a device that does not exist, or leaves tensors without a device.
    """
    failure = f"Cannot place {type(model).__name__} by a device map with {len(device_map)} entries."
    warn_of_unknown_names(model, device_map)
    device_map = matching_entries(model, device_map)
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors = [*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))]
    for device in set(device_map.values()):
        _check_form(failure, device)
    persistent = {*model.state_dict(keep_vars=True), *parameters}
    left = [name for name in tensors if name in persistent and device_of_name(name, device_map) is None]
    if left:
        more = f", and {len(left) - 10} more" if len(left) > 10 else ""
        raise SettingError(
            failure, f"It has no device for: {', '.join(left[:10])}{more}.", 'Add them, or an entry "" for the rest.'
        )


V = TypeVar("V")


def matching_entries(model: nn.Module, entries: Mapping[str, V]) -> dict[str, V]:
    """The entries whose keys are names of modules or tensors of a model."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names.update(name for name, _ in model.named_parameters(remove_duplicate=False))
    names.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    return {name: entry for name, entry in entries.items() if name in names}


def warn_of_unknown_names(model: nn.Module, entries: Mapping[str, Any]) -> None:
    """Warn about keys that are not names of modules or tensors of a model."""
    unknown = entries.keys() - matching_entries(model, entries).keys()
    if unknown:
        warnings.warn(
            f"These device_map keys do not match any submodules or tensors of {type(model).__name__}: "
            f"{', '.join(name for name in entries if name in unknown)}. They are ignored; correct or remove them.",
            UserWarning,
            stacklevel=stack_level(),
        )


def _check_form(failure: str, device: Any) -> None:
    index = as_int(device)
    if device == "disk" or (index is not None and index >= 0):
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingError(
            failure, f"{device!r} is not a device.", 'Use an index, "cpu", "disk" or a torch device.'
        ) from error


def resolve_device(device: Device) -> torch.device:
    """The torch device of an entry of a device map; an index means an accelerator of the best family here.

    Raises:
        SettingError: there is no such device here, or it is "disk".
    """
    failure = f"Cannot use the device {device!r}."
    family = None if as_int(device) is None else best_family()
    if device == "disk" or (family is not None and family is family_of("cpu")):
        obstacle = "Modules cannot compute on the disk." if device == "disk" else "This machine has no accelerator."
        raise SettingError(failure, obstacle, 'Use "cpu" or a device of this machine.')
    resolved = torch.device(family.name, int(device)) if family is not None else torch.device(device)  # type: ignore[arg-type]
    if resolved.type == "meta":
        return resolved
    family = family_of(resolved)
    if not family.present() or (resolved.index or 0) >= max(family.count(), 1):
        raise SettingError(
            failure,
            f"{family.count() if family.present() else 0} of its kind are in this machine.",
            "Use another index.",
        )
    return resolved


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are the same.

    Args:
        first_device: a device; without an index, number 0 of its kind.
        second_device: the other device, in the same form.
    """
    if first_device.type != second_device.type:
        return False
    if first_device.index is not None and second_device.index is not None:
        return first_device.index == second_device.index
    return (first_device.index or 0) == (second_device.index or 0)


_MATPLOTLIB = Requirement("matplotlib")
_WIDTH = 40


@dataclass(frozen=True)
class DeviceMapReport:
    """A device map with its reasons; printing it shows the table and the bars.

    Args:
        device_map: name to device, with one entry for each name with everything below it on one device.
        blocks: the same without an entry for the whole model.
        placements: each piece in the order in which it was placed, with device and reason.
        budget: largest number of bytes on each device.
        used: bytes in use on each device.
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
        """One bar for each device: the used part of its budget."""
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
        _MATPLOTLIB.demand(f"Cannot draw the device map in {os.fspath(path)!r}.")
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
