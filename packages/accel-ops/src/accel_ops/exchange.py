"""The protocol of a checked collective.

    with CheckedCall(transport, "gather", {}) as call:     # logged; calls of other threads wait
        plan, leaves = call.plan(data)              # what must agree, and how it travels
        rows = call.agree(plan, leaves)             # slots exchanged and compared: after this, sizes are equal
        ...                                         # data that did not fit moves
        call.wait(works)

What fails before `agree` is told to the other processes in place of it, so that they raise too instead of waiting.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from accel_ops.plan import Plan, check_leaf, plan_for
from accel_ops.tree import Structure, flatten, leaves_with_paths
from accel_ops.whole import is_dtensor, placement_of, whole
from accel_state.errors import UnknownKind
from accel_state.protocol.call import HeaderCall
from accel_state.protocol.descriptions import fingerprint_of

__all__ = ("CheckedCall", "check_alone")

_HOST: Final = torch.device("cpu")
_PLANS_KEPT: Final = 1024


class CheckedCall(HeaderCall):
    """One checked collective; a context manager.

    Args:
        transport: between more than one process.
        operation: name of the function that the user called.
        arguments: what must be equal on all processes, by name.
    """

    __slots__ = ()

    def plan(
        self,
        data: Any,
        shape_of: Callable[[torch.Tensor], Any] | None = None,
        check: Callable[[str, torch.Tensor, str], None] = check_leaf,
        move: bool = True,
    ) -> tuple[Plan, list[torch.Tensor]]:
        """How nested data travel, and their leaves where the transport can move them.

        Args:
            data: nested data with tensors alone at its leaves.
            shape_of: the part of a leaf's shape that must be equal on all processes; by default all of it.
            check: raises when a leaf, given with path and operation, cannot take part.
            move: bring the leaves to where the transport moves tensors.

        Raises:
            UnknownKind: a leaf cannot travel.
        """
        leaves, structure = flatten(data, self._operation)
        return self.plan_of(data, leaves, structure, shape_of, check, move)

    def plan_of(
        self,
        data: Any,
        leaves: list[torch.Tensor],
        structure: Structure,
        shape_of: Callable[[torch.Tensor], Any] | None = None,
        check: Callable[[str, torch.Tensor, str], None] = check_leaf,
        move: bool = True,
    ) -> tuple[Plan, list[torch.Tensor]]:
        """Like `plan`, for data whose leaves and structure `flatten` has found already."""
        if any(is_dtensor(leaf) for leaf in leaves if type(leaf) is not torch.Tensor):
            leaves = self._whole(data, leaves)
        plan = self._plan(data, leaves, structure, shape_of, check)
        if move and plan.devices:
            leaves = [leaf.to(self._transport.device) for leaf in leaves]
        return plan, leaves

    def fits(self, plan: Plan) -> bool:
        """Whether the small leaves, if there are any, travel in the slot itself, which lies on the CPU."""
        nbytes = plan.packing.nbytes
        return not nbytes or (nbytes <= self._exchange.slot.capacity and self._transport.device == _HOST)

    def agree(self, plan: Plan, leaves: Sequence[torch.Tensor] | None = None) -> torch.Tensor | None:
        """Meet the other processes and check that all have the same plan.

        Args:
            plan: that of this process.
            leaves: all leaves, if the small ones are to go along where they fit.

        Returns:
            The small leaves of all processes, uint8 of shape (world_size, packing.nbytes), valid inside of this call;
            None when they do not fit.

        Raises:
            ShapeMismatch: on every process, when the plans differ.
            CollectiveError: a process did not come.
        """
        slot, nbytes = self._exchange.slot, plan.packing.nbytes
        along = self.fits(plan)
        if along and leaves is not None:
            plan.packing.write([leaves[position] for position in plan.small], slot.payload(nbytes))
        self._meet(plan.fingerprint, plan.description, nbytes if along else 0)
        return slot.rows(nbytes) if along else None

    def swap_numbers(self, plan: Plan, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """One number for each leaf of the plan, of all processes, by rank."""
        layout = struct.Struct(f"<{len(numbers)}q")
        return [layout.unpack(row) for row in self._swap(plan.fingerprint, plan.description, layout.pack(*numbers))]

    def bytes_of(self, data: bytes | None, src: int) -> bytes:
        """The bytes of process `src`; the others give None."""
        slot = self._exchange.slot
        length = 0 if data is None else len(data)
        if data is not None and length <= slot.capacity:
            slot.write(data)
        self._meet(*self._bare(), length)
        length = slot.lengths()[src]
        if length <= slot.capacity:
            return slot.row(src, length)
        buffer = torch.empty(length, dtype=torch.uint8)
        if data is not None:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        buffer = buffer.to(self._transport.device)
        self.wait([self._transport.broadcast(buffer, src)])
        return buffer.cpu().numpy().tobytes()

    def _whole(self, data: Any, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """All DTensors as whole tensors, once all processes were seen to have the same: making one is a collective."""
        paths = [path for path, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)]
        spread = [
            (path, placement_of(leaf), str(leaf.dtype))
            for path, leaf in zip(paths, leaves, strict=True)
            if is_dtensor(leaf)
        ]
        description = self._describe(sorted(spread))
        self._meet(fingerprint_of(description), description, 0)
        self._met = False
        return [whole(leaf) if is_dtensor(leaf) else leaf for leaf in leaves]

    def _plan(
        self,
        data: Any,
        leaves: Sequence[torch.Tensor],
        structure: Structure,
        shape_of: Callable[[torch.Tensor], Any] | None,
        check: Callable[[str, torch.Tensor, str], None],
    ) -> Plan:
        shapes = self._shapes(data, leaves, shape_of)
        key = (
            self._operation,
            tuple(self._arguments.items()),
            structure,
            shapes,
            tuple([leaf.dtype for leaf in leaves]),
            tuple([leaf.device for leaf in leaves]),
            tuple([leaf.layout for leaf in leaves]),
            tuple(map(type, leaves)),
        )
        plans = self._exchange.plans
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= _PLANS_KEPT:
                plans.clear()
            paths = [path for path, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)]
            device, world_size = self._transport.device, self._transport.world_size
            plan = plan_for(self._operation, self._arguments, paths, leaves, shapes, device, world_size, check)
            plans[key] = plan
        return plan

    def _shapes(
        self, data: Any, leaves: Sequence[torch.Tensor], shape_of: Callable[[torch.Tensor], Any] | None
    ) -> tuple[Any, ...]:
        try:
            return tuple([leaf.shape if shape_of is None else shape_of(leaf) for leaf in leaves])
        except RuntimeError:
            for path, leaf in leaves_with_paths(data):
                check_leaf(path, leaf, self._operation)
            raise


def check_alone(operation: str, data: Any, check: Callable[[str, torch.Tensor, str], None] = check_leaf) -> None:
    """Refuse on one process what several refuse, so that a script fails before it is launched on more.

    Args:
        operation: name of the function that the user called.
        data: nested data with tensors alone at its leaves.
        check: raises when a leaf, given with path and operation, cannot take part.

    Raises:
        UnknownKind: a leaf cannot travel.
    """
    leaves, _ = flatten(data, operation)
    try:
        for leaf in leaves:
            check("", leaf, operation)
    except UnknownKind:
        for path, leaf in leaves_with_paths(data):
            check(path, leaf, operation)
