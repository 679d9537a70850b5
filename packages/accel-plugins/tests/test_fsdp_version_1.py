"""What is particular to the first version of FSDP; that it trains, clips and saves like everybody is in the suite."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accel_plugins import extract_model_from_parallel
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin as Plugin
from accel_plugins.fsdp.manifest import FSDP1, FSDP2
from accel_plugins.resolve import choose
from accel_state import PartialState, current
from accel_state.errors import AccelError
from accel_state.mesh import ParallelismConfig
from accel_testing.backends import Case, Training
from accel_testing.backends.reference_loop import Plain, Small, batches, first_half, make_model, near, second_half
from accel_testing.processes import Processes as Group

pytestmark = pytest.mark.usefixtures("fresh_state")


BY_SIZE: dict[str, Any] = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 50}


def case(**options: Any) -> Case:
    return Case(FSDP1, Plugin(1, **options))


def train(given: Case) -> dict[str, Any]:
    training = Training(given)
    losses, norms = training.train()
    blocks = len(FullyShardedDataParallel.fsdp_modules(training.model))
    bare = extract_model_from_parallel(training.model)
    return {
        "losses": losses,
        "norms": norms,
        "blocks": blocks,
        "weights": training.weights(),
        "unwrapped": bare is training.user_model is training.strategy.unwrap(training.model),
    }


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def has_one_hundred(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or nonwrapped_numel >= 100


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# The last of three micro-batches synchronises as a step of one does.
@pytest.mark.parametrize("accumulation", [slow(1), 3])
@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        (BY_SIZE, 3),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Linear"]}, 4),
        ({"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=50)}, 3),
        ({"auto_wrap_policy": partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})}, 4),
        ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, 4),
        ({"auto_wrap_policy": CustomPolicy(is_linear), "activation_checkpointing": True}, 4),
        ({"auto_wrap_policy": has_one_hundred}, 2),
        ({"auto_wrap_policy": is_linear}, 4),
        ({**BY_SIZE, "activation_checkpointing": True}, 3),
        ({**BY_SIZE, "activation_checkpointing_offload": True}, 3),
        ({**BY_SIZE, "cpu_ram_efficient_loading": True}, 3),
        ({**BY_SIZE, "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True}, 3),
        ({**BY_SIZE, "backward_prefetch": "BACKWARD_POST", "limit_all_gathers": False}, 3),
        ({"use_orig_params": False}, 1),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, 1),
        ({"reshard_after_forward": "full_shard"}, 1),
        ({"mixed_precision_policy": MixedPrecision(param_dtype=torch.float32)}, 1),
        ({"mixed_precision_policy": {"param_dtype": "float32", "buffer_dtype": "float32"}}, 1),
        ({"ignored_modules": "head"}, 1),
    ],
)
def test_every_option_trains_like_one_process(
    two: Group, options: dict[str, Any], blocks: int, accumulation: int
) -> None:
    given = case(**options).but(accumulation=accumulation, clip_norm=0.2)
    plain = Plain(given).run()
    answers = two.run(train, given)
    for answer in answers:
        assert answer["losses"] == near(plain.losses)
        assert answer["norms"] == near(plain.norms)
        assert (answer["blocks"], answer["unwrapped"]) == (blocks, True)
    assert answers[0]["weights"] == near(plain.weights())


def unsharded(given: Case) -> list[float]:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated")
        return Training(given).train()[0]


def test_parameters_may_stay_whole(two: Group) -> None:
    given = case(sharding_strategy="NO_SHARD")
    assert two.run(unsharded, given)[0] == near(Plain(given).run().losses)


@pytest.mark.parametrize("sizes", [{"dp_replicate_size": 2, "dp_shard_size": 2}, {"dp_shard_size": 4}])
def test_copies_of_groups_are_arranged_on_a_mesh(four: Group, sizes: dict[str, int]) -> None:
    given = case(**BY_SIZE).but(parallelism_config=ParallelismConfig(**sizes), clip_norm=0.2)
    plain = Plain(given).run()
    for answer in four.run(train, given):
        assert answer["losses"] == near(plain.losses)
        assert answer["norms"] == near(plain.norms)


class Fleeting(Small):
    """Has a buffer that no state dict holds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("fleeting", torch.full((2,), 3.0), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(inputs) * self.fleeting[0]
        return logits


def load_from_first(given: Case) -> dict[str, Any]:
    PartialState(cpu=True)
    model = Fleeting(7)
    if current.process().rank:
        model = model.to("meta")
    training = Training(given, model)
    with torch.no_grad():
        return {"weights": training.weights(), "output": training.model(torch.ones(2, 6)).tolist()}


def test_only_the_first_process_has_to_load_weights(two: Group) -> None:
    expected = Fleeting(7)
    with torch.no_grad():
        output = expected(torch.ones(2, 6)).tolist()
    answers = two.run(load_from_first, case(cpu_ram_efficient_loading=True))
    assert answers[0]["weights"] == {name: value.tolist() for name, value in expected.state_dict().items()}
    assert [answer["output"] for answer in answers] == [near(output)] * 2


def filled(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(0.25)


def initialise(given: Case) -> dict[str, Any]:
    PartialState(cpu=True)
    return Training(given.but(config=Plugin(1, param_init_fn=filled)), make_model().to("meta")).weights()


def test_modules_without_values_get_them_from_a_function(two: Group) -> None:
    weights = two.run(initialise, case())[0]
    assert set(weights) == set(make_model().state_dict())
    assert all(
        torch.equal(torch.tensor(value), torch.full_like(torch.tensor(value), 0.25)) for value in weights.values()
    )


def refusal(given: Case, what: str) -> str:
    try:
        training = Training(given)
        if what == "part":
            training.backward(next(iter(batches(given))))
            training.strategy.clip_norm(list(training.model.parameters())[:1], 1.0)
    except AccelError as error:
        return f"{type(error).__name__}: {error}" if error.obstacle and error.remedy else f"{error} lacks a part"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("options", "what", "error", "named"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "", "NotOffered", "wrong losses"),
        ({"reshard_after_forward": False}, "", "NotOffered", "wrong losses"),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, "", "NotOffered", "wrong losses"),
        ({"cpu_offload": True}, "", "NotOffered", "already"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "", "NotOffered", "SHARDED_STATE_DICT"),
        ({"sharding_strategy": "NO_SHARD", "state_dict_type": "SHARDED_STATE_DICT"}, "", "Conflict", "no shards"),
        ({"fsdp_version": 2}, "", "Conflict", "FSDP_VERSION=1"),
        ({}, "part", "NotOffered", "all parameters of one model"),
    ],
)
def test_what_cannot_work_is_refused(two: Group, options: dict[str, Any], what: str, error: str, named: str) -> None:
    for answer in two.run(refusal, Case(FSDP1, Plugin(**{"fsdp_version": 1, **options})), what):
        assert answer.startswith(error)
        assert named in answer


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("field", ["state_dict_config", "optim_state_dict_config"])
def test_states_are_saved_on_a_cpu_whether_or_not_they_are_moved_there(
    two: Group, tmp_path: Path, field: str, to_host: bool
) -> None:
    saved = two.run(saving, field, to_host, str(tmp_path))
    assert saved[0]["losses"] == near(saved[1]["losses"])
    assert (tmp_path / "optimizer.bin").is_file()


def saving(field: str, to_host: bool, folder: str) -> dict[str, Any]:
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

    kind: Any = FullStateDictConfig if field == "state_dict_config" else FullOptimStateDictConfig
    return first_half(case(state_dict_type="FULL_STATE_DICT", **{field: kind(to_host)}), folder)


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [({"dp_shard_size": 4}, "HYBRID_SHARD"), ({"dp_replicate_size": 2, "dp_shard_size": 2}, "FULL_SHARD")],
)
def test_a_strategy_that_contradicts_the_mesh_is_refused(four: Group, sizes: dict[str, int], strategy: str) -> None:
    given = case(sharding_strategy=strategy).but(parallelism_config=ParallelismConfig(**sizes))
    assert all(answer.startswith("Conflict") for answer in four.run(refusal, given, ""))


# ------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    ("full", "adam", "version"),
    [
        # Each pair of values; the slow ones are the rest of the product.
        *((True, True, 1), (False, True, 2), (True, False, 2), (False, False, 1)),
        *(slow(True, True, 2), slow(False, True, 1), slow(True, False, 1), slow(False, False, 2)),
    ],
)
def test_four_processes_and_the_other_version_load_what_two_saved(
    two: Group, four: Group, tmp_path: Path, full: bool, adam: bool, version: int
) -> None:
    kind = "FULL_STATE_DICT" if full else "SHARDED_STATE_DICT"
    given = case(state_dict_type=kind, **BY_SIZE).but(adam=adam)
    saved = two.run(first_half, given, str(tmp_path))
    other = given.but(manifest=FSDP1 if version == 1 else FSDP2, config=Plugin(version, state_dict_type=kind))
    for answer in four.run(second_half, other, str(tmp_path)):
        assert answer["losses"] == near(saved[0]["losses"])
        assert answer["weights"] in ({}, near(saved[0]["weights"]))


# -------------------------------------------------------------------------- selection


def chosen() -> str:
    PartialState(cpu=True)
    return choose().name


def named_against_the_environment() -> str:
    return refusal(Case(FSDP2), "")


def test_a_launcher_asks_for_it_by_its_version(two: Group) -> None:
    asked = {"ACCELERATE_USE_FSDP": "true"}
    assert two.run(chosen, environment=asked) == ["fsdp1"] * 2
    assert two.run(chosen, environment={**asked, "FSDP_VERSION": "1"}) == ["fsdp1"] * 2
    assert two.run(chosen, environment={**asked, "FSDP_VERSION": "2"}) == ["fsdp2"] * 2
    for answer in two.run(named_against_the_environment, environment={"FSDP_VERSION": "1"}):
        assert answer.startswith("Conflict")
