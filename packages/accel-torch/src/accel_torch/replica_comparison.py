"""One look at the replicas after the second optimizer step, in the background, without any process waiting for another.

Each process posts digests of a sample of its parameters to the store of the run; a thread of the main process compares
them once all have come. Processes that hold the same part of a model must agree. Where no prepared loader was read, the
digests of the first inputs are posted too: processes that train on the same samples learn no more than one of them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_ops.tree import leaves_with_paths
from accel_state import current
from accel_state.errors import StoreUnreachable
from accel_torch.replica_checker import bit_sums, digest, local_part, part_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_plugins.prepared import PreparedObjects
    from accel_plugins.strategy import Strategy
    from accel_state.transport.control import ControlStore

__all__ = ("ReplicaComparison", "digest_of")

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
