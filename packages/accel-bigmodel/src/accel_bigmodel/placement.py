"""Packs a model onto devices: the budget of each device in bytes, and the device of each piece, with the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from accel_bigmodel.sizes import Dtype, byte_counter, convert_bytes, convert_file_size_to_int, measure
from accel_state.devices.select import best_family, family_of
from accel_state.errors import SettingError
from accel_state.settings.integers import as_int

__all__ = (
    "HOST",
    "OFFLOADED",
    "DevicePacking",
    "MaxMemory",
    "Misfit",
    "Piece",
    "Placement",
    "fallback_allocate",
    "get_balanced_memory",
    "get_max_memory",
    "get_module_size_with_ties",
    "pieces_of",
)

MaxMemory: TypeAlias = "Mapping[int | str, float | str]"
"""Device (index of an accelerator, "cpu", "disk") to bytes, or text such as "10GB"."""

HOST = "cpu"
OFFLOADED = (HOST, "disk")
"""Devices of a device map that are not accelerators, in the order in which they fill up."""


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[int | str, int]:
    """Budgets in bytes by device: the given ones, in the order accelerators, cpu, disk; if None, the free memory.

    Text in the given dict is replaced by its number of bytes, because transformers continues to use that dict.

    Raises:
        SettingError: a device is neither an index, "cpu" nor "disk", or a size is not valid.

    Example:
        >>> get_max_memory({"cpu": "1GB", 0: "2GB"})
        {0: 2000000000, 'cpu': 1000000000}
    """
    if max_memory is None:
        family, host = best_family(), family_of(HOST)
        free: dict[int | str, int] = {} if family is host else {i: family.free_memory(i) for i in range(family.count())}
        return {**free, HOST: host.free_memory()}
    sizes = {device: convert_file_size_to_int(size) for device, size in max_memory.items()}
    unknown = [device for device in sizes if not _is_index(device) and device not in OFFLOADED]
    if unknown:
        raise SettingError(
            f"Cannot use a memory budget for the device {unknown[0]!r}.",
            "The keys of a budget are indices of accelerators, 'cpu' and 'disk'.",
            'Write max_memory={0: "10GB", "cpu": "30GB"}.',
        )
    if isinstance(max_memory, dict):
        max_memory.update(sizes)
    return {device: sizes[device] for device in sorted(sizes, key=_order)}


def _is_index(device: Any) -> bool:
    index = as_int(device)
    return index is not None and index >= 0


def _order(device: int | str) -> tuple[int, int]:
    return (1, OFFLOADED.index(device)) if isinstance(device, str) else (0, device)


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Budgets under which `infer_auto_device_map` spreads a model evenly over the accelerators.

    Each except the last gets its share plus five quarters of a block (the largest unsplit one, or a layer of mean size
    if that is larger), because blocks do not divide evenly.

    Args:
        max_memory: upper limits; if None, the free memory.
        no_split_module_classes: names of classes that stay in one piece.
        dtype: count floating-point weights in this dtype.
        special_dtypes: dtypes of single weights, by full name.
        low_zero: keep the first accelerator as empty as possible, for the memory that generation needs there.
    """
    budget = get_max_memory(max_memory)
    indices = [device for device in budget if _is_index(device) and budget[device] > 0]
    if len(indices) < 2:
        return budget
    found = measure(model, byte_counter(dtype, special_dtypes), frozenset(no_split_module_classes or ()))
    total = found.sizes[""]
    layer = sum(found.layers) // max(len(found.layers), 1)
    share = total // (len(indices) - 1 if low_zero else len(indices)) + int(1.25 * max(found.largest_block, layer))
    for device in indices[:-1]:
        budget[device] = min(budget[device], share)
    if low_zero:
        others = sum(budget[device] for device in indices[1:])
        budget[indices[0]] = min(budget[indices[0]], max(0, total - others))
    return budget


DISK = "disk"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Piece:
    """A unit on one device: a layer, an unsplit block or a single tensor, with everything that shares its weights.

    Args:
        names: names of the modules and tensors, in the order of the model.
        sizes: bytes of each one separately.
        size: bytes of all, shared weights counted once.
        buffers: bytes of the buffers among them.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    size: int
    buffers: int

    @property
    def largest(self) -> tuple[int, str]:
        """Bytes and name of its largest layer."""
        if len(self.names) == 1:
            return self.sizes[0], self.names[0]
        return max(zip(self.sizes, self.names, strict=True), key=lambda pair: pair[0])


class Placement(NamedTuple):
    """The device of a piece, and the reason.

    Args:
        piece: the piece.
        device: the device of the piece.
        reason: the reason for this device.
        reached: the device that was being filled when the packing reached the piece.
    """

    piece: Piece
    device: int | str
    reason: str
    reached: int | str


def pieces_of(
    model: nn.Module,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
) -> list[Piece]:
    """The pieces of a model in its order, from one walk over its modules."""
    walk = _Walk(frozenset(no_split_module_classes or ()), byte_counter(dtype, special_dtypes))
    walk.visit("", model)
    sizes, buffers = walk.sizes, walk.buffers
    # A large model has many pieces; the garbage collector does not track tuples of numbers and texts.
    pieces = []
    for members in _tied_together(walk.layers):
        if len(members) == 1:
            ((name, keys),) = members
            size = sum(map(sizes.__getitem__, keys))
            piece = Piece((name,), (size,), size, 0)
        else:
            names = tuple([name for name, _ in members])
            own_sizes = tuple([sum(map(sizes.__getitem__, own)) for _, own in members])
            keys = tuple(set(chain.from_iterable(own for _, own in members)))
            piece = Piece(names, own_sizes, sum(map(sizes.__getitem__, keys)), 0)
        if buffers:
            piece.buffers = sum([sizes[key] for key in keys if key in buffers])
        pieces.append(piece)
    return pieces


_Layer: TypeAlias = "tuple[str, tuple[int, ...]]"
"""Name of a layer, block or tensor, and the identities of its tensors."""


class _Walk:
    """One pass over a model: its layers, unsplit blocks and single tensors, each with the identities of its tensors."""

    def __init__(self, unsplit: frozenset[str], count: Callable[[str, Tensor], int]) -> None:
        self.unsplit, self.count = unsplit, count
        self.layers: list[_Layer] = []
        self.sizes: dict[int, int] = {}
        self.buffers: set[int] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        # If a module has several names, each one counts, unlike in named_children().
        if name and (not module._modules or type(module).__name__ in self.unsplit):
            keys: set[int] = set()
            self._collect(f"{name}.", module, keys)
            self.layers.append((name, tuple(keys)))
            return
        prefix = f"{name}." if name else ""
        self._add_each(prefix, module._parameters)
        for child, inner in module._modules.items():
            if inner is not None:
                self.visit(prefix + child, inner)
        if module._buffers:
            self._add_each(prefix, module._buffers)
            self.buffers.update(map(id, module._buffers.values()))

    def _add_each(self, prefix: str, tensors: Mapping[str, Tensor | None]) -> None:
        for leaf in tensors:
            if tensors[leaf] is not None:
                keys: set[int] = set()
                self._note(prefix, {leaf: tensors[leaf]}, keys)
                self.layers.append((prefix + leaf, tuple(keys)))

    def _collect(self, prefix: str, module: nn.Module, keys: set[int]) -> None:
        if module._parameters:
            self._note(prefix, module._parameters, keys)
        if module._buffers:
            self._note(prefix, module._buffers, keys)
            self.buffers.update(map(id, module._buffers.values()))
        for child, inner in module._modules.items():
            if inner is not None:
                self._collect(f"{prefix}{child}.", inner, keys)

    def _note(self, prefix: str, tensors: Mapping[str, Tensor | None], keys: set[int]) -> None:
        """Add the identities of tensors to `keys`, and their sizes to those that are known."""
        sizes, count = self.sizes, self.count
        for leaf, tensor in tensors.items():
            if tensor is not None:
                key = id(tensor)
                keys.add(key)
                if key not in sizes:
                    sizes[key] = count(prefix + leaf, tensor)


def _tied_together(layers: Sequence[_Layer]) -> Iterable[Sequence[_Layer]]:
    """The layers, those that share tensors directly or through others in one group, in the order of their first."""
    members = [keys for _, keys in layers]
    if sum(map(len, members)) == len(set[int]().union(*members)):
        return ((layer,) for layer in layers)
    root = list(range(len(members)))

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    first: dict[int, int] = {}
    for number, keys in enumerate(members):
        for key in keys:
            a, b = sorted((find(first.setdefault(key, number)), find(number)))
            root[b] = a
    groups: dict[int, list[_Layer]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault(find(number), []).append(layer)
    return groups.values()


@dataclass
class DevicePacking:
    """Fills devices one after the other, in the order of the model, within the budgets.

    The first accelerator and the host also reserve room for the largest layer that is not yet placed: an offloaded
    layer is loaded there for its forward.

    Args:
        pieces: what to place.
        budget: bytes by device, in the order in which devices fill up; the disk has no limit unless one is given.
        fallback: if the first accelerator or the host would stay empty because the next piece is too large, place the
            first piece there that fits.
        used: bytes taken on each device.
        left: bytes that were free on each device that was full, without those kept for the layers after the next piece.
        misfit: the first piece that no device had room for; it and the later ones are on the last device, above its
            budget. None when everything fits.
    """

    pieces: Sequence[Piece]
    budget: Mapping[int | str, int]
    fallback: bool = False
    used: dict[int | str, int] = field(default_factory=dict)
    left: dict[int | str, int] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    misfit: Misfit | None = None

    def __post_init__(self) -> None:
        accelerators = [device for device in self.budget if device not in OFFLOADED]
        self._reserving = {*accelerators[:1], HOST}
        self._devices = [*self.budget, *([] if DISK in self.budget else [DISK])]

    def run(self) -> list[Placement]:
        """Place everything."""
        devices = self._devices
        self.used = dict.fromkeys(devices, 0)
        waiting = list(self.pieces)
        rest = _largest_after(waiting)
        position, number, passed = 0, 0, ""
        reached = devices[0]
        empty: dict[int | str, int] = {}
        while number < len(waiting):
            piece, device = waiting[number], devices[position]
            if self.misfit is not None or self._fits(piece.size, device, rest[number + 1]):
                self._place(piece, device, passed, reached)
                number += 1
                reached = device
                continue
            passed = self._obstacle(piece, device, rest[number + 1])
            moved = self._fall_back(waiting, number, device) if self.fallback else []
            if moved:
                waiting[number:] = [*moved, *(other for other in waiting[number:] if other not in moved)]
                rest = _largest_after(waiting)
                for found in moved:
                    self._place(found, device, "the next piece did not fit", device)
                number += len(moved)
            self.left[device] = self._room(device, rest[number + 1][0]) or 0
            if not self.used[device]:
                empty[device] = piece.size + (rest[number + 1][0] if device in self._reserving else 0)
            position += 1
            if position == len(devices):
                position -= 1
                self.misfit = Misfit(piece, {device: self.free(device) for device in devices})
        if self.misfit is None:
            _log_empty(empty, self.budget)
            self._warn_of_no_room()
        return self.placements

    @property
    def missing(self) -> int:
        """Bytes that are missing on the last device."""
        return -(self.free(self._devices[-1]) or 0) if self.misfit is not None else 0

    @property
    def execution_device(self) -> int | str:
        """The device that computes offloaded layers: the first accelerator with weights, else the host."""
        return next((device for device in self.used if device not in OFFLOADED and self.used[device]), HOST)

    def free(self, device: int | str) -> int | None:
        """Bytes left on a device; None without a limit."""
        return self.budget[device] - self.used[device] if device in self.budget else None

    def _room(self, device: int | str, largest_later: int) -> int | None:
        if device not in self.budget:
            return None
        free = self.budget[device] - self.used[device]
        return free - largest_later if device in self._reserving else free

    def _fits(self, size: int, device: int | str, later: tuple[int, str]) -> bool:
        room = self._room(device, later[0])
        return room is None or size <= room

    def _place(self, piece: Piece, device: int | str, passed: str, reached: int | str) -> None:
        self.used[device] += piece.size
        self.placements.append(Placement(piece, device, passed or "it fits", reached))

    def _obstacle(self, piece: Piece, device: int | str, later: tuple[int, str]) -> str:
        free, room = self.free(device) or 0, self._room(device, later[0]) or 0
        reserved = f", {convert_bytes(free - room)} of them kept to load {later[1]!r}" if room < free else ""
        return f"{convert_bytes(piece.size)} did not fit on {device}: {convert_bytes(free)} left{reserved}"

    def _fall_back(self, waiting: Sequence[Piece], number: int, device: int | str) -> list[Piece]:
        """The pieces of the first module that fits, where modules are looked at from the outside in."""
        if self.used[device] or device not in self._reserving:
            return []
        later = max(piece.largest for piece in waiting[number:])
        first = [piece.names[0] for piece in waiting]
        for index in range(number, len(waiting)):
            parts = first[index].split(".")
            for count in range(1, len(parts) + 1):
                name = ".".join(parts[:count])
                inside = [p for p, own in zip(waiting, first, strict=True) if f"{own}.".startswith(f"{name}.")]
                if inside[0] is waiting[index] and self._fits(sum(piece.size for piece in inside), device, later):
                    return inside
        return []

    def _warn_of_no_room(self) -> None:
        """Warn if the device that computes offloaded layers has no room for one of them."""
        device = self.execution_device
        offloaded = [p.piece.largest for p in self.placements if p.device in OFFLOADED and p.device != device]
        if not offloaded or device not in self.budget:
            return
        size, name = max(offloaded)
        if size > (self.free(device) or 0):
            _log.warning(
                "%s has insufficient memory to compute the offloaded layer %r, which needs %s; %s are left under the "
                "budget %s. Raise its budget, or offload more of the model.",
                device,
                name,
                convert_bytes(size),
                convert_bytes(self.free(device) or 0),
                dict(self.budget),
            )


def _log_empty(needed: Mapping[int | str, int], budget: Mapping[int | str, int]) -> None:
    """Name the devices that stay empty, with the bytes that they need for the first piece."""
    if needed:
        each = ", ".join(
            f"{device} ({convert_bytes(size)} required, {convert_bytes(budget[device])} in the budget)"
            for device, size in needed.items()
        )
        _log.info("No part of the model is placed on these devices because of insufficient memory: %s.", each)


class Misfit(NamedTuple):
    """A piece that no device had room for, and the bytes that were left on each; None where there is no bound."""

    piece: Piece
    left: Mapping[int | str, int | None]


def _largest_after(pieces: Sequence[Piece]) -> list[tuple[int, str]]:
    """For each number, the largest layer among the pieces from there on; one entry more than there are pieces."""
    largest = (0, "")
    after = [largest]
    for piece in reversed(pieces):
        # A piece takes at least as much as its largest layer.
        if piece.size > largest[0]:
            largest = max(largest, piece.largest, key=lambda pair: pair[0])
        after.append(largest)
    return after[::-1]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Bytes of a module together with the modules that share its weights, and the names and modules of these.

    Args:
        tied_params: names of parameters of other modules that the module shares.
        module_size: bytes of the module itself.
        module_sizes: bytes by name, as `compute_module_sizes` returns them.
        modules_to_treat: names and modules to search for the others.

    Raises:
        SettingError: none of them has one of the parameters.
    """
    names, modules = list[str](), list[nn.Module]()
    for tied in tied_params:
        found = next(((name, module) for name, module in modules_to_treat if tied.startswith(f"{name}.")), None)
        if found is None:
            raise SettingError(
                f"Cannot count the parameter {tied!r} with the module that shares it.",
                "None of the given modules has it.",
                "Pass the modules that have no device yet.",
            )
        module_size += module_sizes[found[0]] - module_sizes[tied]
        names.append(found[0])
        modules.append(found[1])
    return module_size, names, modules


def fallback_allocate(
    modules: list[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | None, list[tuple[str, nn.Module]]]:
    """The first module, or part of a module, that is small enough, and the list without it.

    Args:
        modules: names and modules, in the order of the search.
        module_sizes: bytes by name, as `compute_module_sizes` returns them.
        size_limit: bytes, or text such as "1GB".
        no_split_module_classes: names of classes of modules that are never split.
        tied_parameters: groups of names of shared parameters, counted with the module that is taken.
    """
    limit, ties = convert_file_size_to_int(size_limit), tied_parameters or ()
    for number, (name, module) in enumerate(modules):
        before, after = modules[:number], modules[number + 1 :]
        if _size_with_ties(name, [*before, *after], module_sizes, ties) <= limit:
            return name, module, [*before, *after]
        if isinstance(module, nn.Module) and type(module).__name__ not in (no_split_module_classes or ()):
            parts = [(f"{name}.{child}", inner) for child, inner in module.named_children()]
            found, part, left = fallback_allocate(parts, module_sizes, limit, no_split_module_classes, ties)
            if found is not None:
                return found, part, [*before, *left, *after]
    return None, None, modules


def _size_with_ties(
    name: str,
    others: Sequence[tuple[str, nn.Module]],
    sizes: Mapping[str, int],
    groups: Sequence[Sequence[str]],
) -> int:
    shared = [
        tied
        for group in groups
        if any(one.startswith(f"{name}.") for one in group)
        for tied in group
        if not tied.startswith(f"{name}.") and any(tied.startswith(f"{other}.") for other, _ in others)
    ]
    return get_module_size_with_ties(shared, sizes[name], sizes, others)[0]
