"""`init_module`: models built in shards, or on a device, have the values and the training of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from accel_plugins import Bundle
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin as Plugin
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.fsdp.sharding import is_built_in_shards
from accel_plugins.single.manifest import MANIFEST as SINGLE
from accel_testing.backends import Case, Training
from accel_testing.processes import Processes

FSDP = Case(FSDP2, Plugin(fsdp_version=2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = hidden + self.gain * self.down(torch.relu(self.up(self.norm(hidden))))
        return changed


class Model(nn.Module):
    """Has tied weights, a parameter of its own, a buffer, sizes that no number divides, and two initialisations."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.bias = nn.Parameter(torch.randn(11))
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.3)
            module.weight.data.mul_(0.5)
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.4)
            module.weight.data[0].zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden) * self.scale + self.bias
        return logits


def expected(seed: int = 3) -> Model:
    torch.manual_seed(seed)
    return Model()


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def prepared(case: Case, seed: int, **options: Any) -> tuple[Training, Any, Any, float]:
    training = Training(case, nn.Linear(1, 1))
    torch.manual_seed(seed)
    with training.strategy.init_module(**options):
        model = Model()
    drawn = torch.rand(()).item()
    bundle = Bundle.of([model, torch.optim.SGD(model.parameters(), lr=0.1)])
    training.strategy.check(bundle)
    bundle.models[:] = [training.strategy.place(model)]
    bundle = training.strategy.setup(bundle)
    return training, bundle.models[0], bundle.optimizers[0], drawn


def step(model: Any, optimizer: Any) -> None:
    model(torch.arange(6).view(2, 3)).square().mean().backward()
    optimizer.step()


def values_and_step(case: Case, seeds: list[int]) -> str:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    training = Training(case, nn.Linear(1, 1))
    rank = training.process.rank
    training, model, optimizer, drawn = prepared(case, seeds[rank])
    alone = expected(seeds[0])
    after = torch.rand(()).item()
    torch.manual_seed(seeds[rank])
    own = torch.rand(()).item()
    assert drawn == (after if seeds[rank] == seeds[0] else own)
    assert model.head.weight is model.embedding.weight
    assert not is_built_in_shards(model)
    for trained in (False, True):
        if trained:
            step(model, optimizer)
            step(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(one), other, rtol=1e-5 if trained else 0, atol=1e-6 if trained else 0)
    assert torch.equal(model.scale, alone.scale)
    return "equal"


@pytest.mark.parametrize("seeds", [[3, 3, 3], [3, 4, 5]], ids=["equal seeds", "different seeds"])
def test_shards_have_the_values_and_the_training_of_one_process(three: Processes, seeds: list[int]) -> None:
    assert three.run(values_and_step, FSDP, seeds) == ["equal"] * 3


def test_ignored_modules_get_full_values(two: Processes) -> None:
    case = Case(FSDP2, Plugin(fsdp_version=2, ignored_modules="blocks.0"))
    assert two.run(values_and_step, case, [3, 3]) == ["equal"] * 2


def held() -> tuple[int, int, int]:
    """Bytes of the shards while a model waits for `prepare`, of its full parameters, and of parameters in memory."""
    training = Training(FSDP, nn.Linear(1, 1))
    with training.strategy.init_module():
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    parameters = list(model.parameters())
    shards = [vars(parameter)["_accel_shard"] for parameter in parameters]
    in_memory = sum(p.numel() * 4 for p in parameters if not p.is_meta)
    return sum(s.untyped_storage().nbytes() for s in shards), sum(p.numel() * 4 for p in parameters), in_memory


def test_each_process_holds_its_shards_alone(two: Processes) -> None:
    for shards, whole, in_memory in two.run(held):
        assert shards == whole // 2
        assert in_memory == 0


def empty() -> str:
    _, model, _, _ = prepared(FSDP, 3, empty_init=True)
    from accel_plugins.fsdp import weights

    alone = expected(5)
    weights.put_full_weights(model, alone.state_dict())
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(full(one), other)
    return "loaded"


def test_an_empty_model_takes_loaded_weights(two: Processes) -> None:
    assert two.run(empty) == ["loaded"] * 2


def arrives_sharded() -> str:
    training = Training(FSDP, nn.Linear(1, 1))
    alone, model = expected(), expected()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    groups = {id(module): module for module in model.modules() if isinstance(module, FSDPModule)}
    bundle = Bundle.of([model, torch.optim.SGD(model.parameters(), lr=0.1)])
    training.strategy.check(bundle)
    bundle.models[:] = [training.strategy.place(model)]
    bundle = training.strategy.setup(bundle)
    assert bundle.models[0] is model
    assert {id(module) for module in model.modules() if isinstance(module, FSDPModule)} == groups.keys()
    step(model, bundle.optimizers[0])
    step(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(one), other)
    return "as it was"


def test_a_model_that_the_user_sharded_is_accepted_as_it_is(two: Processes) -> None:
    assert two.run(arrives_sharded) == ["as it was"] * 2


def test_one_process_builds_on_its_device(one: Processes) -> None:
    assert one.run(values_and_step, Case(SINGLE), [3]) == ["equal"]


@pytest.mark.usefixtures("cpu_state")
def test_an_empty_model_of_one_process_is_not_initialised() -> None:
    training = Training(Case(SINGLE), nn.Linear(1, 1))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with training.strategy.init_module(empty_init=True):
        nn.Linear(4, 4)
    assert torch.equal(torch.get_rng_state(), before)
