"""The plan of a collective: which leaves travel packed, which by themselves, and what all processes must agree on.

It depends on structure, shapes and dtypes alone, so it is made once for each and looked up afterwards. Leaves are put
in the order of their paths; processes whose dictionaries were filled in different orders therefore agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from accel_ops.packing import Packing
from accel_state.errors import SettingError, UnknownKind
from accel_state.protocol.descriptions import Description, fingerprint_of
from accel_state.transport.base import Transport

__all__ = ("LARGE", "Plan", "check_divisible", "check_leaf", "check_rank", "plan_for")

LARGE: Final = 256 * 1024
"""Bytes above which a leaf travels by itself, straight into its final tensor; below, packing with others is quicker."""


class Plan:
    """How the leaves of one structure travel.

    Attributes:
        description: what must be equal on all processes.
        fingerprint: its hash.
        order: positions of the leaves in the order of their paths.
        small: positions of the leaves that travel packed, in that order.
        large: positions of the others, in that order.
        packing: the layout of the small ones.
        devices: where the leaves lie, as far as that is not where the transport moves tensors; else empty.
    """

    __slots__ = ("description", "devices", "fingerprint", "large", "order", "packing", "small")

    def __init__(
        self,
        description: Description,
        paths: Sequence[str],
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        world_size: int,
    ) -> None:
        self.description = description
        self.fingerprint = fingerprint_of(description)
        self.order = tuple(sorted(range(len(leaves)), key=paths.__getitem__))
        self.small = tuple(position for position in self.order if leaves[position].nbytes <= LARGE)
        self.large = tuple(position for position in self.order if leaves[position].nbytes > LARGE)
        small = ((leaves[position].shape, leaves[position].dtype) for position in self.small)
        self.packing = Packing(small, world_size)
        foreign = any(leaf.device != device for leaf in leaves)
        self.devices = tuple(leaf.device for leaf in leaves) if foreign else ()

    def pack(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The small leaves in one new buffer, uint8 of shape (packing.nbytes,)."""
        buffer = self.empty_pack(leaves)
        self.packing.write([leaves[position] for position in self.small], buffer)
        return buffer

    def empty_pack(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """An uninitialised buffer for the small leaves, where they lie."""
        return torch.empty(self.packing.nbytes, dtype=torch.uint8, device=leaves[0].device)


def plan_for(
    operation: str,
    arguments: dict[str, str],
    paths: Sequence[str],
    leaves: Sequence[torch.Tensor],
    shapes: Sequence[Any],
    device: torch.device,
    world_size: int,
    check: Callable[[str, torch.Tensor, str], None],
) -> Plan:
    """Make the plan for the leaves of nested data.

    Args:
        operation: name of the collective.
        arguments: those that must be equal on all processes.
        paths: of the leaves.
        leaves: as `flatten` found them.
        shapes: the part of each leaf's shape that must be equal on all processes.
        device: where the transport moves tensors.
        world_size: number of processes.
        check: raises when a leaf, given with path and operation, cannot take part.
    """
    told = []
    for path, leaf, shape in zip(paths, leaves, shapes, strict=True):
        check(path, leaf, operation)
        told.append((path, str(tuple(shape) if isinstance(shape, torch.Size) else shape), str(leaf.dtype)))
    return Plan(Description(operation, arguments, sorted(told)), paths, leaves, device, world_size)


def check_leaf(path: str, leaf: torch.Tensor, operation: str) -> None:
    """Let a leaf pass whose storage is simply its elements.

    Raises:
        UnknownKind: for other leaves; the path is named.
    """
    if leaf.layout is not torch.strided or leaf.is_nested:
        obstacle, remedy = "a sparse or nested tensor", "Convert it with .to_dense() or to_padded_tensor() first."
    elif leaf.is_quantized:
        obstacle, remedy = "a quantized tensor", "Give its .int_repr() or .dequantize() instead."
    elif leaf.is_meta:
        obstacle, remedy = "a meta tensor, which has no contents", "Materialise it first, for example with .to_empty()."
    elif type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        obstacle, remedy = f"of the tensor subclass {type(leaf).__name__}", "Give the plain tensors that it is made of."
    else:
        return
    raise UnknownKind(
        f"{operation}() was given nested data that it cannot use.",
        f"{f'The leaf {path}' if path else 'The value'} is {obstacle}.",
        remedy,
    )


def check_divisible(path: str, leaf: torch.Tensor, operation: str, count: int) -> None:
    """Let a leaf pass that can be split evenly along its first dimension.

    Raises:
        SettingError: for other leaves; the path is named.
    """
    if leaf.dim() == 0 or leaf.shape[0] % count:
        raise SettingError(
            f"{operation}() was to split {path or 'a tensor'} of shape {tuple(leaf.shape)} between {count} processes.",
            "Its first dimension is not a multiple of that." if leaf.dim() else "It has no dimension to split.",
            "Pad it first, for example with pad_input_tensors().",
        )


def check_rank(operation: str, name: str, rank: int | None, transport: Transport) -> None:
    """Refuse a rank that no process has.

    Raises:
        SettingError: there is no such process.
    """
    if rank is not None and not 0 <= rank < transport.world_size:
        raise SettingError(
            f"{operation}() was called with {name}={rank}.",
            f"There are {transport.world_size} processes, with ranks from 0.",
            f"Give a rank from 0 to {transport.world_size - 1}.",
        )
