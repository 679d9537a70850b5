"""What the kit cannot know: how much is sent, that nothing is lost, and that what is late survives a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_backend_example import ExampleConfig
from accel_backend_example.manifest import MANIFEST
from accel_plugins.checkpoint import pickled
from accel_state.errors import CheckpointError, SettingError
from accel_testing.backends import Case
from accel_testing.backends.checkpoints import Around, save_and_resume
from accel_testing.backends.gradients import overflow
from accel_testing.processes import Processes


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as group:
        yield group


def case(keep: float, **changes: Any) -> Case:
    return Case(MANIFEST, ExampleConfig(keep), **changes)


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_that_cannot_be_sent_is_refused(keep: float) -> None:
    with pytest.raises(SettingError, match="above 0 and at most 1"):
        ExampleConfig(keep)


def bytes_of(given: Case) -> int:
    session = given.open()
    session.train()
    strategy: Any = session.strategy
    return int(strategy.sent_bytes())


def test_less_is_sent(two: Processes) -> None:
    everything, tenth = two.run(bytes_of, case(1.0))[0], two.run(bytes_of, case(0.1))[0]
    assert 0 < tenth < everything / 5


def one_gradient(given: Case) -> list[tuple[list[float], list[float], list[float]]]:
    """For each step: this process's own gradient, what it has not sent before and after, and what came out."""
    session = given.open(nn.Linear(6, 3, bias=False))
    bare: Any = session.strategy.unwrap(session.model)
    told = []
    for step in range(3):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + session.process.rank))
        own = torch.autograd.grad(bare(inputs).square().mean(), bare.weight)[0]
        session.strategy.backward(session.model(inputs).square().mean())
        strategy: Any = session.strategy
        unsent = strategy._unsent(session.model)["weight"]
        told.append((own.flatten().tolist(), unsent.flatten().tolist(), bare.weight.grad.flatten().tolist()))
        bare.weight.grad = None
    return told


def test_nothing_is_lost_only_late(two: Processes) -> None:
    ranks = [torch.tensor(told) for told in two.run(one_gradient, case(0.25))]
    before = [torch.zeros(18) for _ in ranks]
    for step in range(3):
        own, unsent, result = ([rank[step][kind] for rank in ranks] for kind in range(3))
        sent = [own[rank] + before[rank] - unsent[rank] for rank in range(2)]
        assert [int((one != 0).sum()) for one in sent] == [5, 5]
        torch.testing.assert_close(result[0], (sent[0] + sent[1]) / 2)
        assert torch.equal(result[0], result[1])
        before = unsent


def pull_unevenly(given: Case) -> list[float]:
    """Weights after ten steps in which one gradient is five times the other, and changes its sign."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    session = given.open(model)
    for step in range(10):
        pull = torch.tensor([[5.0 * (-1) ** step, 1.0]])
        session.strategy.backward(session.model(pull).sum())
        session.step()
    return [float(weight) for weight in session.weights()["weight"][0]]


def test_small_gradients_arrive_late_with_feedback_and_never_without(two: Processes) -> None:
    late = two.run(pull_unevenly, Case(MANIFEST, ExampleConfig(0.5)))[0]
    never = two.run(pull_unevenly, Case(MANIFEST, ExampleConfig(0.5, feedback=False)))[0]
    assert never[1] == 0
    assert late[1] < 0


@pytest.mark.parametrize("transforms", [(), (Around(),)], ids=["bare", "behind a layer"])
def test_what_is_late_survives_a_checkpoint(two: Processes, tmp_path: Path, transforms: Any) -> None:
    for answer in two.run(save_and_resume, case(0.2, transforms=transforms), str(tmp_path)):
        assert answer["resumed"] == answer["expected"]
        assert answer["same_weights"]
    kept = [pickled.read(path)["unsent"] for path in tmp_path.glob("extra_state_*.pkl")]
    assert [bool(unsent) for (unsent,) in kept] == [True, True]


def load_from(folder: str) -> str:
    try:
        case(0.2).open().load(Path(folder))
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def test_a_checkpoint_of_fewer_processes_is_refused(two: Processes, tmp_path: Path) -> None:
    two.run(save_and_resume, case(0.2), str(tmp_path))
    (tmp_path / "extra_state_1.pkl").unlink()
    first, second = two.run(load_from, str(tmp_path))
    assert first == "nothing was raised"
    assert "extra_state_1.pkl" in second


def test_an_overflow_spreads_and_is_not_kept(two: Processes) -> None:
    for answer in two.run(overflow, case(0.2, precision="fp16")):
        assert answer == {"stepped": [False, True], "unchanged": True}
