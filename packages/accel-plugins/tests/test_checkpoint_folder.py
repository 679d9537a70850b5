"""What a checkpoint folder holds, and that all of it comes back."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from accel_plugins import AcceleratedOptimizer, AcceleratedScheduler, Bundle, Context, Strategy
from accel_plugins.checkpoint.files import MANIFEST_NAME, random_states_name
from accel_plugins.checkpoint.pickled import read, write
from accel_plugins.checkpoint.state import load_folder, save_folder
from accel_plugins.precision import choose
from accel_plugins.prepared import PreparedObjects
from accel_plugins.resolve import build
from accel_plugins.resolve import choose as choose_backend
from accel_state import PartialState, current
from accel_state.errors import CheckpointError
from accel_state.gradient import GradientState
from accel_testing.fresh import fresh
from accel_testing.processes import Processes


class Counter:
    """An object registered for checkpointing, with a numpy array in its state."""

    def __init__(self) -> None:
        self.seen = numpy.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "kinds": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Position:
    """A loader, as far as a checkpoint needs to know it."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def strategy(precision: str = "no") -> Strategy:
    PartialState(cpu=True)
    process = current.process()
    return build(choose_backend(), None, Context(process, GradientState(), choose(precision, process.family)))


def contents(owner: Strategy, seed: int = 0) -> PreparedObjects:
    """Two models with an optimizer each, a schedule, a loader, a scale and a registered object."""
    torch.manual_seed(seed)
    models: list[nn.Module] = [nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 1)), nn.Linear(2, 1)]
    inner = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    schedule = torch.optim.lr_scheduler.MultiStepLR(inner[0], [2, 3], 0.5)
    bundle = owner.setup(Bundle.of([*models, *inner]))
    optimizers = [AcceleratedOptimizer(each, strategy=owner) for each in bundle.optimizers]
    return PreparedObjects(
        models=bundle.models,
        optimizers=optimizers,
        schedulers=[AcceleratedScheduler(schedule, optimizers[0], processes=1)],
        loaders=[Position()],
        scaler=owner.context.precision,
        custom=[Counter()],
    )


def train(owner: Strategy, what: PreparedObjects, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = sum(model(torch.randn(4, 2)).square().mean() for model in what.models)
        assert isinstance(loss, torch.Tensor)
        owner.backward(loss)
        for optimizer in what.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        what.schedulers[0].step()
        what.loaders[0].at += 1
        what.custom[0].seen += 1
        losses.append(loss.item())
    return losses


@pytest.fixture
def owner(fresh_state: None) -> Strategy:
    return strategy()


def save(folder: Path, owner: Strategy, what: PreparedObjects, **options: Any) -> None:
    save_folder(folder, what, owner, owner.context.process, **options)


def load(folder: Path, owner: Strategy, what: PreparedObjects, **options: Any) -> int:
    return load_folder(folder, what, owner, owner.context.process, **options)


FILES = {
    *("model.safetensors", "model_1.safetensors", "optimizer.bin", "optimizer_1.bin", "scheduler.bin"),
    *("dl_state_dict.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"),
}


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("safe", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, precision: str, safe: bool) -> None:
    with fresh():
        owner = strategy(precision)
        what = contents(owner)
        train(owner, what, 3)
        save(tmp_path, owner, what, step=3, safe_serialization=safe)
        expected = train(owner, what, 4)
    with fresh():
        owner = strategy(precision)
        other = contents(owner, seed=99)
        torch.randn(7)

        assert load(tmp_path, owner, other) == 3
        assert train(owner, other, 4) == expected
        assert other.schedulers[0].state_dict() == what.schedulers[0].state_dict()
        assert other.loaders[0].at == 7
        assert other.custom[0].seen.tolist() == [7, 7]
    names = FILES if safe else {name.replace("model", "pytorch_model").replace("safetensors", "bin") for name in FILES}
    assert {entry.name for entry in tmp_path.iterdir()} == names | ({"scaler.pt"} if precision == "fp16" else set())


def test_all_generators_continue(tmp_path: Path, owner: Strategy) -> None:
    save(tmp_path, owner, PreparedObjects())
    expected = random.random(), float(numpy.random.rand()), torch.rand(3).tolist()
    load(tmp_path, owner, PreparedObjects())

    assert (random.random(), float(numpy.random.rand()), torch.rand(3).tolist()) == expected
    keys = set(read(tmp_path / random_states_name(0)))
    assert {"step", "random_state", "numpy_random_seed", "torch_manual_seed"} <= keys


def test_hooks_see_models_and_weights_and_may_take_them_away(tmp_path: Path, owner: Strategy) -> None:
    what = contents(owner)
    seen = []

    def before_saving(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        seen.append((len(models), sorted(weights[1]), folder))
        weights.pop()

    def before_loading(models: list[nn.Module], folder: str) -> None:
        seen.append((len(models), folder))
        models.pop()

    save(tmp_path, owner, what, hooks=[before_saving])
    assert not (tmp_path / "model_1.safetensors").exists()
    load(tmp_path, owner, what, hooks=[before_loading])
    assert seen == [(2, ["bias", "weight"], str(tmp_path)), (2, str(tmp_path))]
    assert len(what.models) == 2


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path, owner: Strategy) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    save(tmp_path, owner, PreparedObjects(models=[model]))
    load(tmp_path, owner, PreparedObjects(models=[other]))

    assert torch.equal(other[1].weight, model[0].weight)
    assert other[1].weight is other[0].weight


# -------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.safetensors", "none of model.safetensors, pytorch_model.bin"),
        ("optimizer_1.bin", "file does not exist"),
        ("scheduler.bin", "file does not exist"),
        ("dl_state_dict.bin", "file does not exist"),
        ("custom_checkpoint_0.pkl", "The checkpoint has 0"),
        ("random_states_0.pkl", "process 0 of 1 (?s:.*)has none"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, owner: Strategy, name: str, sentence: str) -> None:
    what = contents(owner)
    save(tmp_path, owner, what)
    (tmp_path / name).unlink()

    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path, owner, what)


def test_a_generator_that_was_not_saved_is_named(tmp_path: Path, owner: Strategy) -> None:
    what = contents(owner)
    save(tmp_path, owner, what, step=3)
    states = read(tmp_path / "random_states_0.pkl")
    del states["numpy_random_seed"]
    write(states, tmp_path / "random_states_0.pkl")

    with pytest.raises(CheckpointError, match="no state of numpy_random_seed"):
        load(tmp_path, owner, what)
    assert load(tmp_path, owner, what, allow_missing={"random_states"}) == 3


@pytest.mark.parametrize("restores", [True, False])
def test_the_original_saves_no_position_of_a_loader_that_does_not_restore_it(
    tmp_path: Path, owner: Strategy, restores: bool, caplog: pytest.LogCaptureFixture
) -> None:
    what = contents(owner)
    save(tmp_path, owner, what)
    (tmp_path / "dl_state_dict.bin").unlink()
    what.loaders[0].restores = restores
    if restores:
        with pytest.raises(CheckpointError, match="file does not exist"):
            load(tmp_path, owner, what)
    else:
        load(tmp_path, owner, what)
        assert "no position of a loader" in caplog.text
        (tmp_path / MANIFEST_NAME).write_text("{}")
        with pytest.raises(CheckpointError, match="file does not exist"):
            load(tmp_path, owner, what)


def test_what_is_waived_may_be_missing(tmp_path: Path, owner: Strategy) -> None:
    what = contents(owner)
    save(tmp_path, owner, what, step=5)
    for name in ("dl_state_dict.bin", "custom_checkpoint_0.pkl"):
        (tmp_path / name).unlink()
    (tmp_path / "random_states_0.pkl").rename(tmp_path / "random_states_1.pkl")

    assert load(tmp_path, owner, what, allow_missing={"loaders", "custom", "random_states"}) == 5
    (tmp_path / "random_states_1.pkl").unlink()
    assert load(tmp_path, owner, what, allow_missing={"loaders", "custom", "random_states"}) == 0


def test_states_of_objects_that_are_not_prepared_are_named(
    tmp_path: Path, owner: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    what = contents(owner)
    save(tmp_path, owner, what)
    load(tmp_path, owner, what)
    assert not caplog.records
    what.schedulers.clear()
    del what.optimizers[1]
    load(tmp_path, owner, what)
    (warning,) = caplog.messages
    assert warning.startswith("optimizer_1.bin, scheduler.bin of ")


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("size", [0, 40])
def test_a_truncated_file_is_named(tmp_path: Path, owner: Strategy, name: str, size: int) -> None:
    what = contents(owner)
    save(tmp_path, owner, what)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:size])

    with pytest.raises(CheckpointError, match=name):
        load(tmp_path, owner, what)


class Evil:
    """A pickle that writes a file when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.trace, "executed"))


@pytest.mark.parametrize("name", sorted({*FILES, "pytorch_model.bin"} - {"model.safetensors", "model_1.safetensors"}))
@pytest.mark.parametrize("plain", [True, False])
def test_no_file_can_run_code(tmp_path: Path, owner: Strategy, name: str, plain: bool) -> None:
    what, trace = contents(owner), tmp_path / "trace"
    save(tmp_path, owner, what)
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
    if plain:
        (tmp_path / name).write_bytes(pickle.dumps(Evil(trace)))
    else:
        torch.save(Evil(trace), tmp_path / name)

    with pytest.raises(CheckpointError, match=name):
        load(tmp_path, owner, what)
    assert not trace.exists()
    if name == "custom_checkpoint_0.pkl" and not plain:
        with pytest.raises(CheckpointError, match="TypeError"):
            load(tmp_path, owner, what, trusted=True)
        assert trace.read_text() == "executed"


def test_a_state_of_another_object_is_refused(tmp_path: Path, owner: Strategy) -> None:
    save(tmp_path, owner, contents(owner))
    wide = contents(owner)
    wide.models[0] = nn.Linear(5, 5)
    other = contents(owner)
    other.optimizers[0] = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    with pytest.raises(CheckpointError, match="into Linear"):
        load(tmp_path, owner, wide)
    with pytest.raises(CheckpointError, match=r"optimizer.bin .* into SGD"):
        load(tmp_path, owner, other)


def test_strict_may_be_waived_for_models(tmp_path: Path, owner: Strategy) -> None:
    save(tmp_path, owner, PreparedObjects(models=[nn.Linear(2, 1, bias=False)]))
    model = nn.Linear(2, 1)

    with pytest.raises(CheckpointError, match="bias"):
        load(tmp_path, owner, PreparedObjects(models=[model]))
    load(tmp_path, owner, PreparedObjects(models=[model]), model_options={"strict": False})


def test_a_state_that_cannot_be_pickled_leaves_no_file(tmp_path: Path, owner: Strategy) -> None:
    class Local:
        def state_dict(self) -> dict[str, Any]:
            return {"function": lambda: 0}

    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl"):
        save(tmp_path, owner, PreparedObjects(custom=[Local()]))
    assert not (tmp_path / "custom_checkpoint_0.pkl").exists()


# ------------------------------------------------------------------- several processes


def save_and_go_on(folder: str) -> tuple[list[float], list[float]]:
    owner = strategy()
    what = contents(owner)
    torch.manual_seed(10 + owner.context.process.rank)
    train(owner, what, 2)
    save(Path(folder), owner, what, step=2)
    PartialState().wait_for_everyone()
    expected = train(owner, what, 3)
    other = contents(owner, seed=77)
    assert load(Path(folder), owner, other) == 2
    return expected, train(owner, other, 3)


def test_each_process_has_its_own_generators_back(two: Processes, tmp_path: Path) -> None:
    answers = two.run(save_and_go_on, str(tmp_path))

    for expected, resumed in answers:
        assert resumed == expected
    assert answers[0][0] != answers[1][0]
    extra = {"random_states_1.pkl", "dl_state_dict_rank1.bin"}
    assert {entry.name for entry in tmp_path.iterdir()} == FILES | extra


def test_another_number_of_processes_loads_but_for_the_generators(
    two: Processes, tmp_path: Path, owner: Strategy
) -> None:
    two.run(save_and_go_on, str(tmp_path))
    what = contents(owner)
    with pytest.raises(CheckpointError, match=r"of 1 from(?s:.*)random_states_0\.pkl, random_states_1\."):
        load(tmp_path, owner, what)
    (tmp_path / "random_states_0.pkl").unlink()

    with pytest.raises(CheckpointError, match=r"random_states_1\.pkl, so it was saved by another number of"):
        load(tmp_path, owner, what)
    assert load(tmp_path, owner, what, allow_missing={"random_states"}) == 2
    assert what.loaders[0].at == 2
