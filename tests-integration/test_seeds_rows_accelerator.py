"""Rows 1 to 34 of reference/seeds_vs_peer.md: the Accelerator, where what is promised differs from the original."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_torch
import accelerate
from accel_state.errors import Conflict, NotOffered, NotReady
from accel_testing.processes import Processes
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, LoggerType
from accelerate.utils.dataclasses import FP8BackendType

pytestmark = pytest.mark.usefixtures("fresh_state")


def parameters(function: Any) -> dict[str, Any]:
    return {name: one.default for name, one in inspect.signature(function).parameters.items() if name != "self"}


def loader(samples: int = 8) -> Any:
    return DataLoader(TensorDataset(torch.arange(float(samples)).reshape(-1, 1)), batch_size=2)


# ---------------------------------------------------------------- constructor
def test_row_1_split_batches_warns_and_counts() -> None:
    with pytest.warns(FutureWarning, match="DataLoaderConfiguration"):
        accelerator = Accelerator(cpu=True, split_batches=True)
    assert accelerator.split_batches
    assert accelerator.dataloader_config.split_batches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Accelerator(cpu=True).split_batches


@pytest.mark.parametrize("name", ["dispatch_batches", "even_batches", "use_seedable_sampler"])
def test_row_2_keywords_that_moved_warn_and_count(name: str) -> None:
    value = not getattr(DataLoaderConfiguration(), name)
    with pytest.warns(FutureWarning, match=name):
        accelerator = Accelerator(cpu=True, **{name: value})
    assert getattr(accelerator, name) == value
    contrary = DataLoaderConfiguration(**{name: value})
    with pytest.warns(FutureWarning, match=name), pytest.raises(Conflict):
        Accelerator(cpu=True, dataloader_config=contrary, **{name: not value})


def test_rows_3_and_4_the_order_of_the_arguments() -> None:
    by_position = [
        name
        for name, one in inspect.signature(Accelerator).parameters.items()
        if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert by_position == [
        "device_placement",
        "split_batches",
        "mixed_precision",
        "gradient_accumulation_steps",
        "cpu",
        "dataloader_config",
        "deepspeed_plugin",
        "fsdp_plugin",
        "megatron_lm_plugin",
        "rng_types",
        "log_with",
        "project_dir",
        "project_config",
        "gradient_accumulation_plugin",
        "dispatch_batches",
        "even_batches",
        "use_seedable_sampler",
        "step_scheduler_with_optimizer",
        "kwargs_handlers",
        "dynamo_backend",
    ]
    by_keyword = set(parameters(Accelerator)) - set(by_position)
    assert {"torch_tp_plugin", "dynamo_plugin", "deepspeed_plugins", "parallelism_config"} <= by_keyword


def test_row_5_and_6_older_spellings_and_several_configurations() -> None:
    assert parameters(Accelerator)["deepspeed_plugins"] is None
    assert parameters(Accelerator)["torch_tp_plugin"] is None
    with pytest.raises(Conflict, match="two names of one argument"):
        Accelerator(cpu=True, deepspeed_plugin={"a": 1}, deepspeed_plugins={"b": 2})


def test_row_7_no_compiling_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(Accelerator)["dynamo_backend"] is None
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    assert accelerator.prepare(model) is model
    assert accelerator.state.dynamo_plugin is None or accelerator.state.dynamo_plugin.backend is DynamoBackend.NO


def test_row_8_precision_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"


def test_row_9_names_of_trackers() -> None:
    names = ["tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"]
    assert set(names) <= {str(kind.value) for kind in LoggerType}


# ---------------------------------------------------------------- methods
def test_rows_10_and_13_to_22_signatures() -> None:
    assert parameters(Accelerator.reduce) == {
        "tensor": inspect.Parameter.empty,
        "reduction": "sum",
        "scale": 1.0,
    }
    assert list(parameters(Accelerator.gather_for_metrics).items())[1] == ("use_gather_object", False)
    assert parameters(Accelerator.pad_across_processes)["pad_first"] is False
    assert parameters(Accelerator.prepare)["device_placement"] is None
    assert list(parameters(Accelerator.prepare_model)) == ["model", "device_placement", "evaluation_mode"]
    assert list(parameters(Accelerator.prepare_data_loader))[2] == "slice_fn_for_dispatch"
    assert list(parameters(Accelerator.prepare_optimizer)) == ["optimizer", "device_placement"]
    assert parameters(Accelerator.unwrap_model)["keep_torch_compile"] is True
    assert parameters(Accelerator.clip_grad_norm_)["norm_type"] == 2
    assert parameters(Accelerator.skip_first_batches)["num_batches"] == 0


def exchanged() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    own = torch.tensor([1.0 + rank])
    if rank == 1:
        accelerator.set_trigger()
    return {
        "reduced": [accelerator.reduce(own, *how).item() for how in ((), ("mean",), ("none",), ("sum", 0.5))],
        "gathered": accelerator.gather(own).tolist(),
        "metrics": accelerator.gather_for_metrics(own).tolist(),
        "padded": accelerator.pad_across_processes(torch.ones(1 + rank), pad_first=True).tolist(),
        "flag": [accelerator.check_breakpoint(), accelerator.check_trigger()],
    }


def test_rows_10_to_13_and_25_and_26_between_two_processes(two: Processes) -> None:
    first, second = two.run(exchanged)
    assert first["reduced"] == [3.0, 1.5, 1.0, 1.5]
    assert second["reduced"] == [3.0, 1.5, 2.0, 1.5]
    # Row 11: the result is on every process, the main one included.
    assert first["gathered"] == second["gathered"] == [1.0, 2.0]
    assert first["metrics"] == [1.0, 2.0]
    assert (first["padded"], second["padded"]) == ([0.0, 1.0], [1.0, 1.0])
    assert first["flag"] == second["flag"] == [True, False]


def own_gradients(models: int, given: str) -> list[float]:
    accelerator = Accelerator(cpu=True)
    made: list[Any] = [accelerator.prepare(nn.Linear(1, 1, bias=False)) for _ in range(models)]
    chosen = {"none": ((), {}), "all": (tuple(made), {}), "keyword": ((), {"model": made[0]})}[given]
    with accelerator.no_sync(*chosen[0], **chosen[1]):
        for model in made:
            accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
    return [accelerator.unwrap_model(model).weight.grad.item() for model in made]


@pytest.mark.parametrize("given", ["none", "all"])
def test_row_14_no_sync_of_several_models_and_of_all(two: Processes, given: str) -> None:
    assert two.run(own_gradients, 2, given) == [[1.0, 1.0], [2.0, 2.0]]


def test_row_14_no_sync_by_keyword(two: Processes) -> None:
    assert two.run(own_gradients, 2, "keyword") == [[1.0, 1.5], [2.0, 1.5]]


def test_row_15_autocast_takes_a_bool() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    inputs = torch.ones(2, 2)
    for block in (accelerator.autocast(), accelerator.autocast(False), accelerator.autocast(cache_enabled=False)):
        with block:
            assert (inputs @ inputs).dtype == torch.bfloat16
    with accelerator.autocast(cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
    with accelerator.autocast(True):
        assert torch.is_autocast_cache_enabled()
    with accelerator.autocast(accelerate.AutocastKwargs(enabled=False)):
        assert (inputs @ inputs).dtype == torch.float32


def test_row_17_a_model_that_is_only_evaluated() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def test_row_22_skipping_batches() -> None:
    accelerator = Accelerator(cpu=True)
    assert len(list(accelerator.skip_first_batches(loader(), 3))) == 1
    assert len(list(accelerator.skip_first_batches(loader()))) == 4


def test_rows_23_and_24_memory_is_given_back_and_the_state_stays() -> None:
    accelerator = Accelerator(cpu=True)
    model, batches = accelerator.prepare(nn.Linear(1, 1), loader())
    model, batches = accelerator.free_memory(model, batches)
    assert (model, batches) == (None, None)
    assert accelerator._models == []
    assert accelerator.clear() == []
    assert accelerator.step == 0
    assert PartialState().initialized


def test_row_27_how_a_checkpoint_is_loaded(tmp_path: Any) -> None:
    names = list(parameters(Accelerator.load_state))
    assert names[:2] == ["input_dir", "load_kwargs"]
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(str(tmp_path / "saved"))
    accelerator.load_state(str(tmp_path / "saved"), map_location="cpu")
    accelerator.load_state(str(tmp_path / "saved"), {"strict": True})


@pytest.mark.parametrize(
    "name",
    [
        "verify_device_map",
        "lomo_backward",
        "split_between_processes",
        "trigger_sync_in_backward",
        "register_for_checkpointing",
        "register_save_state_pre_hook",
        "register_load_state_pre_hook",
        "save",
        "save_model",
        "save_state",
        "on_process",
        "on_main_process",
        "on_local_main_process",
        "on_local_process",
        "on_last_process",
        "join_uneven_inputs",
        "unscale_gradients",
        "get_tracker",
        "get_state_dict",
        "log",
        "init_trackers",
        "end_training",
        "profile",
        "maybe_context_parallel",
    ],
)
def test_rows_28_and_29_methods_are_there(name: str) -> None:
    assert callable(getattr(Accelerator, name))
    assert getattr(Accelerator, name).__doc__


# ---------------------------------------------------------------- properties and names
def test_row_30_the_state_answers_for_both() -> None:
    state = Accelerator(cpu=True).state
    assert isinstance(state, AcceleratorState)
    assert isinstance(state, PartialState)
    assert state.num_processes == 1
    assert state.mixed_precision == "no"


def test_row_31_the_library_of_8_bits_is_an_enum_and_a_text() -> None:
    backend = Accelerator(cpu=True).fp8_backend
    assert backend is FP8BackendType.NO
    assert isinstance(backend, str)


@pytest.mark.parametrize("name", ["tensor_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank"])
def test_row_32_ranks_need_axes(name: str) -> None:
    with pytest.raises(NotReady):
        getattr(Accelerator(cpu=True), name)


def on_axes() -> list[int]:
    config = accel_torch.ParallelismConfig(dp_shard_size=2)
    plugin = accel_torch.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
    shard = accelerator.data_parallel_shard_rank
    return [accelerator.tensor_parallel_rank, accelerator.data_parallel_rank, shard, accelerator.context_parallel_rank]


def test_rows_32_and_33_ranks_on_axes(two: Processes) -> None:
    assert two.run(on_axes) == [[0, 0, 0, 0], [0, 0, 1, 0]]


def test_row_33_no_rank_in_a_pipeline() -> None:
    with pytest.raises(NotOffered):
        Accelerator(cpu=True).pipeline_parallel_rank  # noqa: B018


@pytest.mark.parametrize(
    "name",
    ["ProjectConfiguration", "GradientAccumulationPlugin", "BnbQuantizationConfig", "FP8RecipeKwargs",
     "TorchDynamoPlugin", "TorchTensorParallelPlugin"],
)  # fmt: skip
def test_row_34_settings_at_the_top(name: str) -> None:
    assert getattr(accelerate, name) is getattr(accel_torch, name) is getattr(accelerate.utils, name)
