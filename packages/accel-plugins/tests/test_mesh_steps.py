"""Every combination of axes wraps its models in a fixed order, and a step makes a known number of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from accel_plugins import order
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.manifest import Axis, Manifest
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.transforms.compile import Compile
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_plugins.transforms.sequence_sharding import shard_sequences
from accel_testing.backends import Case, Training
from accel_testing.backends.sequences import COMBINATIONS, SequenceModel, case_of, data, loss_of, name_of
from accel_testing.processes import Processes as Group

R, S, C, Q, T = (Axis.REPLICATE, Axis.SHARD, Axis.CONTEXT, Axis.SEQUENCE, Axis.TENSOR)


@pytest.fixture(autouse=True)
def context_parallelism_alone(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_ALLOW_CP_STANDALONE", "true")


# ------------------------------------------------------------------------------ order

WHOLE = Compile(TorchDynamoPlugin(backend="eager"))
BLOCKS = Compile(TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
AGAIN = ActivationCheckpoint()
SETS = ((), (WHOLE,), (BLOCKS,), (WHOLE, AGAIN), (AGAIN, BLOCKS))

COPIED = """
place, precision no, ddp
place, precision no, ddp, compile
place, compile, precision no, ddp
place, activation checkpointing, precision no, ddp, compile
place, activation checkpointing, compile, precision no, ddp
"""
JOINED = COPIED.replace("ddp", "fsdp1")
DIVIDED = COPIED.replace("ddp", "fsdp2")
IN_LAYERS = """
place, tensor parallelism, precision no, fsdp2
place, tensor parallelism, precision no, fsdp2, compile
place, tensor parallelism, compile, precision no, fsdp2
place, tensor parallelism, activation checkpointing, precision no, fsdp2, compile
place, tensor parallelism, activation checkpointing, compile, precision no, fsdp2
"""

ORDERS: dict[tuple[str, frozenset[Axis]], str] = {
    ("ddp", frozenset()): COPIED,
    ("ddp", frozenset({R})): COPIED,
    ("ddp", frozenset({C})): COPIED,
    ("ddp", frozenset({R, C})): COPIED,
    ("ddp", frozenset({Q})): COPIED,
    ("ddp", frozenset({R, Q})): COPIED,
    ("fsdp1", frozenset()): JOINED,
    ("fsdp1", frozenset({S})): JOINED,
    ("fsdp1", frozenset({R, S})): JOINED,
    ("fsdp2", frozenset()): DIVIDED,
    ("fsdp2", frozenset({S})): DIVIDED,
    ("fsdp2", frozenset({R, S})): DIVIDED,
    ("fsdp2", frozenset({T})): IN_LAYERS,
    ("fsdp2", frozenset({S, T})): IN_LAYERS,
    ("fsdp2", frozenset({C})): DIVIDED,
    ("fsdp2", frozenset({R, C})): DIVIDED,
    ("fsdp2", frozenset({S, C})): DIVIDED,
    ("fsdp2", frozenset({Q})): DIVIDED,
    ("fsdp2", frozenset({R, Q})): DIVIDED,
    ("fsdp2", frozenset({S, Q})): DIVIDED,
}


def orders(cases: list[Case]) -> list[str]:
    """The steps of preparing with each set of transforms."""
    strategy = Training(cases[0], SequenceModel()).strategy
    return [", ".join(step.name for step in order.steps(case.manifest, strategy, case.transforms)) for case in cases]


@pytest.mark.parametrize(("manifest", "axes"), COMBINATIONS, ids=name_of)
def test_models_are_wrapped_in_a_fixed_order(four: Group, manifest: Manifest, axes: frozenset[Axis]) -> None:
    told = four.run(orders, [case_of(manifest, axes, *more) for more in SETS])

    assert told == [ORDERS[manifest.name, axes].strip().splitlines()] * 4


# ------------------------------------------------------------------------ collectives


class Recording(TorchDispatchMode):
    """Counts the collectives that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func._opname.strip("_").startswith(("wait", "wrap")):
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(case: Case) -> dict[str, int]:
    training = Training(case, SequenceModel())
    inputs, targets = training.slice(data()[0])

    def step() -> None:
        with shard_sequences(training.strategy.context, [inputs, targets], [1, 1]):
            training.strategy.backward(loss_of(training.model, inputs, targets))
        training.step()

    step()
    step()
    with Recording() as recording:
        step()
    return dict(recording.counts)


DATA_PARALLEL = {"allreduce": 1}
"""One bucket; every parameter fits in."""
SHARDED_BY_BLOCK = {"allgather_base": 6, "reduce_scatter_base": 3}
"""Two blocks and the rest: gathered for forward and backward, and reduced once."""
JOINED_BY_BLOCK = {"allgather": 5, "reduce_scatter_base": 3}
"""The same with the first version, where the rest stays whole from forward to backward."""
IN_COPIES = {"allreduce": 3}
"""What is reduced once is added up over the copies as well."""
GATHERED_KEYS = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
"""One for keys and values of each block, and its backward."""
EXCHANGED_HEADS = {"all_to_all_single": 8}
"""Two for each block, and their backwards."""
DIVIDED_LAYERS = {"all_reduce": 8}
"""For each block one after the last layer in forward, and one for each of the three first in backward."""
COLLECTIVES: dict[tuple[str, frozenset[Axis]], dict[str, int]] = {
    ("ddp", frozenset()): DATA_PARALLEL,
    ("ddp", frozenset({R})): DATA_PARALLEL,
    ("ddp", frozenset({C})): DATA_PARALLEL | GATHERED_KEYS,
    ("ddp", frozenset({R, C})): DATA_PARALLEL | GATHERED_KEYS,
    ("ddp", frozenset({Q})): DATA_PARALLEL | EXCHANGED_HEADS,
    ("ddp", frozenset({R, Q})): DATA_PARALLEL | EXCHANGED_HEADS,
    ("fsdp1", frozenset()): JOINED_BY_BLOCK,
    ("fsdp1", frozenset({S})): JOINED_BY_BLOCK,
    ("fsdp1", frozenset({R, S})): JOINED_BY_BLOCK | IN_COPIES,
    ("fsdp2", frozenset()): SHARDED_BY_BLOCK,
    ("fsdp2", frozenset({S})): SHARDED_BY_BLOCK,
    ("fsdp2", frozenset({R, S})): SHARDED_BY_BLOCK | IN_COPIES,
    ("fsdp2", frozenset({T})): DIVIDED_LAYERS,
    ("fsdp2", frozenset({S, T})): SHARDED_BY_BLOCK | DIVIDED_LAYERS,
    ("fsdp2", frozenset({C})): SHARDED_BY_BLOCK | GATHERED_KEYS,
    ("fsdp2", frozenset({R, C})): SHARDED_BY_BLOCK | IN_COPIES | GATHERED_KEYS,
    ("fsdp2", frozenset({S, C})): SHARDED_BY_BLOCK | GATHERED_KEYS,
    ("fsdp2", frozenset({Q})): SHARDED_BY_BLOCK | EXCHANGED_HEADS,
    ("fsdp2", frozenset({R, Q})): SHARDED_BY_BLOCK | IN_COPIES | EXCHANGED_HEADS,
    ("fsdp2", frozenset({S, Q})): SHARDED_BY_BLOCK | EXCHANGED_HEADS,
}


@pytest.mark.parametrize(("manifest", "axes"), COMBINATIONS, ids=name_of)
def test_a_step_makes_a_known_number_of_collectives(four: Group, manifest: Manifest, axes: frozenset[Axis]) -> None:
    assert four.run(collectives_of_a_step, case_of(manifest, axes)) == [COLLECTIVES[manifest.name, axes]] * 4


@pytest.mark.slow
def test_copies_of_divided_tensors_and_parameters_do_all_of_it(processes: Callable[[int], Group]) -> None:
    case = case_of(FSDP2, frozenset({R, S, T}))
    assert processes(8).run(orders, [case]) == [[IN_LAYERS.strip().splitlines()[0]]] * 8
    assert processes(8).run(collectives_of_a_step, case) == [SHARDED_BY_BLOCK | IN_COPIES | DIVIDED_LAYERS] * 8
