from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    ModelHook,
    OffloadedWeightsLoader,
    add_hook_to_module,
    align_module_device,
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    offload_state_dict,
    remove_hook_from_submodules,
)
from accel_bigmodel.dispatch import Place, attach_align_device_hook, attach_to_blocks
from accel_bigmodel.prefetch import Block, BlockReader
from accel_state.errors import NotOffered, SettingError, ShapeMismatch


class Net(nn.Module):
    def __init__(self, blocks: int = 4, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(blocks)])
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.head = nn.Linear(8, 10, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.order = list(range(blocks))

    def forward(self, ids: torch.Tensor, fail: bool = False) -> torch.Tensor:
        x = self.embed(ids)
        for number in self.order:
            x = self.blocks[number](x)
            if fail:
                raise ValueError("inside")
        return self.head(x * self.scale)


IDS = torch.tensor([1, 2, 3])


def made(**options: Any) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    model = Net(**options).eval()
    with torch.no_grad():
        return model, model(IDS)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


OFFLOADS: list[Callable[[Net, Path], Net]] = [
    lambda model, folder: cpu_offload(model, "cpu"),
    lambda model, folder: disk_offload(model, folder / "off"),
    lambda model, folder: disk_offload(model, folder / "off", offload_buffers=True),
    lambda model, folder: disk_offload(model, folder / "off", preload_module_classes=["Sequential"]),
    lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder / "off"),
    lambda model, folder: dispatch_model(
        model,
        {"embed": "cpu", "blocks.0": "disk", "blocks": "cpu", "scale": "disk", "head": "disk"},
        offload_dir=folder / "off",
        offload_buffers=True,
    ),
]


@pytest.mark.parametrize("number", range(len(OFFLOADS)))
@pytest.mark.parametrize("tie", [False, True])
def test_an_offloaded_model_computes_the_same_and_keeps_its_weights_away(
    tmp_path: Path, number: int, tie: bool
) -> None:
    model, expected = made(tie=tie)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    OFFLOADS[number](model, tmp_path)
    for _ in range(3):
        assert torch.equal(model(IDS), expected)
        assert model.head.weight.is_meta
    state = get_state_dict_offloaded_model(model)
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    remove_hook_from_submodules(model)
    assert not has_offloaded_params(model.head)


REST = {"embed": "cpu", "blocks": "cpu", "scale": "cpu", "head": "cpu"}
UNKNOWN: list[dict[str, Any]] = [
    {"": "cpu", "lm_head": "cpu"},
    {"": "cpu", "lm_head": "disk"},
    {**REST, "lm_head": "cpu"},
    {**REST, "embed.bias": "cpu"},
    {**REST, "embed.weight.data": "cpu"},
    {**REST, "blocks.7": "cpu", "scales": "cpu"},
    {**REST, "lm_head": "disk"},
    # The index of an accelerator, and a value that names no device.
    {"lm_head": 7, **REST},
    {"lm_head": "meta", **REST},
    {"lm_head": None, **REST},
]


@pytest.mark.parametrize("device_map", UNKNOWN)
@pytest.mark.parametrize("force_hooks", [False, True])
def test_names_that_the_model_lacks_are_ignored(device_map: dict[str, Any], force_hooks: bool) -> None:
    model, expected = made()
    unknown = [name for name in device_map if name not in {"", *REST}]
    with pytest.warns(UserWarning, match=f"do not match any .* of Net: {', '.join(unknown)}. They are ignored") as told:
        dispatch_model(model, device_map, force_hooks=force_hooks)
    assert len(told) == 1
    assert torch.equal(model(IDS), expected)
    assert model.hf_device_map == {name: "cpu" for name in device_map if name not in unknown}


@pytest.mark.parametrize("tie", [False, True])
def test_names_that_an_offloaded_model_lacks_are_ignored(tmp_path: Path, tie: bool) -> None:
    model, expected = made(tie=tie)
    offload_state_dict(tmp_path, {**model.state_dict(), "lm_head.weight": torch.ones(1)})
    with pytest.warns(UserWarning, match=r"of Net: lm_head\. They are ignored"):
        dispatch_model(model, {"lm_head": "cpu", "": "disk"}, "cpu", offload_dir=tmp_path)
    assert model.head.weight.is_meta
    assert torch.equal(model(IDS), expected)


def test_everything_on_one_device_needs_no_hooks() -> None:
    model, expected = made()
    assert dispatch_model(model, {"": "cpu"}) is model
    assert torch.equal(model(IDS), expected)
    assert model.hf_device_map == {"": "cpu"}
    assert not hasattr(model, "_hf_hook")
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    assert torch.equal(model(IDS), expected)


def test_what_is_offloaded_does_not_move(tmp_path: Path) -> None:
    model, _ = made()
    dispatch_model(model, {"embed": "cpu", "blocks": "disk", "scale": "cpu", "head": "cpu"}, offload_dir=tmp_path)
    for move in (lambda: model.to("cpu"), model.half, model.cpu):
        with pytest.raises(NotOffered, match="offloaded"):
            move()


def test_bad_maps_and_folders_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model, expected = made()
    with pytest.raises(SettingError, match="does not set a folder"):
        dispatch_model(model, {"": "cpu", "head": "disk"})
    with pytest.warns(UserWarning, match=": bloks"), pytest.raises(SettingError, match="no device for: "):
        dispatch_model(model, {"bloks": "disk"}, offload_dir=tmp_path)
    assert torch.equal(model(IDS), expected)
    offload_state_dict(tmp_path, {"weight": torch.zeros(3, 3)})
    layer = nn.Linear(2, 2, bias=False)
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    with pytest.raises(ShapeMismatch, match=r"shape \(3, 3\), the module expects \(2, 2\)"):
        layer(torch.ones(1, 2))
    assert layer.weight.is_meta


def test_a_forward_that_raises_leaves_the_weights_offloaded(tmp_path: Path) -> None:
    model, expected = made()
    disk_offload(model, tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"):
            model(IDS, fail=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(IDS), expected)


def read_ahead_model(model: Net, max_bytes: int | None = None) -> BlockReader:
    """Weights in another dtype than the model's, so that the reader has to bring them."""
    weights = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    reader = BlockReader(max_bytes)
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights, reader=reader)
    return reader


@pytest.mark.parametrize("max_bytes", [None, 0, 300, 10**6])
def test_weights_read_ahead_are_the_right_ones_also_when_the_order_changes(max_bytes: int | None) -> None:
    model, expected = made()
    plain = copy.deepcopy(model)
    reader = read_ahead_model(model, max_bytes)
    for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0], [2], [0, 0, 3, 3], [], [0, 1, 2, 3], [0, 1, 2, 3]):
        model.order = plain.order = order
        assert torch.equal(model(IDS), plain(IDS))
        assert reader.held <= reader.budget
    assert torch.equal(model(IDS), expected)


def test_the_next_blocks_are_read_by_the_thread() -> None:
    device, threads = torch.device("cpu"), list[str]()

    def source(number: int) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            threads.append(threading.current_thread().name)
            return torch.full((4,), float(number))

        return read

    blocks = [Block({"w": source(i)}, {"w": torch.float64}, device, 32) for i in range(6)]
    reader = BlockReader(64)

    def passed() -> list[float]:
        found = []
        for block in blocks:
            weights = reader.take(block)
            assert reader.wait(250)
            found.append(weights["w"][0].item())
            reader.release(block, weights)
        return found

    assert passed() == passed() == [0, 1, 2, 3, 4, 5]
    assert threads[:6] == ["MainThread"] * 6
    assert "MainThread" not in threads[7:]


def test_memory_that_somebody_still_uses_is_not_read_into() -> None:
    device = torch.device("cpu")
    blocks = [
        Block({"w": lambda i=i: torch.full((4,), float(i))}, {"w": torch.float64}, device, 32)
        for i in range(3)  # type: ignore[misc]
    ]
    reader, kept = BlockReader(0), []
    for _ in range(2):
        for block in blocks:
            weights = reader.take(block)
            kept.append((weights["w"][1:], weights["w"][0].item()))
            reader.release(block, weights)
    assert all(view[0].item() == value for view, value in kept)
    freed = reader.take(blocks[0])
    address = freed["w"].data_ptr()
    reader.release(blocks[0], freed)
    del freed
    assert reader.take(blocks[1])["w"].data_ptr() == address


def test_an_error_of_the_thread_is_met_by_whoever_needs_the_weights() -> None:
    fails = [False]

    def source() -> torch.Tensor:
        if fails[0]:
            raise OSError("gone")
        return torch.zeros(2)

    blocks = [Block({"w": source}, {"w": torch.float64}, torch.device("cpu"), 16) for _ in range(2)]
    reader = BlockReader()
    for block in blocks * 2:
        reader.release(block, reader.take(block))
    fails[0] = True

    def take_all() -> None:
        for block in blocks * 2:
            reader.take(block)

    with pytest.raises(OSError, match="gone"):
        take_all()


def test_the_thread_ends_with_the_reader() -> None:
    model, _ = made()
    before = threading.enumerate()
    reader = read_ahead_model(model)
    for _ in range(2):
        model(IDS)
    (thread,) = set(threading.enumerate()) - set(before)
    remove_hook_from_submodules(model)
    del reader, model
    import gc

    gc.collect()
    thread.join(250)
    assert not thread.is_alive()


def test_a_program_may_end_while_weights_are_read_ahead() -> None:
    script = """
import torch
from torch import nn
from accel_bigmodel import attach_align_device_hook
model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(4)))
weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
attach_align_device_hook(model, "cpu", offload=True, weights_map=weights)
with torch.no_grad():
    for _ in range(3):
        model[0](torch.ones(1, 1500)), model[1](torch.ones(1, 1500))
"""
    programs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for program in programs:
        _, errors = program.communicate(timeout=250)
        assert (program.returncode, errors) == (0, "")


def test_several_threads_may_call_at_once() -> None:
    model, expected = made()
    read_ahead_model(model)
    wrong: list[Any] = []

    def call() -> None:
        try:
            with torch.no_grad():
                wrong.extend("other values" for _ in range(20) if not torch.equal(model(IDS), expected))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert wrong == []
    assert model.head.weight.is_meta


def test_gradients_through_offloaded_weights_reach_the_input(tmp_path: Path) -> None:
    with torch.enable_grad():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        x = torch.ones(2, 4, requires_grad=True)
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        attach_align_device_hook(model, "cpu", offload=True, weights_map=weights)
        for _ in range(3):
            first, second = model(x).sum(), model(x).sum()
            assert torch.equal(torch.autograd.grad(first, x)[0], expected)
            assert torch.equal(torch.autograd.grad(second, x)[0], expected)


def test_weights_at_hand_inside_a_block(tmp_path: Path) -> None:
    model, _ = made()
    weight = model.head.weight.clone()
    disk_offload(model, tmp_path)
    with align_module_device(model.head):
        assert torch.equal(model.head.weight, weight)
    assert model.head.weight.is_meta
    with align_module_device(model.head, "cpu"):
        assert torch.equal(model.head.weight, weight)
    assert model.head.weight.is_meta
    assert has_offloaded_params(model.head)
    layer = nn.Linear(2, 2)
    own, values = layer.weight, layer.weight.tolist()
    with align_module_device(layer, "meta"):
        assert layer.weight.is_meta
    assert layer.weight is own
    assert layer.weight.tolist() == values


def test_an_offloaded_model_can_be_copied(tmp_path: Path) -> None:
    model, expected = made()
    disk_offload(model, tmp_path)
    model(IDS)
    other = copy.deepcopy(model)
    assert torch.equal(other(IDS), expected)
    assert other.head.weight.is_meta
    assert model.head.weight.is_meta


def test_taking_hooks_off_brings_weights_back() -> None:
    model, expected = made()
    cpu_offload(model, "cpu")
    model(IDS)
    remove_hook_from_submodules(model)
    assert torch.equal(model(IDS), expected)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_shared_modules_are_hooked_once_and_compute_the_same(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(8, 8))
    x = torch.ones(2, 8)
    expected = model(x)
    disk_offload(model, tmp_path)
    for _ in range(2):
        assert torch.equal(model(x), expected)
    other = nn.Sequential(layer_two := nn.Linear(8, 8), nn.ReLU(), layer_two)
    expected = other(x)
    dispatch_model(other, {"0": "disk", "1": "cpu", "2": "disk"}, offload_dir=tmp_path / "other")
    assert torch.equal(other(x), expected)


def test_a_model_moves_again_when_its_hooks_are_off(tmp_path: Path) -> None:
    model, expected = made()
    dispatch_model(model, {"embed": "cpu", "blocks": "disk", "scale": "cpu", "head": "cpu"}, offload_dir=tmp_path)
    with pytest.raises(NotOffered, match="remove_hook_from_submodules"):
        model.to("cpu")
    remove_hook_from_submodules(model)
    assert torch.equal(model.to("cpu")(IDS), expected)
    assert model.half().head.weight.dtype == torch.float16
    assert not {"to", "half", "cpu"} & set(vars(model))


def test_a_dispatched_model_can_be_pickled_and_its_copy_refuses_to_move(tmp_path: Path) -> None:
    model, expected = made()
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(IDS), expected)
        with pytest.raises(NotOffered):
            twin.to("cpu")
        remove_hook_from_submodules(twin)
        assert torch.equal(twin.to("cpu")(IDS), expected)
        with pytest.raises(NotOffered):
            model.to("cpu")


def test_a_further_hook_does_not_allow_moving_and_a_replaced_one_does(tmp_path: Path) -> None:
    model, expected = made()
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    add_hook_to_module(model, ModelHook(), append=True)
    with pytest.raises(NotOffered):
        model.cpu()
    assert torch.equal(model(IDS), expected)
    remove_hook_from_submodules(model)
    add_hook_to_module(model, ModelHook())
    model.cpu()


class Immovable:
    """An argument that the device has no memory for."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("the device is full")


@pytest.mark.parametrize("by_name", [False, True])
def test_an_argument_that_cannot_be_moved_leaves_the_weights_offloaded(tmp_path: Path, by_name: bool) -> None:
    model, expected = made()
    disk_offload(model, tmp_path, "cpu")
    layer, given = model.blocks[0][0], Immovable()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            layer(input=given) if by_name else layer(given)
        assert layer.weight.is_meta
    assert torch.equal(model(IDS), expected)
    assert layer.weight.is_meta


def test_a_slow_disk_under_one_model_does_not_keep_another_waiting() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            begun.set()
            assert go_on.wait(250)
            return super().__getitem__(name)

    slow, quick = nn.Linear(4, 4), nn.Linear(4, 4)
    x, expected = torch.ones(1, 4), quick(torch.ones(1, 4))
    weights = Slow({name: tensor.detach() for name, tensor in slow.state_dict().items()})
    add_hook_to_module(slow, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    add_hook_to_module(quick, AlignDevicesHook("cpu", offload=True))
    waiting, found = threading.Thread(target=slow, args=(x,)), []
    working = threading.Thread(target=lambda: found.append(quick(x)))
    waiting.start()
    try:
        assert begun.wait(250)
        working.start()
        working.join(250)
        assert found
        assert torch.equal(found[0], expected)
    finally:
        go_on.set()
        waiting.join(250)
        working.join(250)


def test_a_thread_that_finds_no_memory_stops_reading_ahead(caplog: pytest.LogCaptureFixture) -> None:
    full, tried = [False], []

    def source() -> torch.Tensor:
        if full[0] and threading.current_thread().name == "accel-prefetch":
            tried.append(True)
            raise torch.OutOfMemoryError("the device is full")
        return torch.zeros(2)

    blocks = [Block({"w": source}, {"w": torch.float64}, torch.device("cpu"), 16) for _ in range(3)]
    reader = BlockReader(1000)
    for number in range(20):
        full[0] = number > 1
        for block in blocks:
            reader.release(block, reader.take(block))
            assert reader.wait(250)
    assert len(tried) == 1
    assert reader.budget == 0
    assert caplog.text.count("Prefetching of weights stopped") == 1


def test_putting_hooks_on_runs_no_hooks_of_the_state_dict() -> None:
    model, expected = made()
    run = []
    for module in model.modules():
        module.register_state_dict_pre_hook(lambda *_: run.append(True))
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    options = {"skip_keys": None, "reader": BlockReader()}
    attach_to_blocks(model, {"": Place("cpu", offloaded=True)}, weights, False, (), options)
    assert not run
    assert torch.equal(model(IDS), expected)
