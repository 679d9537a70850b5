"""Plans of tensor parallelism: where they come from, what they shard, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from accel_plugins import Bundle, Context, TorchTensorParallelPlugin
from accel_plugins.precision import choose
from accel_plugins.transforms.tensor_parallel import TensorParallel
from accel_state import PartialState, current
from accel_state.errors import AccelError, Conflict, SettingError
from accel_state.gradient import GradientState
from accel_state.mesh import ParallelismConfig
from accel_testing.processes import Processes as Group

pytestmark = pytest.mark.usefixtures("fresh_state")


class Language(nn.Module):
    """Its input and its output share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(8, 6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        out: Tensor = self.head(self.norm(hidden + self.down(self.up(hidden).relu())))
        return out


class Planned(Language):
    tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012 - read as models write it


def context() -> Context:
    PartialState(cpu=True)
    process = current.process()
    mesh = ParallelismConfig(tp_size=2).get_device_mesh("cpu")
    return Context(process, GradientState(), choose("no", process.family), mesh)


PLANS: dict[str, Any] = {
    "names": {"up": "colwise", "down": "rowwise"},
    "patterns": {"u*": "colwise", "d*n": "rowwise"},
    "objects": {"up": ColwiseParallel(), "down": "rowwise"},
    "replicated": {"up": "colwise_rep", "down": "rowwise_rep"},
    "head": {"embedding": "colwise_rep", "head": "rowwise_rep"},
    "own": None,
}


def shard(plan: str, given_mesh: str) -> dict[str, Any]:
    around = context()
    model = Planned() if plan == "own" else Language()
    axes = {"one": ("any",), "several": ("x", "tp")}.get(given_mesh, ())
    mesh = init_device_mesh("cpu", (1, 2)[-len(axes) :], mesh_dim_names=axes) if axes else None
    expected = Language()(torch.arange(8))
    transform = TensorParallel(PLANS[plan], mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transform.check(Bundle.of([model, optimizer]), around)
    assert transform.apply(model, around) is model
    assert transform.apply(model, around) is model
    outputs = model(torch.arange(8))
    outputs.sum().backward()
    return {
        "near": torch.allclose(outputs, expected, atol=1e-5),
        "sharded": sorted(name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)),
        "tied": model.head.weight is model.embedding.weight,
    }


SHARDED = ["down.bias", "down.weight", "up.bias", "up.weight"]


@pytest.mark.parametrize("plan", ["names", "patterns", "objects", "replicated", "head", "own"])
def test_a_plan_shards_what_it_names_and_keeps_ties(two: Group, plan: str) -> None:
    sharded = ["embedding.weight"] if plan == "head" else SHARDED
    for answer in two.run(shard, plan, ""):
        assert answer == {"near": True, "sharded": sharded, "tied": True}


@pytest.mark.parametrize("given_mesh", ["one", "several"])
def test_tensor_parallelism_on_a_given_mesh(two: Group, given_mesh: str) -> None:
    assert [answer["sharded"] for answer in two.run(shard, "names", given_mesh)] == [SHARDED] * 2


def refusal(what: str) -> str:
    around, model = context(), Language()
    plan: Any = {
        "no plan": None,
        "name": {"upp": "colwise"},
        "style": {"up": "columnwise"},
        "tie": {"embedding": "colwise_rep", "head": "colwise_rep"},
    }.get(what, {"up": "colwise"})
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("x", "y")) if what == "mesh" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "stepped":
        optimizer.state[model.up.weight]["momentum_buffer"] = torch.zeros(12, 6)
    if what == "no axis":
        around = around._replace(mesh=None)
    transform = TensorParallel(plan, mesh)
    try:
        transform.check(Bundle.of([model, optimizer]), around)
        transform.apply(model, around)
    except AccelError as error:
        return f"{type(error).__name__}: {error}" if error.obstacle and error.remedy else "a part is missing"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("what", "error", "named"),
    [
        ("no plan", "SettingError", "The model has no tensor-parallel plan"),
        ("name", "SettingError", "Did you mean 'up'"),
        ("style", "SettingError", "Did you mean 'colwise'"),
        ("mesh", "SettingError", "none has the name 'tp'"),
        ("stepped", "Conflict", "unsharded parameters"),
        ("no axis", "Conflict", "ParallelismConfig(tp_size=...)"),
        ("tie", "Conflict", "Embedding and Linear"),
    ],
)
def test_what_cannot_be_sharded_is_refused(two: Group, what: str, error: str, named: str) -> None:
    for answer in two.run(refusal, what):
        assert answer.startswith(error)
        assert named in answer


def test_the_size_has_two_names() -> None:
    assert TorchTensorParallelPlugin(2).tp_size == 2
    assert TorchTensorParallelPlugin(tensor_parallel_degree=4).tp_size == 4
    assert TorchTensorParallelPlugin(4, tensor_parallel_degree=4).tp_size == 4
    assert TorchTensorParallelPlugin() == TorchTensorParallelPlugin(1, None)
    with pytest.raises(Conflict, match="names of the same setting"):
        TorchTensorParallelPlugin(2, tensor_parallel_degree=4)


@pytest.mark.parametrize("options", [{"tp_size": 0}, {"tp_size": "2"}, {"tp_size": True}, {"parallelize_plan": ["up"]}])
def test_settings_that_do_not_exist_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        TorchTensorParallelPlugin(**options)
