"""Every combination of axes trains like one process, in mixed precision too, and its checkpoints load on other axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.manifest import Axis, Manifest
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.transforms.sequence_sharding import shard_sequences
from accel_state import PartialState, current
from accel_testing.backends import Case, Training
from accel_testing.backends.reference_loop import near as near_to
from accel_testing.backends.sequences import BY_BLOCK, COMBINATIONS, SequenceModel, case_of, data, loss_of, name_of
from accel_testing.processes import Processes as Group

R, S, C, Q, T = (Axis.REPLICATE, Axis.SHARD, Axis.CONTEXT, Axis.SEQUENCE, Axis.TENSOR)


@pytest.fixture(autouse=True)
def context_parallelism_alone(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_ALLOW_CP_STANDALONE", "true")


def reference(clip: float | None) -> dict[str, Any]:
    """The same training in one process, in plain torch."""
    model = SequenceModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, norms = [], []
    for inputs, targets in data():
        loss = loss_of(model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": {n: v.tolist() for n, v in model.state_dict().items()}}


def train(case: Case, clip: float | None) -> dict[str, Any]:
    training = Training(case, SequenceModel())
    losses, norms = [], []
    for batch in data():
        inputs, targets = training.slice(batch)
        with shard_sequences(training.strategy.context, [inputs, targets], [1, 1]):
            loss = loss_of(training.model, inputs, targets)
            training.strategy.backward(loss)
        if clip is not None:
            norm: Any = training.strategy.clip_norm(list(training.model.parameters()), clip)
            norms.append(float(norm))
        training.step()
        losses.append(training.mean(loss.item()))
    return {"losses": losses, "norms": norms, "weights": training.weights()}


near = partial(near_to, rel=2e-4, abs=2e-5)


def slow(*values: Any) -> Any:
    """Values that meet each other in another case already."""
    return pytest.param(*values, marks=pytest.mark.slow)


# The norms before clipping show each wrong gradient, its scale too.
@pytest.mark.parametrize("clip", [slow(None), 0.05])
@pytest.mark.parametrize(("manifest", "axes"), COMBINATIONS, ids=name_of)
def test_losses_and_weights_are_those_of_one_process(
    four: Group, manifest: Manifest, axes: frozenset[Axis], clip: float | None
) -> None:
    expected = reference(clip)
    answers = four.run(train, case_of(manifest, axes), clip)
    for answer in answers:
        assert answer["losses"] == near(expected["losses"])
        assert answer["norms"] == (near(expected["norms"]) if clip else [])
    assert answers[0]["weights"] == near(expected["weights"])


@pytest.mark.slow
def test_copies_of_divided_tensors_and_parameters(processes: Callable[[int], Group]) -> None:
    expected = reference(0.05)
    axes = frozenset({R, S, T})
    for answer in processes(8).run(train, case_of(FSDP2, axes), 0.05):
        assert answer["losses"] == near(expected["losses"])
        assert answer["norms"] == near(expected["norms"])


@pytest.mark.parametrize(
    ("manifest", "axes", "offload"),
    [
        *((DDP, (R, C), False), (FSDP2, (S, T), True), (FSDP2, (S, Q), False)),
        *(slow(DDP, (R, C), True), slow(FSDP2, (S, T), False), slow(FSDP2, (S, Q), True)),
    ],
)
def test_blocks_may_be_recomputed_under_any_division(
    four: Group, manifest: Manifest, axes: tuple[Axis, ...], offload: bool
) -> None:
    answers = four.run(train, case_of(manifest, frozenset(axes), ActivationCheckpoint(offload=offload)), None)

    assert answers[0]["losses"] == near(reference(None)["losses"])


@pytest.mark.parametrize(
    ("manifest", "axes", "precision"),
    [
        *((DDP, (R, C), "fp16"), (FSDP2, (S, T), "bf16"), (FSDP2, (S, C), "fp16"), (FSDP2, (R, Q), "bf16")),
        *(slow(DDP, (R, C), "bf16"), slow(FSDP2, (S, T), "fp16")),
        *(slow(FSDP2, (S, C), "bf16"), slow(FSDP2, (R, Q), "fp16")),
    ],
)
def test_mixed_precision_stays_near_it(four: Group, manifest: Manifest, axes: tuple[Axis, ...], precision: str) -> None:
    answers = four.run(train, case_of(manifest, frozenset(axes)).but(precision=precision), None)

    assert answers[0]["losses"] == pytest.approx(reference(None)["losses"], rel=0.05)


# -------------------------------------------------------------- weights and checkpoints


def load_from_first(case: Case) -> dict[str, Any]:
    PartialState(cpu=True)
    model = SequenceModel() if current.process().rank == 0 else SequenceModel().to("meta")
    return Training(case, model).weights()


def test_only_the_first_process_has_to_load_weights_that_are_divided_twice(four: Group) -> None:
    config = dataclasses.replace(BY_BLOCK, cpu_ram_efficient_loading=True)
    weights = four.run(load_from_first, case_of(FSDP2, frozenset({S, T})).but(config=config))[0]

    assert weights == {name: value.tolist() for name, value in SequenceModel().state_dict().items()}


def save(case: Case, folder: str) -> list[float]:
    training = Training(case, SequenceModel())
    steps(training)
    training.save(Path(folder))
    return steps(training)


def resume(case: Case, folder: str) -> list[float]:
    training = Training(case, SequenceModel())
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    training.load(Path(folder))
    return steps(training)


def steps(training: Training) -> list[float]:
    losses = []
    for batch in data():
        inputs, targets = training.slice(batch)
        with shard_sequences(training.strategy.context, [inputs, targets], [1, 1]):
            loss = loss_of(training.model, inputs, targets)
            training.strategy.backward(loss)
        training.step()
        losses.append(training.mean(loss.item()))
    return losses


@pytest.mark.parametrize(
    ("axes", "others", "kind"),
    [
        *(((S, T), (R, S), "SHARDED_STATE_DICT"), ((T,), (S, T), "FULL_STATE_DICT")),
        *(slow((S, T), (R, S), "FULL_STATE_DICT"), slow((T,), (S, T), "SHARDED_STATE_DICT")),
        *(slow((R, S), (S, C), "FULL_STATE_DICT"), ((R, S), (S, C), "SHARDED_STATE_DICT")),
    ],
)
def test_a_checkpoint_loads_on_other_axes(
    four: Group, tmp_path: Path, kind: str, axes: tuple[Axis, ...], others: tuple[Axis, ...]
) -> None:
    config = dataclasses.replace(BY_BLOCK, state_dict_type=kind)
    first, second = (case_of(FSDP2, frozenset(names)).but(config=config, adam=True) for names in (axes, others))
    expected = four.run(save, first, str(tmp_path))

    assert four.run(resume, first, str(tmp_path)) == [near(losses) for losses in expected]
    assert four.run(resume, second, str(tmp_path)) == [near(losses) for losses in expected]
