"""Training in 8 bits by torchao, where it is installed (`nox -s float8`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.manifest import Manifest
from accel_plugins.precision import choose
from accel_plugins.precision.config import AORecipeKwargs
from accel_plugins.precision.fp8 import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from accel_state import PartialState, current
from accel_state.errors import SettingError
from accel_testing.backends import Case, Training
from accel_testing.processes import Processes as Group

# torchao tells of kernels that its wheel lacks here, and of what torch will change.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("fresh_state"),
]
pytest.importorskip("torchao", reason="the extra accel-plugins[torchao] is not installed")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 32)
        self.blocks = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.last = nn.Linear(32, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.first(inputs)
        for block in self.blocks:
            inputs = block(inputs).tanh()
        out: torch.Tensor = self.last(inputs)
        return out


def recipes(recipe: str | None) -> list[Any]:
    return [AORecipeKwargs(config=recipe)]


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_inner_layers_compute_in_8_bits_and_keep_their_parameters(recipe: str | None) -> None:
    PartialState(cpu=True)
    precision = choose("fp8", current.process().family, recipes(recipe))
    model = Wide()
    before = dict(model.named_parameters())
    assert precision.prepare(model) is model

    assert [type(part).__name__ for part in (model.first, *model.blocks, model.last)] == [
        "Linear",
        "Float8Linear",
        "Float8Linear",
        "Linear",
    ]
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    with torch.no_grad():
        outputs, plain = model(torch.ones(16, 6)), Wide()(torch.ones(16, 6))
    assert outputs.dtype is torch.float32
    assert 0 < (outputs - plain).abs().max() < 0.05


def train(given: Case, recipe: str | None) -> dict[str, Any]:
    training = Training(given, Wide(), handlers=recipes(recipe))
    losses = training.train()[0]
    inner = training.strategy.unwrap(training.model)
    kinds = sorted({type(part).__name__ for part in inner.modules() if isinstance(part, nn.Linear)})
    held = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    return {
        "losses": losses,
        "kinds": kinds,
        "held": held == {id(parameter) for parameter in training.model.parameters()},
        "weights": {name: type(value).__name__ for name, value in training.strategy.state_dict(training.model).items()},
    }


@pytest.mark.parametrize("recipe", [None, "rowwise"])
@pytest.mark.parametrize(
    ("manifest", "config"),
    [(DDP, None), (FSDP2, FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=500))],
)
def test_losses_stay_near_those_of_full_precision(
    two: Group, manifest: Manifest, config: Any, recipe: str | None
) -> None:
    case = Case(manifest, config, precision="fp8")
    full = two.run(train_full, case.but(precision="no"))[0]
    for answer in two.run(train, case, recipe):
        assert answer["losses"] == pytest.approx(full, rel=0.05)
        assert answer["losses"] != full
        assert "Float8Linear" in "".join(answer["kinds"])
        assert answer["held"]
        assert set(answer["weights"].values()) <= {"Tensor", "Parameter"}


def train_full(given: Case) -> list[float]:
    return Training(given, Wide()).train()[0]


def save_and_load(given: Case, folder: str) -> list[list[float]]:
    training = Training(given, Wide(), handlers=recipes(None))
    training.train()
    training.save(Path(folder))
    expected = training.train()[0]
    resumed = Training(given, Wide(), handlers=recipes(None))
    resumed.load(Path(folder))
    return [expected, resumed.train()[0]]


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_what_travels_in_8_bits_is_saved_whole(two: Group, tmp_path: Path, kind: str) -> None:
    config = FullyShardedDataParallelPlugin(2, state_dict_type=kind)
    for expected, resumed in two.run(save_and_load, Case(FSDP2, config, precision="fp8"), str(tmp_path)):
        assert resumed == pytest.approx(expected, rel=1e-5)


def test_recipes_that_do_not_exist_are_refused() -> None:
    PartialState(cpu=True)
    for given in ("blockwise", 3):
        with pytest.raises(SettingError, match="Float8LinearConfig"):
            choose("fp8", current.process().family, recipes(given))  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="multiples of 16"):
        choose("fp8", current.process().family, recipes(None)).prepare(nn.Sequential(nn.Linear(3, 3)))


def test_which_layers_are_converted_can_be_said() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(30, 32), nn.Linear(32, 32))

    assert find_first_last_linear_layers(model) == ("0", "4")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)
    assert [filter_linear_layers(part, name, ["0", "4"]) for name, part in model.named_children()] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert [filter_first_and_last_linear_layers(model, name) for name in "0124"] == [False, True, True, False]
    assert not has_ao_layers(model)
    convert_model_to_fp8_ao(model, module_filter_func=lambda module, name: name == "0")
    assert [type(part).__name__ == "Float8Linear" for part in model] == [True, False, False, False, False]
    assert has_ao_layers(model)
