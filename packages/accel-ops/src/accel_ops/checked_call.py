"""The checked collective: a call that first compares a plan between all processes, and then sends the leaves by it.

    with CheckedCall(transport, "gather") as call:  # logged; calls of other threads wait
        plan, leaves = call.plan(data)              # what must be equal, and how each leaf is sent
        rows = call.agree(plan, leaves)             # exchange and compare headers; after this, sizes are equal
        ...                                         # send what did not fit
        call.wait(works)

A failure before `agree` is sent to the other processes instead of the header, so that they raise too and do not wait.

A `Plan` defines which leaves are packed together and which are sent separately. It depends only on structure, shapes
and dtypes, so it is created once and then cached. Leaves are ordered by their paths, so that the order in which
dictionaries were filled does not matter. A DTensor counts as the full tensor that it represents.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch

from accel_ops.dtensors import full_tensor
from accel_ops.groups import Group, members_of
from accel_ops.packing import PackedLayout, contiguous
from accel_ops.tree import TreeSpec, flatten, leaves_with_paths
from accel_state import current
from accel_state.errors import SettingError, UnknownKind
from accel_state.protocol.call import HeaderCall
from accel_state.protocol.description import CallDescription, fingerprint_of
from accel_state.protocol.header import EagerHeader
from accel_state.protocol.state import add_group_state, protocol_state
from accel_state.transport.base import LocalTransport, Transport, Work
from accel_state.watch.calls import Call

__all__ = (
    "PACKED_BYTES",
    "CheckedCall",
    "Plan",
    "check_alone",
    "check_divisible",
    "check_leaf",
    "check_writable",
    "index_of",
    "is_dtensor",
    "recent_calls",
    "transport_of",
    "where_is_everyone",
)

T = TypeVar("T")
P = TypeVar("P")

PACKED_BYTES: Final = 256 * 1024
"""Bytes up to which a leaf is packed; a larger one is sent separately, directly into its final tensor, which is faster.
"""

_HOST_DEVICE: Final = torch.device("cpu")
_MAX_CACHED_PLANS: Final = 1024
_MAX_NAMED_RANKS: Final = 16

_STORE_READ_TIMEOUT_S: Final = 2.0
"""Timeout of a request to the store, in seconds."""


def transport_of(group: Group, operation: str) -> Transport:
    """The transport between the processes of a group; all processes of the run by default.

    The processes of a group open separate connections when they first use it. Before that they wait for each other
    through the store, so that an error names the missing ones.

    Args:
        group: see `accel_ops.groups`.
        operation: name of the function that the user called.

    Raises:
        SettingError: there is no such group, or this process is not in it.
        CollectiveError: a process of the group did not connect in time.
    """
    process = current.process_or_start()
    world = process.transport
    if group is None or world.world_size == 1:
        if group is not None:
            members_of(group, operation, process)
        return world
    members = members_of(group, operation, process)
    if members.process_group is None:
        return LocalTransport(process.device, process.rank, members.label)
    if members.process_group is torch.distributed.group.WORLD:
        return world

    def meet() -> None:
        # Most runs use no groups.
        from accel_ops.agreement import StoreBarrier

        failure = f"Cannot run {operation}() in {members.label}: its processes cannot connect."
        topic, seconds = f"group/{members.process_group.group_name}", world.timeout.total_seconds()
        StoreBarrier(process, topic, failure, seconds, group=group).wait("connect", last=True)

    transport = world.subgroup(members.process_group, members.label, meet)
    add_group_state(transport, world)
    return transport


def check_leaf(path: str, leaf: torch.Tensor, operation: str) -> None:
    """Raise for a leaf with a storage that is not simply its elements.

    Raises:
        UnknownKind: the leaf is sparse, nested, quantized, on the meta device, or a subclass; the error names its path.
    """
    if leaf.layout is not torch.strided or leaf.is_nested:
        obstacle, remedy = "a sparse or nested tensor", "Convert it with .to_dense() or to_padded_tensor() first."
    elif leaf.is_quantized:
        obstacle, remedy = "a quantized tensor", "Pass its .int_repr() or .dequantize() instead."
    elif leaf.is_meta:
        obstacle, remedy = "a meta tensor, which has no contents", "Materialise it first, for example with .to_empty()."
    elif type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not _has_no_values(leaf):
        obstacle, remedy = f"of the tensor subclass {type(leaf).__name__}", "Pass its plain tensors instead."
    else:
        return
    raise UnknownKind(
        f"Cannot use the nested data given to {operation}().",
        f"{f'The leaf {path}' if path else 'The value'} is {obstacle}.",
        remedy,
    )


def _has_no_values(leaf: torch.Tensor) -> bool:
    """Whether a tensor stands for a plain one in a plan. Imports nothing, as `is_dtensor`."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(leaf, module.FakeTensor)


def check_divisible(path: str, leaf: torch.Tensor, operation: str, count: int) -> None:
    """Raise for a leaf that cannot be split evenly along its first dimension.

    Raises:
        SettingError: it cannot be split; the error names its path.
    """
    if leaf.dim() == 0 or leaf.shape[0] % count:
        raise SettingError(
            f"Cannot split {path or 'a tensor'} of shape {tuple(leaf.shape)} between {count} processes ({operation}).",
            f"Its first dimension is not a multiple of {count}." if leaf.dim() else "It has no dimension to split.",
            "Pad it first, for example with pad_input_tensors().",
        )


def index_of(operation: str, name: str, rank: int, transport: Transport) -> int:
    """The index that a rank of the run has among the processes of a transport.

    Args:
        operation: name of the function that the user called.
        name: name of the argument.
        rank: its value.
        transport: the transport between the processes.

    Raises:
        SettingError: no process of the group has this rank.
    """
    ranks = transport.ranks or range(transport.world_size)
    if rank not in ranks:
        raise SettingError(
            f"Cannot run {operation}() with {name}={rank}.",
            f"The processes of {transport.group} have other ranks."
            if transport.group
            else f"There are {transport.world_size} processes, with ranks from 0.",
            f"Pass one of {', '.join(map(str, ranks))}; these are ranks of the run."
            if transport.group and len(ranks) <= _MAX_NAMED_RANKS
            else f"Pass a rank from {min(ranks)} to {max(ranks)}.",
        )
    return ranks.index(rank)


def check_alone(operation: str, data: Any, check: Callable[[str, torch.Tensor, str], None] = check_leaf) -> None:
    """Check data on a single process as on several, so that a script fails before it is launched on more.

    Args:
        operation: name of the function that the user called.
        data: nested data with only tensors as leaves.
        check: raises when a leaf, given with path and operation, cannot take part.

    Raises:
        UnknownKind: a leaf cannot be sent.
    """
    leaves, _ = flatten(data, operation)
    try:
        for leaf in leaves:
            check("", leaf, operation)
    except UnknownKind:
        for path, leaf in leaves_with_paths(data):
            check(path, leaf, operation)


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. Imports nothing: if the module of DTensor is not loaded, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def placement_of(tensor: Any) -> str:
    """Shape, placements and mesh of a DTensor, as text that is equal on all its processes."""
    return f"DTensor {tuple(tensor.shape)} {tensor.placements} on {tuple(tensor.device_mesh.shape)}"


def check_writable(tensor: Any) -> None:
    """Raise for a DTensor with partial sums on its processes.

    Raises:
        UnknownKind: a process has a partial sum instead of a part of the value.
    """
    from torch.distributed.tensor import Partial

    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise UnknownKind(
            f"Cannot overwrite a DTensor with placements {tensor.placements}.",
            "Each process has a partial sum, not a part of the value.",
            "Redistribute it to Shard or Replicate first.",
        )


class Plan:
    """How the leaves of one structure are sent.

    Attributes:
        description: what must be equal on all processes.
        fingerprint: its hash.
        order: positions of the leaves in the order of their paths.
        small: positions of the leaves that are packed, in that order.
        large: positions of the other leaves, in that order.
        layout: layout of the small leaves in the packed buffer.
        devices: devices of the leaves if one of them is not on the transport's device; else empty.
    """

    __slots__ = (
        "_by_rank",
        "_eager_parts",
        "_generation",
        "description",
        "devices",
        "fingerprint",
        "large",
        "layout",
        "order",
        "small",
    )

    def __init__(
        self,
        description: CallDescription,
        paths: Sequence[str],
        leaves: Sequence[torch.Tensor],
        device: torch.device,
        world_size: int,
        packed_bytes: int,
    ) -> None:
        self.description = description
        self.fingerprint = fingerprint_of(description)
        self.order = tuple(sorted(range(len(leaves)), key=paths.__getitem__))
        self.small = tuple(position for position in self.order if leaves[position].nbytes <= packed_bytes)
        self.large = tuple(position for position in self.order if leaves[position].nbytes > packed_bytes)
        small = ((leaves[position].shape, leaves[position].dtype) for position in self.small)
        self.layout = PackedLayout(small, world_size)
        foreign = any(leaf.device != device for leaf in leaves)
        self.devices = tuple(leaf.device for leaf in leaves) if foreign else ()
        self._generation = 0
        self._eager_parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._by_rank: dict[int, list[torch.Tensor]] = {}

    def eager_parts(self, header: EagerHeader) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parts of the payload that this process sends in the eager header, and of those that it receives."""
        if self._generation != header.generation:
            self._generation, self._by_rank = header.generation, {}
            nbytes = self.layout.nbytes
            # Views that are created in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                own, rows = header.own_payload(nbytes), header.payloads(nbytes)
                self._eager_parts = self.layout.parts(own), self.layout.parts(rows)
        return self._eager_parts

    def eager_leaves(self, header: EagerHeader, rank: int) -> list[torch.Tensor]:
        """The small leaves in the eager header from one process, as views of it."""
        rows = self.eager_parts(header)[1]
        if rank not in self._by_rank:
            with torch.inference_mode(False):
                self._by_rank[rank] = self.layout.split([part[rank] for part in rows], copy=False)
        return self._by_rank[rank]

    def pack(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The small leaves in one new buffer, uint8 of shape (layout.nbytes,)."""
        buffer = self.empty_pack(leaves)
        self.layout.write([leaves[position] for position in self.small], self.layout.parts(buffer))
        return buffer

    def empty_pack(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """An uninitialised buffer for the small leaves, on their device."""
        return torch.empty(self.layout.nbytes, dtype=torch.uint8, device=leaves[0].device)

    def in_order(self, small: Sequence[torch.Tensor], large: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results of the small and of the large leaves, in the order of the leaves."""
        results: list[Any] = [None] * len(self.order)
        for position, result in zip((*self.small, *self.large), (*small, *large), strict=True):
            results[position] = result
        return results

    def on_devices(self, results: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Move results to the devices of the original leaves."""
        if not self.devices:
            return iter(results)
        return (result.to(device) for result, device in zip(results, self.devices, strict=True))


def plan_for(
    operation: str,
    arguments: dict[str, str],
    paths: Sequence[str],
    leaves: Sequence[torch.Tensor],
    shapes: Sequence[Any],
    device: torch.device,
    world_size: int,
    check: Callable[[str, torch.Tensor, str], None],
    packed_bytes: int,
) -> Plan:
    """Create the plan for the leaves of nested data.

    Args:
        operation: name of the collective.
        arguments: the arguments that must be equal on all processes.
        paths: paths of the leaves.
        leaves: the leaves that `flatten` found.
        shapes: the part of each leaf's shape that must be equal on all processes.
        device: the device on which the transport moves tensors.
        world_size: number of processes.
        check: raises when a leaf, given with path and operation, cannot take part.
        packed_bytes: bytes up to which a leaf is packed.
    """
    described = []
    for path, leaf, shape in zip(paths, leaves, shapes, strict=True):
        check(path, leaf, operation)
        described.append((path, str(tuple(shape) if isinstance(shape, torch.Size) else shape), str(leaf.dtype)))
    description = CallDescription(operation, arguments, sorted(described))
    return Plan(description, paths, leaves, device, world_size, packed_bytes)


class CheckedCall(HeaderCall):
    """One checked collective; a context manager.

    Args:
        transport: the transport between at least two processes.
        operation: name of the function that the user called.
        arguments: values that must be equal on all processes, by name.
    """

    __slots__ = ()

    def plan(
        self,
        data: Any,
        shape_of: Callable[[torch.Tensor], Any] | None = None,
        check: Callable[[str, torch.Tensor, str], None] = check_leaf,
        move: bool = True,
        packed_bytes: int = PACKED_BYTES,
    ) -> tuple[Plan, list[torch.Tensor]]:
        """The plan for nested data, and their leaves on the device of the transport.

        Args:
            data: nested data with only tensors as leaves.
            shape_of: the part of a leaf's shape that must be equal on all processes; by default all of it.
            check: raises when a leaf, given with path and operation, cannot take part.
            move: move the leaves to the device of the transport.
            packed_bytes: bytes up to which a leaf is packed; always the same for an operation.

        Raises:
            UnknownKind: a leaf cannot be sent.
        """
        leaves, spec = flatten(data, self._operation)
        return self.plan_of(data, leaves, spec, shape_of, check, move, packed_bytes)

    def plan_of(
        self,
        data: Any,
        leaves: list[torch.Tensor],
        spec: TreeSpec,
        shape_of: Callable[[torch.Tensor], Any] | None = None,
        check: Callable[[str, torch.Tensor, str], None] = check_leaf,
        move: bool = True,
        packed_bytes: int = PACKED_BYTES,
    ) -> tuple[Plan, list[torch.Tensor]]:
        """The plan for leaves and a structure that `flatten` returned; see `plan` for the arguments and errors."""
        kinds = list(map(type, leaves))
        if kinds.count(torch.Tensor) < len(kinds) and any(map(is_dtensor, leaves)):
            leaves = self._full_tensors(data, leaves)
            kinds = list(map(type, leaves))
        plan = self._plan(data, leaves, kinds, spec, shape_of, check, packed_bytes)
        if move and plan.devices:
            leaves = [leaf.to(self._transport.device) for leaf in leaves]
        return plan, leaves

    def fits(self, plan: Plan) -> bool:
        """Whether the small leaves, if there are any, fit into the eager header, a CPU tensor."""
        nbytes = plan.layout.nbytes
        return not nbytes or (nbytes <= self._state.header.capacity and self._transport.device == _HOST_DEVICE)

    def agree(
        self, plan: Plan, leaves: Sequence[torch.Tensor] | None = None, moves: bool = False
    ) -> Sequence[torch.Tensor] | None:
        """Exchange headers with the other processes, and check that all have the same plan.

        Args:
            plan: plan of this process.
            leaves: all leaves, to send the small ones in the header if they fit.
            moves: whether the caller moves data afterwards.

        Returns:
            The small leaves of all processes, as parts of shape (world_size, elements), valid inside this call; None
            if they do not fit.

        Raises:
            ShapeMismatch: on every process, when the plans differ.
            CollectiveError: a process did not call this in time.
        """
        self._moves = moves
        parts = None
        if self.fits(plan):
            own, parts = plan.eager_parts(self._state.header)
            if leaves is not None:
                plan.layout.write([leaves[position] for position in plan.small], own)
        self._exchange_headers(plan.fingerprint, plan.description, 0)
        return parts

    def exchange(
        self,
        plan: Plan,
        leaves: Sequence[torch.Tensor],
        prepare: Callable[[torch.Tensor], tuple[Callable[[], Work], T]],
        prepare_packed: Callable[[torch.Tensor], tuple[Callable[[], Work], P]],
        *,
        sends: bool = True,
    ) -> tuple[Sequence[torch.Tensor] | P, list[T]]:
        """Exchange headers, and move all leaves: the small ones in the header or packed, each large one by itself.

        Args:
            plan: plan of this process.
            leaves: all leaves.
            prepare: allocates what moving a contiguous tensor needs, before the exchange of headers, which tells the
                other processes of a failure; returns the start of the move, and its result.
            prepare_packed: the same for the packed leaves, uint8 of shape (layout.nbytes,).
            sends: whether this process sends its small leaves; otherwise it only receives them.

        Returns:
            The small leaves: those of all processes as `agree` returns them, if they fit into the header, else the
            result of `prepare_packed`; and the results of `prepare`.
        """
        moves = [prepare(contiguous(leaves[position])) for position in plan.large]
        results = [result for _, result in moves]
        starts = [start for start, _ in moves]
        packed: P | None = None
        if not self.fits(plan):
            start, packed = prepare_packed(plan.pack(leaves) if sends else plan.empty_pack(leaves))
            starts.append(start)
        parts = self.agree(plan, leaves if sends else None, moves=bool(starts))
        self.wait([start() for start in starts])
        if packed is not None:
            return packed, results
        assert parts is not None
        return parts, results

    def small_leaves(self, plan: Plan, rank: int) -> list[torch.Tensor]:
        """After `agree`: the small leaves of one process, if they fit, as views that are valid inside this call."""
        return plan.eager_leaves(self._state.header, rank)

    def all_gather_ints(self, plan: Plan, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Gather one number per leaf of the plan from all processes; the result is by rank."""
        layout = struct.Struct(f"<{len(numbers)}q")
        return [
            layout.unpack(row)
            for row in self._all_gather_bytes(plan.fingerprint, plan.description, layout.pack(*numbers))
        ]

    def scatter_bytes(self, messages: Sequence[torch.Tensor], src: int) -> torch.Tensor:
        """Message r of process `src` on process r, uint8 of shape (bytes of the longest message,).

        Args:
            messages: one for each process, uint8 of shape (bytes,); empty on the other processes.
            src: the sending process.
        """
        transport = self._transport

        def move(lengths: Sequence[int]) -> torch.Tensor:
            length = lengths[src]
            output = torch.empty(length, dtype=torch.uint8, device=transport.device)
            inputs = [_lengthened(message, length).to(transport.device) for message in messages]
            self.wait([transport.scatter(output, inputs or None, src)])
            return output

        self._moves, self._move = True, move
        self._exchange_headers(*self._header_only(), max((message.numel() for message in messages), default=0))
        output = move(self._state.header.lengths())
        self._moves, self._move = False, None
        return output

    def broadcast_bytes(self, data: bytes | None, src: int, moves: bool = False) -> bytes:
        """The bytes of process `src`; the others pass None. With `moves` the caller moves other data afterwards."""
        self._moves = moves
        header = self._state.header
        length = 0 if data is None else len(data)
        if data is not None and length <= header.capacity:
            header.write(data)
        self._exchange_headers(*self._header_only(), length)
        length = header.lengths()[src]
        if length <= header.capacity:
            return header.payload_of(src, length)
        buffer = torch.empty(length, dtype=torch.uint8)
        if data is not None:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        buffer = buffer.to(self._transport.device)
        self._moves = True
        self.wait([self._transport.broadcast(buffer, src)])
        self._moves = moves
        return buffer.cpu().numpy().tobytes()

    def _full_tensors(self, data: Any, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """All DTensors as full tensors, after a check that all processes have the same: this is a collective too."""
        paths = [path for path, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)]
        spread = [
            (path, placement_of(leaf), str(leaf.dtype))
            for path, leaf in zip(paths, leaves, strict=True)
            if is_dtensor(leaf)
        ]
        description = self._describe(sorted(spread))
        self._exchange_headers(fingerprint_of(description), description, 0, more=True)
        return [full_tensor(leaf) if is_dtensor(leaf) else leaf for leaf in leaves]

    def _plan(
        self,
        data: Any,
        leaves: Sequence[torch.Tensor],
        kinds: list[type],
        spec: TreeSpec,
        shape_of: Callable[[torch.Tensor], Any] | None,
        check: Callable[[str, torch.Tensor, str], None],
        packed_bytes: int,
    ) -> Plan:
        shapes = self._shapes(data, leaves, shape_of)
        key = (
            self._operation,
            tuple(self._arguments.items()),
            spec,
            tuple(shapes),
            tuple([leaf.dtype for leaf in leaves]),
            tuple([leaf.device for leaf in leaves]),
            tuple([leaf.layout for leaf in leaves]),
            tuple(kinds),
        )
        plans = self._state.plans
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= _MAX_CACHED_PLANS:
                plans.clear()
            paths = [path for path, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)]
            device, world_size = self._transport.device, self._transport.world_size
            plans[key] = plan = plan_for(
                self._operation, self._arguments, paths, leaves, shapes, device, world_size, check, packed_bytes
            )
        return plan

    def _shapes(
        self, data: Any, leaves: Sequence[torch.Tensor], shape_of: Callable[[torch.Tensor], Any] | None
    ) -> list[Any]:
        try:
            return [leaf.shape for leaf in leaves] if shape_of is None else [shape_of(leaf) for leaf in leaves]
        except RuntimeError:
            for path, leaf in leaves_with_paths(data):
                check_leaf(path, leaf, self._operation)
            raise


def _lengthened(message: torch.Tensor, length: int) -> torch.Tensor:
    """The message in `length` bytes: all messages of a scatter have the same length."""
    if message.numel() == length:
        return message
    longer = message.new_empty(length)
    longer[: message.numel()] = message
    return longer


def where_is_everyone() -> str:
    """The position of each process, as far as it is known: its last collective, and the line of the user's code.

    Never waits for another process. The information about the others is up to two seconds old. With more than 16
    processes nothing is read before this function is called, so its first call takes up to two seconds.
    """
    from accel_state.watch.report import describe_ranks

    transport = current.process_or_start().transport
    monitor = protocol_state(transport).monitor
    requested_at = monitor.request_stacks()
    world = monitor.world()
    while (
        not monitor.always_reads
        and world.read < requested_at
        and time.monotonic() < requested_at + _STORE_READ_TIMEOUT_S
    ):
        time.sleep(0.02)
        world = monitor.world()
    return describe_ranks(world.statuses, transport.world_size, world.ages)


def recent_calls(count: int | None = None) -> tuple[Call, ...]:
    """The newest collectives that this process has completed, the newest last; by default all in the log."""
    return protocol_state(current.process_or_start().transport).log.recent(count)
