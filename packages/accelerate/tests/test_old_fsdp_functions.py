"""The functions of `accelerate.utils.fsdp_utils` and the scalers of `accelerate.utils.modeling`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_state.errors import CheckpointError, SettingError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes


def sharded(kind: str, seed: int) -> tuple[Any, Any, Any]:
    """An Accelerator, and a model and an optimizer that it has prepared and that made a step."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2, state_dict_type=kind))
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model, optimizer = accelerator.prepare(plain, torch.optim.Adam(plain.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.full((2, 4), accelerator.process_index + 1.0)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def whole(model: Any) -> dict[str, Any]:
    return {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}


def save_and_load(kind: str, folder: str, use_dcp: bool) -> dict[str, Any]:
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    accelerator, model, optimizer = sharded(kind, 1)
    plugin = accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, accelerator, model, folder, 1, use_dcp=use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, 1, use_dcp=use_dcp)
    accelerator.wait_for_everyone()
    saved = whole(model)
    step(accelerator, model, optimizer)
    expected = whole(model)

    other, other_optimizer = (sharded(kind, 2))[1:]
    inside = Path(folder, "pytorch_model_fsdp_1")
    load_fsdp_model(plugin, accelerator, other, inside if inside.is_dir() else folder, 1, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, accelerator, other_optimizer, other, folder, 1, use_dcp=use_dcp)
    loaded = whole(other)
    step(accelerator, other, other_optimizer)
    return {"saved": saved, "loaded": loaded, "expected": expected, "resumed": whole(other)}


@pytest.mark.parametrize(
    ("kind", "use_dcp", "names"),
    [
        ("SHARDED_STATE_DICT", True, {"pytorch_model_fsdp_1", "optimizer_1"}),
        ("FULL_STATE_DICT", True, {"pytorch_model_fsdp_1.bin", "optimizer_1.bin"}),
        ("FULL_STATE_DICT", False, {"pytorch_model_fsdp_1.bin", "optimizer_1.bin"}),
        (
            "SHARDED_STATE_DICT",
            False,
            {f"{stem}_1_rank{rank}.bin" for stem in ("pytorch_model_fsdp", "optimizer") for rank in (0, 1)},
        ),
    ],
)
def test_sharded_models_and_optimizers_come_back(
    two: Processes, tmp_path: Path, kind: str, use_dcp: bool, names: set[str]
) -> None:
    for told in two.run(save_and_load, kind, str(tmp_path / "new"), use_dcp):
        assert told["loaded"] == told["saved"]
        assert told["resumed"] == told["expected"]
        assert told["expected"] != told["saved"]
    assert {path.name for path in (tmp_path / "new").iterdir()} == names


def load_alone(folder: str) -> str:
    from accelerate.utils import load_fsdp_model

    accelerator, model, _ = sharded("SHARDED_STATE_DICT", 2)
    with pytest.raises(CheckpointError) as refused:
        load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder, 1, use_dcp=False)
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [("fewer", "1 processes wrote it, and this run has 2"), ("none", "does not exist"), ("harm", "damaged")],
)
def test_files_of_each_process_are_for_as_many_processes(
    two: Processes, tmp_path: Path, change: str, said: str
) -> None:
    two.run(save_and_load, "SHARDED_STATE_DICT", str(tmp_path), False)
    first, second = (tmp_path / f"pytorch_model_fsdp_1_rank{rank}.bin" for rank in (0, 1))
    if change == "harm":
        for path in (first, second):
            path.write_bytes(path.read_bytes()[:100])
    else:
        second.unlink()
        if change == "none":
            first.unlink()
    for told in two.run(load_alone, str(tmp_path)):
        assert said in told


def other_settings(folder: str) -> str:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model

    accelerator, model, _ = sharded("SHARDED_STATE_DICT", 1)
    full = FullyShardedDataParallelPlugin(2, state_dict_type="FULL_STATE_DICT")
    with pytest.raises(SettingError) as differing:
        save_fsdp_model(full, accelerator, model, folder)
    return str(differing.value)


def test_settings_that_are_not_those_of_the_run_are_refused(two: Processes, tmp_path: Path) -> None:
    assert all("those of the run do not" in told for told in two.run(other_settings, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- adapters

PEFT = """
import torch

class PeftModel(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.base, self.lora_A = inner, torch.nn.ModuleDict({"own": torch.nn.Linear(4, 2, bias=False)})
        self.active_adapter = "own"
        self.base.requires_grad_(False)

    def forward(self, inputs):
        return self.base(inputs) + self.lora_A["own"](inputs)

def get_peft_model_state_dict(model, state_dict=None, adapter_name="default"):
    state = model.state_dict() if state_dict is None else state_dict
    return {name.replace(f".{adapter_name}", ""): value for name, value in state.items() if "lora_" in name}
"""


def adapted(kind: str, folder: str, use_dcp: bool, library: str) -> dict[str, Any]:
    """A model with an adapter, saved by its adapter and loaded into another with other weights."""
    import importlib
    import sys

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import load_fsdp_model, save_fsdp_model

    sys.path.insert(0, library)
    try:
        peft = importlib.import_module("peft")
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2, state_dict_type=kind))
        plugin = accelerator.state.fsdp_plugin

        def model(seed: int) -> Any:
            torch.manual_seed(seed)
            return accelerator.prepare(peft.PeftModel(nn.Linear(4, 2)))

        first, second = model(1), model(2)
        before, wanted = whole(second), whole(first)
        options = {"adapter_only": True, "use_dcp": use_dcp}
        save_fsdp_model(plugin, accelerator, first, folder, **options)
        accelerator.wait_for_everyone()
        load_fsdp_model(plugin, accelerator, second, folder, **options)
        return {"before": before, "after": whole(second), "wanted": wanted}
    finally:
        sys.path.remove(library)
        sys.modules.pop("peft", None)


@pytest.mark.parametrize("use_dcp", [True, False])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_an_adapter_is_saved_and_loaded_alone(two: Processes, tmp_path: Path, kind: str, use_dcp: bool) -> None:
    library = tmp_path / "library"
    for path, text in {
        "peft/__init__.py": PEFT,
        "peft-0.17.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: peft\nVersion: 0.17.0\n",
    }.items():
        (library / path).parent.mkdir(parents=True)
        (library / path).write_text(text)
    for told in two.run(adapted, kind, str(tmp_path / "saved"), use_dcp, str(library)):
        adapter = "lora_A.own.weight"
        assert told["after"][adapter] == told["wanted"][adapter] != told["before"][adapter]
        assert {**told["after"], adapter: None} == {**told["before"], adapter: None}
    if kind == "FULL_STATE_DICT":
        saved = torch.load(tmp_path / "saved" / "pytorch_model_fsdp.bin", weights_only=True)
        assert list(saved) == ["lora_A.weight"]


def prepare_by_function() -> tuple[list[str], list[float], bool]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp2_apply_ac, fsdp2_load_full_state_dict, fsdp2_prepare_model
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    plugin = FullyShardedDataParallelPlugin(
        2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Linear"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    policy = fsdp2_prepare_auto_wrap_policy(plugin, plain)
    chosen = [name for name, module in plain.named_modules() if policy(module)]
    model = fsdp2_prepare_model(accelerator, fsdp2_apply_ac(accelerator, plain))
    full = {
        name: torch.full(value.shape, 0.5)
        for name, value in nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).state_dict().items()
    }
    fsdp2_load_full_state_dict(accelerator, model, full if accelerator.is_main_process else {})
    values = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]).unique().tolist()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    return chosen, values, all(parameter.grad is not None for parameter in model.parameters())


def test_models_are_sharded_and_loaded_by_function(two: Processes) -> None:
    for chosen, values, has_gradients in two.run(prepare_by_function):
        assert chosen == ["0", "2"]
        assert values == [0.5]
        assert has_gradients


def prepare_for_a_substitute() -> list[tuple[set[torch.dtype], bool]]:
    from types import SimpleNamespace

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="NO_WRAP")
    Accelerator(cpu=True)
    found = []
    for precision in ("bf16", "no"):
        accelerator: Any = SimpleNamespace(
            mixed_precision=precision,
            torch_device_mesh=None,
            state=SimpleNamespace(fsdp_plugin=plugin),
        )
        model = fsdp2_prepare_model(accelerator, nn.Sequential(nn.Linear(4, 6)).bfloat16())
        parameters = list(model.parameters())
        found.append(({one.dtype for one in parameters}, all(hasattr(one, "full_tensor") for one in parameters)))
    return found


def test_models_are_sharded_as_the_attributes_of_a_substitute_say(two: Processes) -> None:
    for mixed, plain in two.run(prepare_for_a_substitute):
        assert mixed == ({torch.float32}, True)
        assert plain == ({torch.bfloat16}, True)


def test_names_lose_what_wrappers_added() -> None:
    from accelerate.utils import fsdp2_canonicalize_names

    given = {"_orig_mod.a.weight": 1, "a._checkpoint_wrapped_module.bias": 2, "_fsdp_wrapped_module.b": 3}
    assert fsdp2_canonicalize_names(given) == {"a.weight": 1, "a.bias": 2, "b": 3}


def test_optimizers_follow_to_other_parameters_or_stay_as_they_are() -> None:
    from accelerate.utils import fsdp2_switch_optimizer_parameters

    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    mapping = {a.data_ptr(): b for a, b in zip(old.parameters(), new.parameters(), strict=True)}
    with pytest.raises(KeyError, match=r"shape \(2,\)"):
        fsdp2_switch_optimizer_parameters(optimizer, {old.weight.data_ptr(): new.weight})
    assert optimizer.param_groups[0]["params"][0] is old.weight
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in new.parameters()]


def test_parameters_of_modules_are_found_by_pattern() -> None:
    from accelerate.utils.fsdp_utils import get_parameters_from_modules

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert get_parameters_from_modules(None, model, "cpu") == set()
    assert get_parameters_from_modules("1", model, "cpu") == set(model[1].parameters())
    assert get_parameters_from_modules([model[0]], model, "cpu") == set(model[0].parameters())


def test_tied_weights_stay_tied_when_they_get_memory() -> None:
    from accelerate.utils import ensure_weights_retied

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 1))
    model[1].weight = model[0].weight

    def initialise(module: nn.Module) -> Any:
        return module.to_empty(device="cpu", recurse=False)

    retied = ensure_weights_retied(initialise, model, "cpu")
    assert retied is not initialise
    for module in model:
        assert retied(module) is module
    assert model[0].weight is model[1].weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert ensure_weights_retied(initialise, nn.Linear(1, 1), "cpu") is initialise


def test_who_reads_models_is_said_by_a_variable() -> None:
    from accelerate.utils import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading

    with fresh():
        enable_fsdp_ram_efficient_loading()
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
        disable_fsdp_ram_efficient_loading()
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"


def test_scalers_and_autocast_by_function() -> None:
    from accelerate import Accelerator
    from accelerate.utils import (
        AutocastKwargs,
        DistributedType,
        get_fsdp2_grad_scaler,
        get_grad_scaler,
        get_mixed_precision_context_manager,
    )

    with fresh():
        Accelerator(cpu=True, mixed_precision="bf16")
        for scaler in (get_grad_scaler(init_scale=8.0), get_fsdp2_grad_scaler(init_scale=8.0)):
            assert (type(scaler), scaler.get_scale()) == (torch.amp.GradScaler, 8.0)
        assert type(get_grad_scaler(DistributedType.FSDP)).__name__ == "ShardedGradScaler"
        layer, ones = nn.Linear(2, 2), torch.ones(1, 2)
        with get_mixed_precision_context_manager():
            assert layer(ones).dtype is torch.float32
        with get_mixed_precision_context_manager(native_amp=True):
            assert layer(ones).dtype is torch.bfloat16
        with get_mixed_precision_context_manager(True, AutocastKwargs(enabled=False)):
            assert layer(ones).dtype is torch.float32
