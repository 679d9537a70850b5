"""Moving across devices, on devices made of CPU memory that refuse to mix their tensors with others."""

from __future__ import annotations

import ast
import copy
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    OffloadedWeightsLoader,
    align_module_device,
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    get_max_memory,
    get_state_dict_offloaded_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_weights_file,
    loading,
    prefetch,
    remove_hook_from_submodules,
    save_weights,
    set_module_tensor_to_device,
)
from accel_bigmodel.device_map import resolve_device
from accel_bigmodel.dispatch import attach_align_device_hook
from accel_bigmodel.prefetch import BlockReader
from accel_state.errors import SettingError
from accel_testing.simulated_device import NAME, POSSIBLE, simulated_device

if not POSSIBLE:
    pytest.skip("this torch cannot have a device written in Python", allow_module_level=True)

FIRST, SECOND = torch.device(NAME, 0), torch.device(NAME, 1)
MEMORY = 400_000
BLOCK = 4 * (64 * 64 + 64 + 4 * 64) + 8


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.BatchNorm1d(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Net(nn.Module):
    def __init__(self, blocks: int = 6, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.scale = nn.Parameter(torch.full((64,), 0.5))
        self.head = nn.Linear(64, 32, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, kept: torch.Tensor | None = None, fail: bool = False) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if fail:
            raise ValueError("inside")
        logits = self.head(x * self.scale)
        return logits if kept is None else (logits, kept)


IDS = torch.arange(8)


@pytest.fixture(autouse=True)
def two_devices() -> Iterator[None]:
    with simulated_device(devices=2, memory=MEMORY), torch.no_grad():
        yield
        # A thread that still reads ahead would do so on the devices of the next test.
        prefetch.end_threads()


def made(**options: Any) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    model = Net(**options).eval()
    return model, model(IDS)


def device_of(model: nn.Module, name: str) -> torch.device:
    return dict([*model.named_parameters(), *model.named_buffers()])[name].device


def peak(device: torch.device) -> int:
    return int(torch.get_device_module(NAME).max_memory_allocated(device))


def used(device: torch.device) -> int:
    return int(torch.get_device_module(NAME).memory_allocated(device))


SPREAD = {"embed": 0, "blocks.0": 0, "blocks.1": 1, "scale": 0, "blocks": "cpu", "blocks.5": "disk", "head": 0}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("whole", [None, ["Block"]])
def test_a_model_over_two_devices_memory_and_disk(tmp_path: Path, tie: bool, offload_buffers: bool, whole: Any) -> None:
    model, expected = made(tie=tie)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dispatch_model(model, SPREAD, offload_dir=tmp_path, offload_buffers=offload_buffers, preload_module_classes=whole)
    assert device_of(model, "embed.weight") == FIRST
    assert device_of(model, "blocks.1.0.weight") == SECOND
    assert device_of(model, "blocks.3.0.weight").type == device_of(model, "blocks.5.0.weight").type == "meta"
    assert device_of(model, "blocks.3.1.running_mean").type == ("meta" if offload_buffers else NAME)
    for _ in range(3):
        found = model(IDS)
        assert found.device == torch.device("cpu")
        assert torch.allclose(found, expected, atol=1e-6)
    assert model(IDS.to(SECOND)).device == SECOND
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name].cpu(), plain[name]) for name in plain)
    assert not tie or model.head.weight is model.embed.weight


def test_what_is_on_one_device_computes_there() -> None:
    model, expected = made(blocks=2)
    dispatch_model(model, {"": 1})
    assert {parameter.device for parameter in model.parameters()} == {SECOND}
    assert torch.allclose(model(IDS.to(SECOND)).cpu(), expected, atol=1e-6)
    with pytest.raises(RuntimeError, match="same device"):
        model(IDS)


def test_a_budget_is_the_free_memory_of_each_device() -> None:
    assert {0: MEMORY, 1: MEMORY}.items() <= get_max_memory().items()
    kept = torch.empty(25_000, device=FIRST)
    assert get_max_memory()[0] == MEMORY - kept.nbytes
    report = infer_auto_device_map(Net(blocks=40))
    assert {0, 1, "cpu"} <= set(report.values())
    assert resolve_device(1) == SECOND
    with pytest.raises(SettingError, match="Cannot use the device 2"):
        resolve_device(2)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
@pytest.mark.parametrize("ahead", [None, 2 * BLOCK])
@pytest.mark.filterwarnings("ignore:Offloaded layers have")
def test_a_checkpoint_larger_than_the_devices_is_loaded_and_runs(
    tmp_path: Path, device_map: str, ahead: int | None
) -> None:
    model, expected = made(blocks=60)
    save_weights(model.state_dict(), tmp_path, "100KB")
    with init_empty_weights():
        empty = Net(blocks=60).eval()
    # Room for activations is the caller's to leave; by default reading ahead takes up to half of it.
    room = MEMORY - (60_000 if ahead is None else 20_000 + ahead)
    budget = {0: room, 1: room, "cpu": "1GB"}
    loaded: Any = load_checkpoint_and_dispatch(empty, tmp_path, device_map, budget, ["Block"], max_prefetch_bytes=ahead)
    assert {0, 1, "cpu"} == set(loaded.hf_device_map.values())
    for _ in range(3):
        assert torch.allclose(loaded(IDS), expected, atol=1e-5)
    assert max(peak(FIRST), peak(SECOND)) <= MEMORY


@pytest.mark.parametrize("offload", ["memory", "disk"])
@pytest.mark.parametrize("ahead", [None, 0, BLOCK])
def test_only_what_is_needed_lies_on_the_device(tmp_path: Path, offload: str, ahead: int | None) -> None:
    model, expected = made(blocks=30)
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert total > 1.2 * MEMORY
    if offload == "disk":
        disk_offload(model, tmp_path, 0, True, ["Block"], max_prefetch_bytes=ahead)
    else:
        cpu_offload(model, 0, True, preload_module_classes=["Block"], max_prefetch_bytes=ahead)
    for _ in range(3):
        assert torch.allclose(model(IDS), expected, atol=1e-5)
    held = 1 + (2 if ahead is None else ahead // BLOCK)
    # What is in use, what is read ahead, one being read, the lone scale, and the inputs and outputs of layers.
    assert peak(FIRST) <= (held + 1) * BLOCK + 20_000
    assert used(SECOND) == 0


def test_nothing_stays_on_the_device_without_reading_ahead() -> None:
    model, _ = made(blocks=30)
    cpu_offload(model, 0, True, max_prefetch_bytes=0)
    for _ in range(2):
        model(IDS)
    assert used(FIRST) == 0


@pytest.mark.parametrize("preload", [[], ["Block"]])
def test_nothing_stays_on_the_device_after_a_pass(preload: list[str]) -> None:
    model, expected = made(blocks=30)
    cpu_offload(model, 0, True, preload_module_classes=preload)
    for _ in range(3):
        assert torch.allclose(model(IDS), expected, atol=1e-5)
        assert used(FIRST) == 0


def test_a_pass_that_fails_leaves_weights_away_and_the_next_is_right() -> None:
    model, expected = made()
    cpu_offload(model, FIRST)
    model(IDS)
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"):
            model(IDS, fail=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.allclose(model(IDS), expected, atol=1e-6)


def test_a_device_that_is_full_says_so_and_the_model_stays_usable() -> None:
    model, expected = made(blocks=4)
    cpu_offload(model, FIRST, max_prefetch_bytes=0)
    model(IDS)
    taken = torch.empty((MEMORY - used(FIRST)) // 4 - 1000, device=FIRST)
    with pytest.raises(torch.OutOfMemoryError):
        model(IDS)
    assert all(parameter.is_meta for parameter in model.parameters())
    del taken
    assert torch.allclose(model(IDS), expected, atol=1e-6)


def test_what_was_read_ahead_makes_way_when_the_device_is_full() -> None:
    def block(value: float) -> prefetch.Block:
        return prefetch.Block({"w": lambda: torch.full((1000,), value)}, {"w": torch.float32}, FIRST, 4000)

    blocks, other, reader = [block(i) for i in range(4)], block(9), BlockReader(10**6)
    for _ in range(2):
        for one in blocks:
            reader.release(one, reader.take(one))
    assert reader.wait(250)
    assert used(FIRST) == 3 * 4000
    taken = torch.empty((MEMORY - used(FIRST)) // 4, device=FIRST)
    assert reader.take(other)["w"][0].item() == 9
    assert used(FIRST) <= taken.nbytes + 4000
    assert reader.budget == 0


def test_several_threads_use_one_offloaded_model() -> None:
    model, expected = made()
    cpu_offload(model, FIRST)
    wrong: list[Any] = []

    def call() -> None:
        try:
            with torch.no_grad():
                wrong.extend("other" for _ in range(10) if not torch.allclose(model(IDS), expected, atol=1e-6))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert wrong == []


def test_arguments_that_are_skipped_stay_where_they_are() -> None:
    model, _ = made(blocks=1)
    dispatch_model(model, {"": 0, "head": 1}, skip_keys=["kept"])
    kept = torch.ones(2)
    logits, returned = model(IDS, kept=kept)
    assert returned is kept
    assert logits.device == torch.device("cpu")


def test_models_take_turns_on_the_device() -> None:
    (first, expected), (second, _) = made(blocks=2), made(blocks=2)
    first, handle = cpu_offload_with_hook(first)  # type: ignore[assignment]
    second, other = cpu_offload_with_hook(second, 0, handle)  # type: ignore[assignment]
    assert torch.allclose(first(IDS).cpu(), expected, atol=1e-6)
    assert device_of(first, "scale") == FIRST
    assert torch.allclose(second(IDS).cpu(), expected, atol=1e-6)
    assert (device_of(first, "scale").type, device_of(second, "scale")) == ("cpu", FIRST)
    other.offload()
    assert used(FIRST) == 0
    handle.remove()
    assert torch.equal(first(IDS), expected)


def test_weights_at_hand_on_another_device() -> None:
    model, _ = made()
    weight = model.head.weight.clone()
    cpu_offload(model, FIRST)
    with align_module_device(model.head, 1):
        assert model.head.weight.device == SECOND
        assert torch.equal(model.head.weight.cpu(), weight)
    assert model.head.weight.is_meta
    layer = nn.Linear(2, 2)
    with align_module_device(layer, SECOND):
        assert layer.weight.device == SECOND
    assert layer.weight.device.type == "cpu"


def test_one_tensor_moves_and_its_memory_is_given_back() -> None:
    layer = nn.Linear(16, 16)
    set_module_tensor_to_device(layer, "weight", 0)
    assert (layer.weight.device, used(FIRST)) == (FIRST, 1024)
    set_module_tensor_to_device(layer, "weight", 1, value=torch.ones(16, 16), dtype=torch.bfloat16)
    assert (layer.weight.device, layer.weight.dtype, used(FIRST), used(SECOND)) == (SECOND, torch.bfloat16, 0, 512)
    set_module_tensor_to_device(layer, "weight", "cpu")
    assert (layer.weight.float().sum(), used(SECOND)) == (256, 0)


def test_models_and_weights_are_made_and_loaded_there(tmp_path: Path) -> None:
    with init_on_device(SECOND):
        model = Net(blocks=1)
    assert {parameter.device for parameter in model.parameters()} == {SECOND}
    reference, _ = made(blocks=1)
    save_weights(reference.state_dict(), tmp_path)
    report = load_checkpoint_in_model(model, tmp_path)
    assert report.missing == []
    assert torch.equal(model.head.weight.cpu(), reference.head.weight)
    assert load_weights_file(tmp_path / "model.safetensors", SECOND)["head.weight"].device == SECOND
    loader = OffloadedWeightsLoader(
        index={"scale": {"safetensors_file": str(tmp_path / "model.safetensors")}}, device=FIRST
    )
    assert loader["scale"].device == FIRST


def test_layers_cast_on_the_device() -> None:
    model, expected = made(blocks=2)
    model.to(FIRST)
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern="embed")
    assert torch.allclose(model(IDS.to(FIRST)).cpu(), expected, atol=0.1)
    assert model.head.weight.dtype == torch.bfloat16


def test_inputs_follow_the_weights() -> None:
    model, expected = made(blocks=1)
    attach_align_device_hook(model, 1)
    assert torch.allclose(model(IDS).cpu(), expected, atol=1e-6)
    assert device_of(model, "head.weight") == SECOND


MOVES: list[Callable[[Net], object]] = [
    lambda m: cpu_offload(m, 0),
    lambda m: dispatch_model(m, {"": 0, "head": "cpu"}),
]


@pytest.mark.parametrize("number", range(len(MOVES)))
def test_copies_compute_and_hooks_come_off(number: int) -> None:
    model, expected = made(blocks=2)
    MOVES[number](model)
    model(IDS)
    other = copy.deepcopy(model)
    assert torch.allclose(other(IDS), expected, atol=1e-6)
    remove_hook_from_submodules(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.allclose(nn.Module.to(model, "cpu")(IDS), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_map_that_exceeds_the_memory_of_a_device_is_refused_before_anything_is_read(
    tmp_path: Path, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = made(blocks=60)
    save_weights(model.state_dict(), tmp_path, "100KB")
    with init_empty_weights():
        empty = Net(blocks=60).eval()
    values = empty.state_dict().values()
    size = sum(value.numel() * (2 if dtype and value.is_floating_point() else value.itemsize) for value in values)
    free = MEMORY - 50_000
    held = torch.ones(50_000, dtype=torch.uint8, device=SECOND)
    monkeypatch.setattr(loading, "copy_all", lambda *_: pytest.fail("something was read"))
    with pytest.raises(SettingError, match=rf"{size - free} bytes are missing on {SECOND}\.\n") as refused:
        load_checkpoint_and_dispatch(empty, tmp_path, {"": 1}, dtype=dtype)
    assert f"take {size} on {SECOND} ({free} are free)." in refused.value.obstacle
    assert all(value.is_meta for value in empty.parameters())
    del held


def test_the_nearest_map_of_a_refused_one_can_be_loaded(tmp_path: Path) -> None:
    model, _ = made(blocks=6)
    save_weights(model.state_dict(), tmp_path)
    with init_empty_weights():
        empty = Net(blocks=6).eval()
    held = torch.ones(MEMORY - 60_000, dtype=torch.uint8, device=FIRST)
    with pytest.raises(SettingError, match="bytes are missing") as refused:
        load_checkpoint_in_model(empty, tmp_path, {"": 0})
    shown = re.search(r"fits: (\{.*?\})\.", refused.value.remedy)
    assert shown is not None
    nearest = ast.literal_eval(shown[1])
    assert set(nearest.values()) == {0, "cpu"}
    load_checkpoint_in_model(empty, tmp_path, nearest)
    devices = {value.device for value in empty.parameters()}
    assert devices == {FIRST, torch.device("cpu")}
    assert all(torch.equal(value.cpu(), model.state_dict()[name]) for name, value in empty.state_dict().items())
    del held


def test_a_model_in_memory_is_not_moved_where_a_device_lacks_memory() -> None:
    model, _ = made(blocks=6)
    size = sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    held = torch.ones(MEMORY - 60_000, dtype=torch.uint8, device=FIRST)
    with pytest.raises(SettingError, match=rf"{size - 60_000} bytes are missing on {FIRST}\.\n") as refused:
        dispatch_model(model, {"": 0})
    assert {value.device for value in model.parameters()} == {torch.device("cpu")}
    nearest = ast.literal_eval(re.search(r"fits: (\{.*?\})\.", refused.value.remedy)[1])  # type: ignore[index]
    dispatch_model(model, nearest)
    assert {value.device.type for value in model.parameters()} == {NAME, "meta"}
    del held


def test_weights_that_leave_a_device_make_room_for_others() -> None:
    model, expected = made(blocks=10)
    model.to(FIRST)
    held = torch.ones(MEMORY - used(FIRST) - 1_000, dtype=torch.uint8, device=FIRST)
    model.head.to("cpu")
    model = dispatch_model(model, {"": 0, "blocks.0": 1})
    assert torch.allclose(model(IDS).cpu(), expected, atol=1e-6)
    del held


def test_weights_that_a_device_holds_already_make_room_for_those_of_a_checkpoint(tmp_path: Path) -> None:
    model, expected = made(blocks=10)
    save_weights(model.state_dict(), tmp_path)
    model.to(FIRST)
    free = MEMORY - used(FIRST)
    held = torch.ones(free - 20_000, dtype=torch.uint8, device=FIRST)
    load_checkpoint_in_model(model, tmp_path, {"": 0})
    assert torch.allclose(model.to("cpu")(IDS), expected, atol=1e-6)
    del held
