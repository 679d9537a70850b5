"""Creates device maps: divides a model into pieces, packs them onto devices within their budgets, and says why.

A piece stays on one device: a layer, an unsplit block or a single tensor, with everything that shares its weights.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import (
    DISK,
    HOST,
    OFFLOADED,
    DeviceMap,
    check_device_same,
    clean_device_map,
    prefixes_of_names,
    resolve_device,
)
from accel_bigmodel.sizes import Dtype, byte_counter, convert_bytes, convert_file_size_to_int, measure
from accel_state.devices.select import best_family, family_of
from accel_state.errors import NotOffered, SettingError
from accel_state.library import stack_level
from accel_state.settings.integers import as_int

__all__ = (
    "DeviceMapReport",
    "DevicePacking",
    "MaxMemory",
    "Misfit",
    "Piece",
    "Placement",
    "check_room",
    "device_map_by_policy",
    "explain_device_map",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "pieces_of",
)

_log: Final = logging.getLogger(__name__)
_POLICIES: Final = ("auto", "balanced", "balanced_low_0", "sequential")
_BAR_WIDTH: Final = 40

MaxMemory: TypeAlias = "Mapping[int | str, float | str]"
"""Device (index of an accelerator, "cpu", "disk") to bytes, or text such as "10GB"."""


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


def device_map_by_policy(
    model: nn.Module,
    device_map: str | DeviceMap | None,
    max_memory: MaxMemory | None,
    no_split_module_classes: Sequence[str] | None,
    dtype: Dtype | None,
    offload_buffers: bool,
    special_dtypes: Mapping[str, Any] | None = None,
) -> DeviceMap | None:
    """The device map that a policy creates, or the given one."""
    if not isinstance(device_map, str):
        return device_map
    if device_map not in _POLICIES:
        raise SettingError(
            f"Cannot create a device map with the policy {device_map!r}.",
            f"The policies are {', '.join(_POLICIES)}.",
            "Use one of them, or pass a mapping.",
        )
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero)
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, offload_buffers=offload_buffers
    )


def explain_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMapReport:
    """Report how `infer_auto_device_map` places a model with the same arguments; print the report.

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
    return DeviceMapReport(
        clean_device_map(blocks), blocks, tuple(packing.placements), dict(budget), dict(packing.used)
    )


def _blocks(packing: DevicePacking) -> dict[str, Any]:
    """Devices by the highest names that were not split: everything below is on the device that was being filled."""
    by_name = {name: placement for placement in packing.placements for name in placement.piece.names}
    placed = {name: by_name[name] for piece in packing.pieces for name in piece.names}
    reached: dict[str, Any] = {}
    split = {""}
    prefixes_of = prefixes_of_names()
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
    nearest = clean_device_map(_blocks(packing))
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
    measured = measure(model, byte_counter(dtype, special_dtypes), frozenset(no_split_module_classes or ()))
    total = measured.sizes[""]
    layer = sum(measured.layers) // max(len(measured.layers), 1)
    share = total // (len(indices) - 1 if low_zero else len(indices)) + int(1.25 * max(measured.largest_block, layer))
    for device in indices[:-1]:
        budget[device] = min(budget[device], share)
    if low_zero:
        others = sum(budget[device] for device in indices[1:])
        budget[indices[0]] = min(budget[indices[0]], max(0, total - others))
    return budget


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


class Misfit(NamedTuple):
    """A piece that does not fit on any device, and the bytes that are left on each; None means without a limit."""

    piece: Piece
    left: Mapping[int | str, int | None]


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
        misfit: the first piece that does not fit on any device; it and the later ones are on the last device, above its
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
                for fallback in moved:
                    self._place(fallback, device, "the next piece did not fit", device)
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
            filled = round(_BAR_WIDTH * used / budget) if budget else 0
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            lines.append(f"{device!s:>6}  [{bar}] {convert_bytes(used)} of {convert_bytes(budget)}")
        return "\n".join(lines)


def _row(run: tuple[Placement, ...]) -> tuple[str, str, str, str]:
    names = [name for placement in run for name in placement.piece.names]
    label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
    size = sum(placement.piece.size for placement in run)
    return label, convert_bytes(size), str(run[0].device), run[0].reason
