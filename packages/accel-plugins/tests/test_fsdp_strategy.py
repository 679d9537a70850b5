"""What is particular to sharding; that it trains, clips, saves and loads like everybody is in the suite."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from accel_plugins import Bundle, Context
from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.manifest import FSDP1, FSDP2
from accel_plugins.fsdp.sharding import blocks_to_shard, shard_groups
from accel_plugins.fsdp.weights import send_from_first
from accel_plugins.precision import choose
from accel_plugins.resolve import build
from accel_plugins.resolve import choose as choose_backend
from accel_plugins.transforms.compile import Compile
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_state import PartialState, current
from accel_state.errors import AccelError, Conflict
from accel_state.gradient import GradientState
from accel_testing.backends import Case, Training
from accel_testing.backends.gradients import clipped_plain, count_collectives
from accel_testing.backends.reference_loop import Plain, Small, batches, first_half, make_model, near, second_half
from accel_testing.processes import Processes as Group

pytestmark = pytest.mark.usefixtures("fresh_state")


Plugin = FullyShardedDataParallelPlugin


def case(*arguments: Any, **options: Any) -> Case:
    return Case(FSDP2, Plugin(2, *arguments, **options))


def train(given: Case) -> dict[str, Any]:
    training = Training(given)
    losses, norms = training.train()
    sharded = [isinstance(parameter, DTensor) for parameter in training.model.parameters()]
    return {"losses": losses, "norms": norms, "sharded": sharded, "weights": training.weights()}


OPTIONS: list[dict[str, Any]] = [
    {"cpu_offload": True},
    {"cpu_offload": CPUOffloadPolicy(pin_memory=False)},
    {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=50)},
    {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
    {"mixed_precision_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)},
    {"activation_checkpointing": True, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 50},
    {"activation_checkpointing_offload": True, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 50},
    {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Linear"]},
    {"cpu_ram_efficient_loading": True},
    {"mixed_precision_policy": {"param_dtype": "float32", "reduce_dtype": "torch.float32"}},
]


# The last of three micro-batches synchronises as a step of one does.
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_option_trains_like_one_process(two: Group, options: dict[str, Any], accumulation: int) -> None:
    given = case(**options).but(accumulation=accumulation)
    for answer in two.run(train, given):
        assert answer["losses"] == near(Plain(given).run().losses)
        assert all(answer["sharded"])


@contextmanager
def broadcast_sizes() -> Iterator[list[int]]:
    """Elements of each tensor that is broadcast inside."""
    sizes: list[int] = []
    broadcast = torch.distributed.broadcast

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return broadcast(tensor, *arguments, **options)

    torch.distributed.broadcast = counting
    try:
        yield sizes
    finally:
        torch.distributed.broadcast = broadcast


def sent_at_start(given: Case) -> list[int]:
    """Elements of each tensor that is broadcast while a model is prepared, and again for one that is sharded."""
    training = given.open()
    with broadcast_sizes() as sent:
        prepared = training.strategy.setup(Bundle.of([given.make(training.process.rank)])).models[0]
        training.strategy.setup(Bundle.of([prepared]))
    return sent


@pytest.mark.parametrize("model", ["usual", "tied"])
def test_each_weight_and_buffer_of_the_first_process_is_sent_once(two: Group, model: str) -> None:
    given = case(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50).but(model=model)
    plain = given.make()
    # All are small and of one dtype.
    elements = sum(tensor.numel() for tensor in (*plain.parameters(), *plain.buffers()))
    assert two.run(sent_at_start, given) == [[elements], [elements]]


def sent_values() -> tuple[list[int], list[float]]:
    """Elements of each broadcast of a model with large, small, 16-bit and transposed tensors; then what arrived."""
    rank, model = case().open().process.rank, nn.Module()
    for name, value in {
        "small": torch.full((3,), 1.0 + rank),
        "large": torch.full((2, 200_000), 2.0 + rank),
        "whole_number": torch.tensor(3 + rank),
        "transposed": torch.full((4, 3), 4.0 + rank).t(),
        "in_16_bits": torch.full((5,), 5.0 + rank, dtype=torch.bfloat16),
        "transposed_large": torch.full((200_000, 2), 6.0 + rank).t(),
    }.items():
        model.register_buffer(name, value)
    with broadcast_sizes() as sent:
        send_from_first(model, torch.device("cpu"))
    return sent, [value for tensor in model.buffers() for value in sorted(set(tensor.flatten().tolist()))]


def test_small_weights_are_sent_together_and_large_ones_alone(two: Group) -> None:
    for sent, values in two.run(sent_values):
        assert sorted(sent) == [1, 3, 5, 12, 400_000, 400_000]
        assert values == [1.0, 2.0, 3, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "blocks",
    [
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 50},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Sequential", "Linear"]},
    ],
)
def test_weights_that_are_tied_across_blocks_train_like_in_one_process(
    two: Group, version: int, blocks: dict[str, Any]
) -> None:
    given = Case(FSDP1 if version == 1 else FSDP2, Plugin(version, **blocks), model="tied")
    for answer in two.run(train, given):
        assert answer["losses"] == near(Plain(given).run().losses)
        assert not answer["weights"] or answer["weights"] == near(Plain(given).run().weights())


def test_a_block_that_holds_one_of_two_tied_weights_is_sharded_with_what_holds_both() -> None:
    def linear() -> nn.Module:
        return nn.Linear(2, 2, bias=False)

    inner, apart = nn.Sequential(linear(), linear()), nn.Sequential(linear())
    outer = nn.Sequential(inner, linear())
    model = nn.Sequential(outer, apart)
    everything: Any = lambda module: True  # noqa: E731 - a policy of a user
    assert shard_groups(model, everything) == blocks_to_shard(model, everything)

    outer[1].weight = inner[0].weight
    assert set(shard_groups(model, everything)) == {outer, apart, apart[0], inner[1]}
    apart[0].weight = inner[1].weight
    assert shard_groups(model, everything) == []


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("no_sync", [True, False])
def test_parameters_that_stay_whole_train_and_are_clipped_with_the_others(
    two: Group, accumulation: int, no_sync: bool
) -> None:
    given = case(ignored_modules="head|body.0").but(accumulation=accumulation, no_sync=no_sync, clip_norm=0.2)
    plain = Plain(given).run()
    answers = two.run(train, given)
    for answer in answers:
        assert answer["losses"] == near(plain.losses)
        assert answer["norms"] == near(plain.norms)
        assert answer["sharded"] == [True, False, False, True, False, False]
    assert answers[0]["weights"] == near(plain.weights())


def clip_values(given: Case) -> dict[str, Any]:
    training = Training(given)
    training.backward(next(iter(batches(given))))
    training.clip()
    return training.gradients()


def test_values_are_clipped_in_both_kinds_of_parameters(two: Group) -> None:
    given = case(ignored_modules="head").but(clip_value=0.01)
    for gradients in two.run(clip_values, given):
        assert gradients == near(clipped_plain(given)["gradients"])


WHOLE = (Compile(TorchDynamoPlugin(backend="eager")),)


@pytest.mark.parametrize("given", [case(), Case(FSDP1, Plugin(1)), Case(DDP)], ids=["fsdp2", "fsdp1", "ddp"])
def test_no_sync_of_a_model_that_is_compiled_as_a_whole_reduces_nothing(two: Group, given: Case) -> None:
    for answer in two.run(count_collectives, given.but(transforms=WHOLE)):
        assert (answer["held"][1], answer["nested"][1]) == (0, 0)
        assert answer["sync"][1] == answer["again"][1] > 0


def train_in_two_dtypes(given: Case, dtype: torch.dtype) -> dict[str, Any]:
    PartialState(cpu=True)
    model = make_model()
    model.body.to(dtype)
    if given.manifest is FSDP2:  # the first version joins what trains and what is frozen, of one dtype
        model.body[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    training = Training(given, model)
    dtypes = {parameter.dtype for parameter in training.model.parameters() if parameter.requires_grad}
    losses, _ = training.train()
    states = {value.dtype for state in training.optimizer.state.values() for value in state.values()}
    return {"dtypes": dtypes, "states": states, "losses": losses}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("given", [case(), case(cpu_ram_efficient_loading=True), Case(FSDP1, Plugin(1))])
def test_weights_of_several_dtypes_train_in_fp32_under_mixed_precision(two: Group, given: Case, precision: str) -> None:
    for answer in two.run(train_in_two_dtypes, given.but(precision=precision), torch.bfloat16):
        assert answer["dtypes"] == answer["states"] == {torch.float32}
        assert answer["losses"][-1] < answer["losses"][0]


def test_weights_keep_their_dtype_without_mixed_precision(two: Group) -> None:
    given = case()
    for answer in two.run(keep_dtype, given):
        assert answer == {torch.bfloat16}


def keep_dtype(given: Case) -> set[torch.dtype]:
    PartialState(cpu=True)
    return {parameter.dtype for parameter in Training(given, make_model().bfloat16()).model.parameters()}


class Tied(Small):
    """Has a weight under two names and a buffer that no state dict holds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.again = nn.Linear(10, 10, bias=False)
        self.again.weight = self.body[2].weight  # type: ignore[assignment]
        self.register_buffer("fleeting", torch.full((2,), 3.0), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.again(self.body(inputs)) * self.fleeting[0])
        return logits


def load_from_first(given: Case) -> dict[str, Any]:
    PartialState(cpu=True)
    first = current.process().rank == 0
    with torch.device("cpu" if first else "meta"):
        model = Tied(seed=7) if first else Tied.__new__(Tied)
        if not first:
            nn.Module.__init__(model)
            _on_meta(model)
    training = Training(given, model)
    weights = training.weights()
    with torch.no_grad():
        output = training.model(torch.ones(2, 6))
    tied = training.user_model.again.weight is training.user_model.body[2].weight  # type: ignore[union-attr, index]
    return {"weights": weights, "output": output.tolist(), "tied": tied}


def _on_meta(model: Any) -> None:
    model.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10, bias=False), nn.Tanh())
    model.head = nn.Linear(10, 3)
    model.register_buffer("factor", torch.empty(()))
    model.stretch = nn.Parameter(torch.empty(1))
    model.again = nn.Linear(10, 10, bias=False)
    model.again.weight = model.body[2].weight
    model.register_buffer("fleeting", torch.empty(2), persistent=False)


def test_only_the_first_process_has_to_load_weights(two: Group) -> None:
    expected = Tied(seed=7)
    answers = two.run(load_from_first, case(cpu_ram_efficient_loading=True))
    with torch.no_grad():
        output = expected(torch.ones(2, 6)).tolist()

    assert answers[0]["weights"] == {name: value.tolist() for name, value in expected.state_dict().items()}
    for answer in answers:
        assert answer["output"] == near(output)
        assert answer["tied"]


def refusal(given: Case, what: str) -> str:
    model: nn.Module = make_model()
    if what == "meta":
        model = model.to("meta")
    try:
        training = Training(given, model)
        if what == "stepped":
            optimizer = torch.optim.Adam(model.parameters())
            nn.functional.mse_loss(make_model()(torch.ones(1, 6)), torch.ones(1, 3)).backward()
            optimizer.state[next(iter(model.parameters()))]["step"] = 1
            training.strategy.check(Bundle.of([model, optimizer]))
        if what == "stranger":
            training.strategy.check(Bundle.of([make_model(), torch.optim.SGD(make_model().parameters(), lr=0.1)]))
    except AccelError as error:
        return type(error).__name__ if error.obstacle and error.remedy else f"{error} lacks a part"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("options", "what", "error"),
    [
        ({"fsdp_version": 1}, "", "Conflict"),
        ({}, "meta", "Conflict"),
        ({}, "stepped", "Conflict"),
        ({}, "stranger", "Conflict"),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "", "SettingError"),
        (
            {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["X"]},
            "",
            "SettingError",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(two: Group, options: dict[str, Any], what: str, error: str) -> None:
    given = Case(FSDP2, Plugin(**{"fsdp_version": 2, **options}))

    assert set(two.run(refusal, given, what)) == {error}


def test_a_process_that_runs_alone_has_nobody_to_share_with() -> None:
    PartialState(cpu=True)
    process = current.process()
    strategy = build(FSDP2, Plugin(2), Context(process, GradientState(), choose("no", process.family)))

    with pytest.raises(Conflict, match="one process"):
        strategy.check(Bundle())


# ------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("full", [True, False])
def test_names_are_those_of_the_original_library(two: Group, tmp_path: Path, full: bool) -> None:
    two.run(first_half, case(state_dict_type="FULL_STATE_DICT" if full else "SHARDED_STATE_DICT"), str(tmp_path))
    names = {entry.name for entry in tmp_path.iterdir()} - {"random_states_0.pkl", "random_states_1.pkl"}

    if full:
        assert names == {"pytorch_model_fsdp.bin", "optimizer.bin"}
        assert set(torch.load(tmp_path / "optimizer.bin", weights_only=True)) == {"state", "param_groups"}
    else:
        assert names == {"pytorch_model_fsdp_0", "optimizer_0"}
        assert {entry.name for entry in (tmp_path / "pytorch_model_fsdp_0").iterdir()} >= {".metadata", "__0_0.distcp"}


@pytest.mark.parametrize(("saved_full", "adam"), [(True, True), (False, True), (False, False)])
def test_what_two_processes_saved_four_and_one_load(
    one: Group, two: Group, four: Group, tmp_path: Path, saved_full: bool, adam: bool
) -> None:
    state_type = "FULL_STATE_DICT" if saved_full else "SHARDED_STATE_DICT"
    given = case(state_dict_type=state_type).but(adam=adam)
    saved = two.run(first_half, given, str(tmp_path))
    # A path of Python 3.13 cannot be unpickled by an older one.
    assert not any(b"pathlib" in path.read_bytes() for path in tmp_path.rglob(".metadata"))
    for others in (one, four):
        for answer in others.run(second_half, given, str(tmp_path)):
            assert answer["losses"] == near(saved[0]["losses"])
            assert answer["weights"] in ({}, saved[0]["weights"])


class Evil:
    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path(self.trace), "executed"))


@pytest.mark.parametrize("harm", ["evil", "empty", "truncated", "missing", "no folder"])
def test_metadata_that_is_damaged_or_runs_code_is_refused(two: Group, tmp_path: Path, harm: str) -> None:
    two.run(first_half, case(), str(tmp_path))
    metadata, trace = tmp_path / "pytorch_model_fsdp_0" / ".metadata", tmp_path / "trace"
    if harm == "evil":
        metadata.write_bytes(pickle.dumps(Evil(str(trace))))
    elif harm == "missing":
        metadata.unlink()
    elif harm == "no folder":
        metadata.parent.rename(tmp_path / "elsewhere")
    else:
        metadata.write_bytes(metadata.read_bytes()[: 0 if harm == "empty" else 100])

    for answer in two.run(second_half, case(), str(tmp_path)):
        assert (".bin" if harm == "no folder" else ".metadata") in answer["error"]
    assert not trace.exists()


# --------------------------------------------------------------------------- settings


def chosen() -> tuple[str, str]:
    PartialState(cpu=True)
    manifest = choose_backend()
    return manifest.name, "" if manifest.label is None else str(manifest.label.value)


def test_a_launcher_asks_for_it_by_its_variable(two: Group) -> None:
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert two.run(chosen, environment=asked) == [("fsdp2", "FSDP")] * 2
    assert two.run(chosen, environment={"ACCELERATE_USE_FSDP": "false"}) == [("ddp", "")] * 2


def version(given: Case) -> int:
    return int(Training(given).strategy.config.fsdp_version)


def test_the_backend_named_is_what_its_settings_are_for(two: Group) -> None:
    assert two.run(version, Case(FSDP2)) == [2, 2]
