"""The Accelerator with a ParallelismConfig, on four real processes."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.mesh import PERMITTED
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_state.errors import AccelError, Conflict
from accel_testing.backends.reference_loop import near as near_to
from accel_testing.backends.sequences import PLAN, SequenceModel, sequences
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)

SAMPLES = 16
DIVIDED_COPIES = {"ACCELERATE_ALLOW_CP_STANDALONE": "true"}


@pytest.fixture(autouse=True)
def context_parallelism_alone(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_ALLOW_CP_STANDALONE", "true")


def samples() -> TensorDataset:
    return TensorDataset(*sequences(SAMPLES), torch.arange(SAMPLES))


def fsdp() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")


def train(sizes: dict[str, int] | None, how: str = "", **options: Any) -> dict[str, Any]:
    """Two epochs with batches of eight samples in all, whatever the axes."""
    given: dict[str, Any] = dict(options)
    if sizes is not None:
        given["parallelism_config"] = ParallelismConfig(
            **sizes, **({"sp_backend": "torch"} if "sp_size" in sizes else {})
        )
    if "sharded" in how:
        given["fsdp_plugin"] = fsdp()
    if "planned" in how:
        given["torch_tp_plugin"] = TorchTensorParallelPlugin(parallelize_plan=PLAN)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True), **given)
    model = SequenceModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    prepared = accelerator.prepare(model, optimizer, schedule, DataLoader(samples(), batch_size=8))
    prepared_model, prepared_optimizer, prepared_schedule, loader = prepared
    losses, seen = [], []
    for _ in range(2):
        for inputs, targets, indices in loader:
            with accelerator.maybe_context_parallel([inputs, targets], [1, 1], [inputs, targets]):
                loss = nn.functional.mse_loss(prepared_model(inputs), targets)
                accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared_model.parameters(), 0.5)
            prepared_optimizer.step()
            prepared_schedule.step()
            prepared_optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            seen += accelerator.gather_for_metrics(indices).tolist()
    return {
        "losses": losses,
        "seen": seen,
        "weights": {name: value.tolist() for name, value in accelerator.get_state_dict(prepared_model).items()},
        "type": accelerator.distributed_type.value,
        "sharded": sum(isinstance(parameter, DTensor) for parameter in prepared_model.parameters()),
        "same": accelerator.unwrap_model(prepared_model, keep_torch_compile=False) is model,
    }


near = partial(near_to, rel=2e-4, abs=2e-5)


ARRANGEMENTS: list[tuple[dict[str, int] | None, str, str]] = [
    (None, "", "MULTI_CPU"),
    ({"dp_replicate_size": 2, "cp_size": 2}, "", "MULTI_CPU"),
    ({"dp_replicate_size": 2, "sp_size": 2}, "", "MULTI_CPU"),
    ({"cp_size": 4}, "", "MULTI_CPU"),
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, "sharded", "FSDP"),
    ({"dp_shard_size": 2, "tp_size": 2}, "sharded planned", "FSDP"),
    ({"dp_shard_size": 2, "tp_size": 2}, "planned", "FSDP"),
    ({"tp_size": 4}, "planned", "FSDP"),
    ({"dp_shard_size": 2, "cp_size": 2}, "sharded", "FSDP"),
    ({"dp_shard_size": 2, "sp_size": 2}, "", "FSDP"),
]


@pytest.mark.parametrize(("sizes", "how", "label"), ARRANGEMENTS)
def test_every_arrangement_trains_like_one_process(
    four: Processes, sizes: dict[str, int] | None, how: str, label: str
) -> None:
    expected = train(None)
    with fresh():
        answers = four.run(train, sizes, how, environment=DIVIDED_COPIES)
    for answer in answers:
        assert answer["losses"] == near(expected["losses"])
        assert answer["seen"] == expected["seen"]
        assert answer["type"] == label
        assert bool(answer["sharded"]) == (label == "FSDP")
        assert answer["same"]
    assert answers[0]["weights"] == near(expected["weights"])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_and_recomputed_models_train_the_same(four: Processes, regional: bool) -> None:
    expected = train(None)
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    options = {"dynamo_plugin": plugin, "transforms": [ActivationCheckpoint()]}
    with fresh():
        answers = four.run(_compiled, {"dp_replicate_size": 2, "dp_shard_size": 2}, options, timeout=250)
    assert answers[0]["losses"] == near(expected["losses"])
    assert answers[0]["same"]


def _compiled(sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        return train(sizes, "sharded", **options)


def places(sizes: dict[str, int]) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    again = Accelerator()
    assert again.parallelism_config is accelerator.parallelism_config
    mesh = accelerator.torch_device_mesh
    return {
        "tp": accelerator.tensor_parallel_rank,
        "dp": accelerator.data_parallel_rank,
        "shard": accelerator.data_parallel_shard_rank,
        "cp": accelerator.context_parallel_rank,
        "sp": accelerator.sequence_parallel_rank,
        "axes": None if mesh is None else mesh.mesh_dim_names,
        "fsdp2": accelerator.is_fsdp2,
        "plugin": type(accelerator.state.fsdp_plugin).__name__,
    }


def test_each_process_knows_its_place_on_every_axis(four: Processes) -> None:
    answers = four.run(places, {"dp_shard_size": 2, "tp_size": 2})
    assert [(answer["shard"], answer["tp"], answer["dp"], answer["cp"]) for answer in answers] == [
        (0, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 0, 0, 0),
        (1, 1, 0, 0),
    ]
    assert answers[0]["axes"] == ("dp_shard", "tp")
    assert answers[0]["fsdp2"]
    assert answers[0]["plugin"] == "FullyShardedDataParallelPlugin"


def refusal(what: str) -> str:
    model: nn.Module = SequenceModel()
    options: dict[str, Any] = {
        "too few": {"parallelism_config": ParallelismConfig(tp_size=2)},
        "backend": {"parallelism_config": ParallelismConfig(dp_shard_size=4), "backend": "ddp"},
        "sizes": {
            "parallelism_config": ParallelismConfig(tp_size=4),
            "torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2),
        },
        "engine": {"parallelism_config": ParallelismConfig(sp_size=4)},
        "no plan": {"parallelism_config": ParallelismConfig(tp_size=4)},
        "plan": {"torch_tp_plugin": TorchTensorParallelPlugin(4, parallelize_plan={"blocks.*.query": "colwise"})},
        "style": {"torch_tp_plugin": TorchTensorParallelPlugin(4, parallelize_plan={"head": "col"})},
        "blocks": {"transforms": [ActivationCheckpoint()]},
        "transform": {"transforms": [3]},
        "compile": {"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin(backend="eager")},
        "rank": {},
    }[what]
    try:
        accelerator = Accelerator(cpu=True, **options)
        if what == "rank":
            return str(accelerator.tensor_parallel_rank)
        accelerator.prepare(nn.Linear(2, 2) if what == "blocks" else model)
    except AccelError as error:
        return f"{type(error).__name__}: {error}" if error.obstacle and error.remedy else "a part is missing"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("what", "error", "named"),
    [
        ("too few", "Conflict", "The world size is 4"),
        ("backend", "Conflict", "not dp_shard"),
        ("sizes", "Conflict", "Both set the size"),
        ("engine", "Conflict", "sp_backend='torch'"),
        ("no plan", "SettingError", "The model has no tensor-parallel plan"),
        ("plan", "SettingError", "no module of that name"),
        ("style", "SettingError", "'colwise'"),
        ("blocks", "SettingError", "no list of blocks"),
        ("transform", "UnknownKind", "not a Transform"),
        ("compile", "Conflict", "Both set the same option"),
        ("rank", "NoState", "ParallelismConfig"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(four: Processes, what: str, error: str, named: str) -> None:
    for answer in four.run(refusal, what):
        assert answer.startswith(error)
        assert named in answer


AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
OUTSIDE = [
    pair
    for pair in combinations(AXES, 2)
    if set(pair) not in [{axis.value for axis in combination.axes} for combination in PERMITTED]
]


def refused(pairs: list[tuple[str, str]]) -> list[str]:
    told = []
    for pair in pairs:
        sizes: dict[str, Any] = {f"{axis}_size": 2 for axis in pair}
        if "sp" in pair:
            sizes["sp_backend"] = "torch"
        try:
            Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
        except Conflict as error:
            told.append(str(error))
    return told


def test_combinations_outside_of_the_table_are_refused_at_construction(four: Processes) -> None:
    assert len(OUTSIDE) == 4
    for told in four.run(refused, OUTSIDE, environment=DIVIDED_COPIES):
        assert len(told) == len(OUTSIDE)
        for pair, message in zip(OUTSIDE, told, strict=True):
            assert all(axis in message for axis in pair)


def test_pipelines_are_not_offered() -> None:
    with pytest.raises(NotImplementedError, match="prepare_pippy"):
        _ = Accelerator(cpu=True).pipeline_parallel_rank


def evaluation(sizes: dict[str, int] | None) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=None if sizes is None else ParallelismConfig(**sizes),
        torch_tp_plugin=TorchTensorParallelPlugin(parallelize_plan=PLAN),
        mixed_precision="bf16",
    )
    teacher, student = SequenceModel(), SequenceModel()
    frozen = accelerator.prepare_model(teacher, evaluation_mode=True)
    trained, _ = accelerator.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1))
    with torch.no_grad():
        outputs = frozen(samples().tensors[0][:2])
    return {
        "same": frozen is teacher,
        "dtype": str(outputs.dtype),
        "wrapped": type(trained) is not SequenceModel,
        "registered": len(accelerator._models),
        "outputs": outputs.tolist(),
    }


@pytest.mark.parametrize("sizes", [None, {"dp_shard_size": 2, "tp_size": 2}])
def test_a_model_for_evaluation_is_changed_but_not_wrapped(four: Processes, sizes: dict[str, int] | None) -> None:
    with torch.no_grad():
        expected = SequenceModel()(samples().tensors[0][:2]).tolist()
    for answer in four.run(evaluation, sizes):
        assert (answer["same"], answer["wrapped"], answer["registered"]) == (True, True, 1)
        assert answer["dtype"] == "torch.float32"
        assert torch.allclose(torch.tensor(answer["outputs"]), torch.tensor(expected), atol=0.05)
