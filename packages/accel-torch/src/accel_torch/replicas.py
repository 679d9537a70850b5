"""Checks that replicas agree: processes with the same shard of a model must have equal values in it.

Otherwise training continues without an error, but with wrong results. `ReplicaChecker` compares weights and positions
periodically; a difference is an error that names the first differing tensor and the processes.

`ReplicaComparison` compares once, in the background after the second optimizer step, and no process waits for another.
Each process writes digests of a sample of its parameters to the store of the run, and a thread of the main process
compares them when all have arrived. If no prepared loader was read, digests of the first inputs are compared too:
processes that train on the same samples learn no more than one process.

Each tensor is compared between the processes that have the same shard of it: with tensor parallelism some tensors of an
optimizer are sharded and others are not.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch

from accel_ops import gather_object
from accel_ops.rng import snapshot
from accel_ops.tree import leaves_with_paths
from accel_state import current
from accel_state.errors import ReplicasDiffer, ShapeMismatch, StoreUnreachable
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_plugins.prepared import PreparedObjects
    from accel_plugins.strategy import Strategy
    from accel_state.transport.control import ControlStore

__all__ = ("ReplicaChecker", "ReplicaComparison", "bit_sums", "digest_of")

# ---------------------------------------------------------------------- periodic checks

_WORD: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size, with which the bits of any tensor can be summed without rounding."""


_PLAIN: Final = frozenset({int, float, str, bytes, bool, type(None)})
"""Types whose text represents the value exactly; the states of generators have hundreds of such values."""


_LOOK_FOR: Final = (
    "Look for code that only some processes run: conditional steps, weights changed by hand, another seed, "
    "parameters unfrozen or added on some processes, or data read outside of prepared loaders. Look also for calls "
    "that bypass the model that prepare() returned."
)


class ReplicaState(NamedTuple):
    """The contribution of one process to a check.

    Args:
        weights: a digest of the bits of its shards, by their place: processes with an equal place are replicas of the
            tensors there.
        values: values that must be equal on all processes, by name.
    """

    weights: dict[bytes, bytes]
    values: dict[str, Hashable]


class ReplicaChecker(Hook):
    """Compares replicas periodically, after a number of steps of each optimizer.

    Args:
        every: optimizer steps between two checks.
        prepared: the prepared objects, for names of parameters and positions of loaders; weakly referenced.
        strategy: the strategy, for the shards that this process has.
    """

    def __init__(self, every: int, prepared: PreparedObjects, strategy: Strategy) -> None:
        self.every = every
        # A weak reference: its optimizers have references to this object.
        self._prepared, self._strategy = weakref.ref(prepared), strategy
        self._steps: dict[int, int] = {}
        self._shared_generators: set[str] | None = None

    def after_step(self, optimizer: Optimizer, stepped: Any) -> None:
        """Count a step, also a skipped one, and compare replicas if a check is due.

        Raises:
            ReplicasDiffer: on every process.
        """
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps % self.every == 0:
            self._check(optimizer, steps)

    def _check(self, optimizer: Optimizer, steps: int) -> None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        weights = digests_by_place(self._strategy, tensors)
        counts = {"optimizer steps": steps, "the number of the optimizer's parameters": len(tensors)}
        state = ReplicaState(weights, {**counts, **self._values()})
        try:
            states: list[ReplicaState] = gather_object([state])
        except ShapeMismatch as error:
            raise ReplicasDiffer(
                f"The replicas differ after {steps} optimizer steps (check_replicas_every).",
                f"Some processes are at another call than this check. {error.obstacle}",
                _LOOK_FOR,
            ) from error
        self._compare_values(states, steps)
        if _agree(states):
            return
        # All processes have the same data, so all of them reach this line.
        sums = [*zip(places_of(self._strategy, tensors), bit_sums(tensors), strict=True)]
        everyones: list[list[tuple[bytes, int]]] = gather_object([sums])
        for index, tensor in enumerate(tensors):
            sides = _sides([shards[index] for shards in everyones])
            if sides:
                raise _differ(f"the tensor {self._name(tensor, index)!r}", sides, steps)

    def _values(self) -> dict[str, Hashable]:
        loaders: dict[str, Hashable] = {}
        prepared = self._prepared()
        for index, loader in enumerate([] if prepared is None else prepared.loaders):
            progress = getattr(loader, "progress", None)
            if progress is not None:
                loaders[f"the position of loader {index}"] = (progress.epoch, progress.steps)
        generators = {f"the generator {name!r}": digest(state) for name, state in snapshot().items()}
        return {**loaders, **generators}

    def _compare_values(self, states: Sequence[ReplicaState], steps: int) -> None:
        """Compare the values that must be equal; generators are included if they were equal at the first check."""
        names = list(dict.fromkeys(name for state in states for name in state.values))
        equal = {name for name in names if len({state.values.get(name) for state in states}) == 1}
        if self._shared_generators is None:
            self._shared_generators = {name for name in equal if name.startswith("the generator")}
        for name in names:
            if name.startswith("the generator") and name not in self._shared_generators:
                continue
            if name not in equal:
                raise _differ(name, _sides([(b"", state.values.get(name)) for state in states]), steps)

    def _name(self, tensor: Tensor, index: int) -> str:
        prepared = self._prepared()
        name = None if prepared is None else prepared.parameter_name(tensor)
        return name or f"parameter {index} of the optimizer"


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """For each tensor, the sum of its bits as integers, which does not depend on the order of addition."""
    sums: dict[torch.device, list[Tensor]] = {}
    order = []
    for tensor in tensors:
        local = local_part(tensor)
        words = local.contiguous().view(_WORD[local.element_size()]) if local.numel() else local
        sums_of_device = sums.setdefault(local.device, [])
        order.append((local.device, len(sums_of_device)))
        sums_of_device.append(words.sum(dtype=torch.int64))
    # One copy for each device.
    values = {device: torch.stack(listed).tolist() for device, listed in sums.items()}
    return [values[device][index] for device, index in order]


def local_part(tensor: Any) -> Tensor:
    """This process's shard of a tensor that may be sharded."""
    tensor = tensor.detach()
    local: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return torch.view_as_real(local) if local.is_complex() else local


def places_of(strategy: Strategy, tensors: Iterable[Tensor]) -> list[bytes]:
    """For each tensor, a key of the shard that this process has; processes with an equal key are replicas of it."""
    parts = [(strategy.shard_key(tensor), part_of(tensor)) for tensor in tensors]
    digests = {part: digest(list(part)) for part in set(parts)}
    return [digests[part] for part in parts]


def digests_by_place(strategy: Strategy, tensors: Sequence[Tensor]) -> dict[bytes, bytes]:
    """Digests of the bits of this process's shards, by their place."""
    sums: dict[bytes, list[int]] = {}
    for place, bits in zip(places_of(strategy, tensors), bit_sums(tensors), strict=True):
        sums.setdefault(place, []).append(bits)
    return {place: digest(bits) for place, bits in sums.items()}


def part_of(tensor: Any) -> Hashable:
    """The index of this process's shard: its coordinates on the mesh axes that shard the tensor."""
    if not hasattr(tensor, "placements"):
        return ()
    mesh = tensor.device_mesh
    coordinate, names = mesh.get_coordinate() or (), mesh.mesh_dim_names or tuple(enumerate(mesh.shape))
    divided = zip(names, coordinate, tensor.placements, strict=False)
    return tuple((name, place) for name, place, placement in divided if not placement.is_replicate())


def digest(value: Any) -> bytes:
    """A digest of 16 bytes, equal for equal nested values on every process."""
    hasher = blake2b(digest_size=16)
    for piece in _pieces(value):
        hasher.update(piece)
    return hasher.digest()


def _pieces(value: Any) -> Iterator[bytes]:
    """A complete representation: tensors and arrays as bytes, since their text omits elements, and the rest as text."""
    if isinstance(value, torch.Tensor):
        value = value.cpu().numpy()
    if hasattr(value, "tobytes"):
        yield value.tobytes()
    elif isinstance(value, (list, tuple)) and not _PLAIN.issuperset(map(type, value)):
        yield b"("
        for item in value:
            yield from _pieces(item)
            yield b","
        yield b")"
    else:
        yield repr(value).encode()


def _agree(states: Sequence[ReplicaState]) -> bool:
    """Whether all replicas of each shard have the same value."""
    weights: dict[bytes, bytes] = {}
    return all(weights.setdefault(place, value) == value for state in states for place, value in state.weights.items())


def _sides(shards: Sequence[tuple[Hashable, Hashable]]) -> list[list[int]]:
    """Groups of processes with equal values, for the first place whose replicas differ; the largest group first.

    Args:
        shards: place and value of each process, by rank.
    """
    for place in dict.fromkeys(place for place, _ in shards):
        sides: dict[Hashable, list[int]] = {}
        for rank, (theirs, value) in enumerate(shards):
            if theirs == place:
                sides.setdefault(value, []).append(rank)
        if len(sides) > 1:
            return sorted(sides.values(), key=len, reverse=True)
    return []


def _differ(what: str, sides: list[list[int]], steps: int) -> ReplicasDiffer:
    groups = "; ".join(f"process {', '.join(map(str, side))}" for side in sides)
    return ReplicasDiffer(
        f"The replicas differ after {steps} optimizer steps (check_replicas_every).",
        f"They differ first in {what}. Processes that agree with each other: {groups}.",
        _LOOK_FOR,
    )


# ---------------------------------------------------------------------- once, in the background

_logger: Final = logging.getLogger(__name__)

_TENSORS: Final = 64
"""The number of an optimizer's parameters that are compared, evenly spaced."""

_ELEMENTS: Final = 1024
"""The number of elements of each parameter that are compared, evenly spaced."""

_PAUSE: Final = 1.0
_PATIENCE: Final = 600.0
"""Seconds between two polls of the store, and seconds after which the main process stops polling."""

_REQUEST: Final = 10.0


def _nameless(tensor: Tensor) -> None:
    """The name of a parameter that is not in a prepared model."""


class ReplicaComparison:
    """Compares the replicas of each prepared optimizer's parameters once.

    Args:
        strategy: the strategy, for this process's shards of parameters and data.
        prepared: the prepared objects, for the names of parameters; weakly referenced.
    """

    # Messages of one Accelerator may still be in the store when the next one writes its own. All processes construct
    # their Accelerators in the same order.
    _indices: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, strategy: Strategy, prepared: PreparedObjects) -> None:
        self._strategy = strategy
        self._names = weakref.WeakMethod(prepared.parameter_name)
        self._index = next(self._indices)

    def after_step(self, optimizer: Optimizer, number: int | None, inputs: Sequence[str]) -> None:
        """Write this process's digests to the store, and start the comparison.

        Args:
            optimizer: an optimizer after its second step.
            number: the index of the prepared optimizer; None for an unprepared one, which is not compared.
            inputs: digests of the first inputs of models, if no prepared loader was read.
        """
        process = self._strategy.context.process
        control = process.transport.control()
        if number is None or control is None:
            return
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        chosen = tensors[:: -(-len(tensors) // _TENSORS) or 1]
        name_of = self._names() or _nameless
        message = {
            "places": [place.hex() for place in places_of(self._strategy, chosen)],
            "sums": bit_sums([_sample(tensor) for tensor in chosen]),
            "count": len(tensors),
            "names": [name_of(tensor) or f"parameter {index}" for index, tensor in enumerate(chosen)],
            "data": self._strategy.shards().index,
            "inputs": list(inputs),
        }
        keys = [f"replicas/{self._index}/{number}/{rank}" for rank in range(process.world_size)]
        ended = threading.Event()
        current.on_clear(ended.set)
        arguments = (control, keys, process.rank, json.dumps(message).encode(), ended)
        comparing = threading.Thread(target=_compare, args=arguments, name="accel-replica-comparison", daemon=True)
        try:
            comparing.start()
        except RuntimeError as error:
            # A check of training must not end it.
            _logger.warning("The replicas are not compared, because no thread can be started: %s", error)


def digest_of(inputs: Any) -> str:
    """A digest of a sample of elements from the first tensors of nested inputs; empty without tensors."""
    tensors = [leaf for _, leaf in leaves_with_paths(inputs) if isinstance(leaf, torch.Tensor) and leaf.numel()][:8]
    if not tensors:
        return ""
    return digest([[tuple(tensor.shape) for tensor in tensors], bit_sums(map(_sample, tensors))]).hex()


def _sample(tensor: Tensor) -> Tensor:
    local = local_part(tensor)
    if not local.is_contiguous():
        local = local.contiguous()
    return local.view(-1)[:: max(local.numel() // _ELEMENTS, 1)]


def _compare(control: ControlStore, keys: Sequence[str], rank: int, message: bytes, ended: threading.Event) -> None:
    """Write a message to the store; on the main process, wait for all messages and warn about differences."""
    try:
        control.set(keys[rank], message, _REQUEST)
        if rank == 0:
            received = _everyones(control, keys, ended)
            control.delete(keys, _REQUEST) if received else None
            for sentence in findings([json.loads(received[key]) for key in keys] if received else []):
                _logger.warning("%s", sentence)
    except StoreUnreachable:
        # The run has ended, or its store is unreachable; other code reports both.
        return


def _everyones(control: ControlStore, keys: Sequence[str], ended: threading.Event) -> dict[str, bytes] | None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and not ended.wait(_PAUSE):
        if control.check(keys, _REQUEST) and len(received := control.get_many(keys, _REQUEST)) == len(keys):
            return received
    return None


def findings(messages: Sequence[dict[str, Any]]) -> list[str]:
    """The differences between the messages of all processes, as warnings."""
    warnings = []
    if messages and (differing := _differing(messages)) is not None:
        what, sides = differing
        warnings.append(
            f"Replicas differ after the second optimizer step, first in {what}. Processes that agree with each "
            f"other: {'; '.join(', '.join(map(str, side)) for side in sides)}. Each group trains independently. Call "
            "the model that prepare() returned, and change, unfreeze and add weights equally on all processes. "
            "(Accelerator(check_replicas_every=0) disables this check; =100 compares all weights every 100 steps.)"
        )
    if _same_inputs(messages):
        warnings.append(
            "All processes train on the same samples: their first inputs are equal, and no prepared loader was read. "
            "Pass the loader to prepare() and iterate the one that it returns, so that each process gets its own shard."
        )
    return warnings


def _differing(messages: Sequence[dict[str, Any]]) -> tuple[str, list[list[int]]] | None:
    """What differs first, and the groups of processes that agree."""
    sides = _sides([(b"", message["count"]) for message in messages])
    if sides:
        return "the number of the optimizer's parameters", sides
    for index, name in enumerate(messages[0]["names"]):
        sides = _sides([(message["places"][index], message["sums"][index]) for message in messages])
        if sides:
            return repr(name), sides
    return None


def _same_inputs(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether processes that should read different samples have equal inputs; inputs that never change are ignored."""
    inputs = [tuple(message["inputs"]) for message in messages]
    if len({message["data"] for message in messages}) < 2 or not messages:
        return False
    return len(set(inputs)) == 1 and len(set(inputs[0])) > 1 and "" not in inputs[0]
