"""Watching that replicas stay replicas: processes that hold the same part of a model must hold the same numbers in it.

Where they do not, training goes on and quietly means less and less. `ReplicaChecker` compares weights and positions
after every so many steps; a difference is an error that names the first tensor that differs, and the processes.

`ReplicaComparison` is one look after the second optimizer step, in the background, without any process waiting for
another. Each process posts digests of a sample of its parameters to the store of the run; a thread of the main process
compares them once all have come. Where no prepared loader was read, the digests of the first inputs are posted too:
processes that train on the same samples learn no more than one of them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from accel_ops import gather_object
from accel_ops.rng import snapshot
from accel_ops.tree import leaves_with_paths
from accel_state import current
from accel_state.errors import AccelError, StoreUnreachable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_plugins.precision.base import Closure
    from accel_plugins.prepared import PreparedObjects
    from accel_plugins.strategy import Strategy
    from accel_plugins.wrapped.optimizer import SupportsStep
    from accel_state.transport.control import ControlStore

__all__ = ("CheckingStepper", "ReplicaChecker", "ReplicaComparison", "ReplicasDiffer", "bit_sums", "digest_of")

# ---------------------------------------------------------------------- after every so many steps

_WORD: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size, through which the bits of any tensor can be added up without rounding."""


_PLAIN: Final = frozenset({int, float, str, bytes, bool, type(None)})
"""Types whose values a text tells wholly; the states of generators hold hundreds of such."""


class ReplicasDiffer(AccelError, RuntimeError):
    """Raised on every process when processes that should have equal weights and equal positions differ."""


class ReplicaState(NamedTuple):
    """What one process says of itself in a check.

    Args:
        holds: which parts of which tensors it has; processes that say the same are replicas.
        weights: digest of those parts.
        facts: what must be equal on all processes, by name.
    """

    holds: bytes
    weights: bytes
    facts: dict[str, Hashable]


class ReplicaChecker:
    """Compares replicas after every so many steps of each optimizer.

    Args:
        every: steps between two checks.
        prepared: knows names of parameters and positions of loaders; not kept alive.
        strategy: knows which part of them this process has.
    """

    def __init__(self, every: int, prepared: PreparedObjects, strategy: Strategy) -> None:
        self.every = every
        # The optimizers that it holds hold this.
        self._prepared, self._strategy = weakref.ref(prepared), strategy
        self._steps: dict[int, int] = {}
        self._shared_generators: set[str] | None = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Take note of a step, and check when it is time.

        Raises:
            ReplicasDiffer: on every process.
        """
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps % self.every == 0:
            self._check(optimizer, steps)

    def watching(self, stepping: SupportsStep) -> CheckingStepper:
        """The same stepper, which reports each step to the checker."""
        return CheckingStepper(stepping, self)

    def _check(self, optimizer: Optimizer, steps: int) -> None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        sums = bit_sums(tensors)
        holds = digest([self._strategy.shard_key(), *(part_of(tensor) for tensor in tensors)])
        witness = ReplicaState(holds, digest(sums), {"optimizer steps": steps, **self._facts()})
        witnesses: list[ReplicaState] = gather_object([witness])
        self._compare_facts(witnesses, steps)
        if _agree(witnesses, [witness.weights for witness in witnesses]):
            return
        # All processes see the same witnesses, so all of them come here.
        everyones: list[list[int]] = gather_object([sums])
        for index, tensor in enumerate(tensors):
            values = [sums[index] for sums in everyones]
            if not _agree(witnesses, values):
                raise _differ(f"the tensor {self._name(tensor, index)!r}", _sides(witnesses, values), steps)

    def _facts(self) -> dict[str, Hashable]:
        loaders: dict[str, Hashable] = {}
        prepared = self._prepared()
        for index, loader in enumerate([] if prepared is None else prepared.loaders):
            progress = getattr(loader, "progress", None)
            if progress is not None:
                loaders[f"the position of loader {index}"] = (progress.epoch, progress.steps)
        generators = {f"the generator {name!r}": digest(state) for name, state in snapshot().items()}
        return {**loaders, **generators}

    def _compare_facts(self, witnesses: Sequence[ReplicaState], steps: int) -> None:
        """Compare what must be equal; generators count if they were equal at the first check."""
        facts = list(dict.fromkeys(name for witness in witnesses for name in witness.facts))
        equal = {name for name in facts if len({witness.facts.get(name) for witness in witnesses}) == 1}
        if self._shared_generators is None:
            self._shared_generators = {name for name in equal if name.startswith("the generator")}
        for name in facts:
            if name.startswith("the generator") and name not in self._shared_generators:
                continue
            if name not in equal:
                raise _differ(name, _sides(None, [witness.facts.get(name) for witness in witnesses]), steps)

    def _name(self, tensor: Tensor, index: int) -> str:
        prepared = self._prepared()
        name = None if prepared is None else prepared.parameter_name(tensor)
        return name or f"parameter {index} of the optimizer"


class CheckingStepper:
    """Steps, and tells the checker.

    Args:
        stepping: how optimizers step.
        sentinel: receives each step.
    """

    __slots__ = ("_replica_checker", "_stepping")

    def __init__(self, stepping: SupportsStep, sentinel: ReplicaChecker) -> None:
        self._stepping, self._replica_checker = stepping, sentinel

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step; False when the step was skipped."""
        stepped = self._stepping.step(optimizer, closure)
        self._replica_checker.stepped(optimizer)
        return stepped


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """For each tensor the sum of its bits, taken as integers: equal for equal tensors, whatever the order of adding."""
    sums: dict[torch.device, list[Tensor]] = {}
    order = []
    for tensor in tensors:
        local = local_part(tensor)
        words = local.contiguous().view(_WORD[local.element_size()]) if local.numel() else local
        made = sums.setdefault(local.device, [])
        order.append((local.device, len(made)))
        made.append(words.sum(dtype=torch.int64))
    # One transfer for each device.
    values = {device: torch.stack(made).tolist() for device, made in sums.items()}
    return [values[device][index] for device, index in order]


def local_part(tensor: Any) -> Tensor:
    """What this process holds of a tensor that may be divided."""
    tensor = tensor.detach()
    local: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return torch.view_as_real(local) if local.is_complex() else local


def part_of(tensor: Any) -> Hashable:
    """Which part of a tensor this process holds: its place on the axes of the mesh that divide the tensor."""
    if not hasattr(tensor, "placements"):
        return tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    divided = zip(coordinate, tensor.placements, strict=False)
    return tuple(tensor.shape), tuple(place for place, placement in divided if not placement.is_replicate())


def digest(value: Any) -> bytes:
    """16 bytes that are equal for equal nested values, on every process."""
    made = blake2b(digest_size=16)
    for piece in _pieces(value):
        made.update(piece)
    return made.digest()


def _pieces(value: Any) -> Iterator[bytes]:
    """All of a value: tensors and arrays as their bytes, whose text would leave numbers out, and the rest as text."""
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


def _agree(witnesses: Sequence[ReplicaState], values: Sequence[Hashable]) -> bool:
    """Whether all replicas of each part have the same value."""
    pairs = {(witness.holds, value) for witness, value in zip(witnesses, values, strict=True)}
    return len(pairs) == len({holds for holds, _ in pairs})


def _sides(witnesses: Sequence[ReplicaState] | None, values: Sequence[Hashable]) -> list[list[int]]:
    """Processes by what they hold, for the first part whose replicas differ; the largest group first."""
    parts = [b""] * len(values) if witnesses is None else [witness.holds for witness in witnesses]
    for part in dict.fromkeys(parts):
        sides: dict[Hashable, list[int]] = {}
        for rank, value in enumerate(values):
            if parts[rank] == part:
                sides.setdefault(value, []).append(rank)
        if len(sides) > 1:
            return sorted(sides.values(), key=len, reverse=True)
    return []


def _differ(what: str, sides: list[list[int]], steps: int) -> ReplicasDiffer:
    groups = "; ".join(f"process {', '.join(map(str, side))}" for side in sides)
    return ReplicasDiffer(
        f"The replicas differ after {steps} optimizer steps (check_replicas_every).",
        f"They differ first in {what}. Processes that agree with each other: {groups}.",
        "Look for what only some processes do: steps under a condition, weights changed by hand, another seed, or "
        "data read outside of prepared loaders.",
    )


# ---------------------------------------------------------------------- once, in the background

_logger: Final = logging.getLogger(__name__)

_TENSORS: Final = 64
"""Parameters of an optimizer that are looked at, spread evenly."""

_ELEMENTS: Final = 1024
"""Elements of each that are looked at, spread evenly."""

_PAUSE: Final = 1.0
_PATIENCE: Final = 600.0
"""Seconds between two looks for the others, and after which the main process no longer looks."""

_REQUEST: Final = 10.0


def _nameless(tensor: Tensor) -> None:
    """The name of a parameter where nobody knows it any more."""


class ReplicaComparison:
    """Compares the replicas of each prepared optimizer's parameters once.

    Args:
        strategy: knows which part of the parameters, and of the data, this process has.
        prepared: knows the names of parameters; not kept alive.
    """

    def __init__(self, strategy: Strategy, prepared: PreparedObjects) -> None:
        self._strategy = strategy
        self._names = weakref.WeakMethod(prepared.parameter_name)

    def after_step(self, optimizer: Optimizer, number: int | None, inputs: Sequence[str]) -> None:
        """Post what this process has, and begin to compare.

        Args:
            optimizer: has just made its second step.
            number: which prepared optimizer it is; None for one that was not prepared, which is not compared.
            inputs: digests of the first inputs of models, where no prepared loader was read.
        """
        process = self._strategy.context.process
        control = process.transport.control()
        if number is None or control is None:
            return
        tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        chosen = tensors[:: -(-len(tensors) // _TENSORS) or 1]
        name_of = self._names() or _nameless
        message = {
            "holds": digest([self._strategy.shard_key(), *(part_of(tensor) for tensor in chosen)]).hex(),
            "sums": bit_sums([_sample(tensor) for tensor in chosen]),
            "names": [name_of(tensor) or f"parameter {index}" for index, tensor in enumerate(chosen)],
            "data": self._strategy.shards().index,
            "inputs": list(inputs),
        }
        keys = [f"replicas/{number}/{rank}" for rank in range(process.world_size)]
        ended = threading.Event()
        current.on_clear(ended.set)
        threading.Thread(
            target=_compare,
            args=(control, keys, process.rank, json.dumps(message).encode(), ended),
            name="accel-replica-comparison",
            daemon=True,
        ).start()


def digest_of(inputs: Any) -> str:
    """A digest of the first tensors of nested inputs, by a sample of their elements; empty where there is none."""
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
    """Post a message; on the main process wait for all and say what is wrong."""
    try:
        control.set(keys[rank], message, _REQUEST)
        if rank == 0:
            found = _everyones(control, keys, ended)
            control.delete(keys, _REQUEST) if found else None
            for sentence in findings([json.loads(found[key]) for key in keys] if found else []):
                _logger.warning("%s", sentence)
    except StoreUnreachable:
        # The run has ended, or its store is gone; either is reported by others.
        return
    finally:
        control.close()


def _everyones(control: ControlStore, keys: Sequence[str], ended: threading.Event) -> dict[str, bytes] | None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and not ended.wait(_PAUSE):
        if control.check(keys, _REQUEST) and len(found := control.get_many(keys, _REQUEST)) == len(keys):
            return found
    return None


def findings(messages: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the messages of all processes, by rank, in sentences."""
    found = []
    for name, sides in _differing(messages):
        found.append(
            f"Replicas differ after the second optimizer step, first in {name!r}. Processes that agree with each "
            f"other: {'; '.join(', '.join(map(str, side)) for side in sides)}. Each side learns for itself. Call the "
            "model that prepare() returned, and change weights on all processes alike. "
            "(Accelerator(check_replicas_every=0) turns this check off; =100 compares all weights every 100 steps.)"
        )
        break
    if _same_inputs(messages):
        found.append(
            "All processes train on the same samples: their first inputs are equal, and no prepared loader was read. "
            "Pass the loader to prepare() and iterate the one that it returns, so that each process gets its own part."
        )
    return found


def _differing(messages: Sequence[dict[str, Any]]) -> list[tuple[str, list[list[int]]]]:
    parts: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        parts.setdefault(message["holds"], []).append(rank)
    found = []
    for ranks in parts.values():
        for index, name in enumerate(messages[ranks[0]]["names"]):
            sides: dict[int, list[int]] = {}
            for rank in ranks:
                sides.setdefault(messages[rank]["sums"][index], []).append(rank)
            if len(sides) > 1:
                found.append((name, sorted(sides.values(), key=len, reverse=True)))
                break
    return found


def _same_inputs(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether processes that should read different samples all had the same; inputs that never change say nothing."""
    inputs = [tuple(message["inputs"]) for message in messages]
    if len({message["data"] for message in messages}) < 2 or not messages:
        return False
    return len(set(inputs)) == 1 and len(set(inputs[0])) > 1 and "" not in inputs[0]
