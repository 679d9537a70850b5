from __future__ import annotations

import gc
import logging
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel import (
    check_device_map,
    clean_device_map,
    explain_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
)
from accel_bigmodel.device_map import check_device_same, device_of_name, resolve_device
from accel_bigmodel.sizes import compute_module_sizes
from accel_bigmodel.weight_layout import layout_of
from accel_state.errors import SettingError
from accel_testing.profiling import count_calls


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)


class Model(nn.Module):
    def __init__(self, tie: bool = False, blocks: int = 3, width: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("buf", torch.zeros(5), persistent=False)
        if tie:
            self.head.weight = self.emb.weight


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)


def test_a_budget_as_text_is_turned_into_bytes_in_place() -> None:
    given = {"cpu": "1KB", 0: 2.5}
    assert get_max_memory(given) == given == {0: 2, "cpu": 1000}  # type: ignore[arg-type]


def test_budgets_are_sorted_and_read() -> None:
    assert list(get_max_memory({"disk": 5, "cpu": "1KB", 1: 7, 0: "2KiB"}).items()) == [
        (0, 2048),
        (1, 7),
        ("cpu", 1000),
        ("disk", 5),
    ]
    free = get_max_memory()
    assert free["cpu"] > 2**20
    for wrong in ({"gpu": 1}, {-1: 1}, {True: 1}):
        with pytest.raises(SettingError, match="indices of accelerators"):
            get_max_memory(wrong)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="'lots'"):
        get_max_memory({0: "lots"})


def test_balanced_budgets_share_evenly_with_room_for_a_block() -> None:
    model = Model()
    assert get_balanced_memory(model, {0: 1000, 1: 1000}) == {0: 547, 1: 1000}
    assert get_balanced_memory(model, {0: 1000, 1: 1000, "cpu": 5}, ["Block"]) == {0: 632, 1: 1000, "cpu": 5}
    assert get_balanced_memory(model, {0: 1000, 1: 1000}, low_zero=True) == {0: 0, 1: 1000}
    assert get_balanced_memory(model, {0: 300, 1: 1000}) == {0: 300, 1: 1000}
    assert get_balanced_memory(model, {0: 1000}) == {0: 1000}
    assert get_balanced_memory(nn.Linear(2, 2), {0: 100, 1: 100})[1] == 100


def test_a_model_that_fits_is_one_entry() -> None:
    assert infer_auto_device_map(Model(), {0: 10**6}) == {"": 0}
    assert infer_auto_device_map(Model(), {0: 864}) == {"": 0}
    blocks = infer_auto_device_map(Model(), {0: 10**6}, clean_result=False)
    assert blocks == dict.fromkeys(["scale", "emb", "blocks", "norm", "head", "buf"], 0)
    assert infer_auto_device_map(nn.Linear(2, 2), {0: 100}) == {"": 0}
    assert infer_auto_device_map(nn.Identity(), {0: 100}) == {}


def test_devices_fill_up_in_order_and_room_is_kept_for_the_largest_layer() -> None:
    assert infer_auto_device_map(Model(), {0: 400, "cpu": 300}) == {
        "scale": 0,
        "emb": 0,
        "blocks.0.a": "cpu",
        "blocks.0.b": "disk",
        "blocks.1": "disk",
        "blocks.2": "disk",
        "norm": "disk",
        "head": "disk",
        "buf": "disk",
    }
    assert infer_auto_device_map(Three(), {0: 200, 1: 200}) == {"linear1": 0, "batchnorm": 1, "linear2": 1}
    assert infer_auto_device_map(Three(), {0: 200, 1: 80, 2: 200}) == {"linear1": 0, "batchnorm": 1, "linear2": 2}


def test_blocks_that_must_stay_whole_do() -> None:
    found = infer_auto_device_map(Model(), {0: 520, "cpu": 10**4}, no_split_module_classes="Block")
    assert found["blocks.0"] == 0
    assert not [name for name in found if name.startswith("blocks.") and name.count(".") > 1]


def test_tied_weights_lie_together_and_count_once() -> None:
    found = infer_auto_device_map(Model(tie=True), {0: 400, "cpu": 300}, no_split_module_classes=["Block"])
    assert found["emb"] == found["head"] == 0
    assert found["blocks"] == "disk"
    three = Three()
    three.linear2.weight = three.linear1.weight
    assert infer_auto_device_map(three, {0: 156}) == {"": 0}
    assert infer_auto_device_map(three, {0: 155, 1: 200}) == {"": 1}


def test_a_shared_module_lies_in_one_place() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), layer)
    found = infer_auto_device_map(model, {0: 180, 1: 10**4})
    assert device_of_name("1", found) == device_of_name("3", found)


def test_an_empty_accelerator_gets_a_later_piece_when_asked() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(4, 4), nn.Linear(10, 10))
    budget = {0: 530, "cpu": 10**4}
    assert infer_auto_device_map(model, budget) == {"": "cpu"}
    assert infer_auto_device_map(model, budget, fallback_allocation=True) == {"0": "cpu", "1": 0, "2": "cpu"}
    assert infer_auto_device_map(model, {0: 30}, fallback_allocation=True) == {"": "disk"}


def test_a_warning_says_that_buffers_of_offloaded_modules_find_no_room_on_the_accelerator() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(100))
    expected = {"0": 0, "1": "cpu", "2": "cpu"}
    assert infer_auto_device_map(model, {0: 1900, "cpu": 10**5}, offload_buffers=True) == expected
    with pytest.warns(UserWarning, match="808 bytes of buffers.*offload_buffers=True"):
        assert infer_auto_device_map(model, {0: 1900, "cpu": 10**5}) == expected
    # Another accelerator has room for the buffers.
    roomy = {0: 1900, 1: 1200, "cpu": 10**5}
    assert infer_auto_device_map(model, roomy) == {"0": 0, "1": 1, "2": "cpu"}


def test_a_log_names_the_layer_that_finds_no_room_to_be_computed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(20, 20))
    assert infer_auto_device_map(model, {0: 0, 1: 200, "cpu": 10**5}) == {"0": 1, "1": 1, "2": "cpu"}
    assert "1 has insufficient memory to compute the offloaded layer '2'" in caplog.text
    caplog.clear()
    # There is room for any of the offloaded layers, one at a time.
    narrow = nn.Sequential(nn.Linear(4, 4), nn.Linear(12, 12), nn.Linear(4, 4))
    assert infer_auto_device_map(narrow, {0: 720, "cpu": 10**5})["1"] == "cpu"
    assert caplog.text == ""


@pytest.mark.parametrize("fallback", [True, False])
def test_a_log_names_the_devices_that_stay_empty(caplog: pytest.LogCaptureFixture, fallback: bool) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    with caplog.at_level(logging.INFO):
        assert infer_auto_device_map(model, {0: 30, 1: 10**5}, fallback_allocation=fallback) == {"": 1}
        assert "insufficient memory: 0 (880 bytes required, 30 bytes in the budget)." in caplog.text
        assert caplog.records[0].levelno == logging.INFO
        caplog.clear()
        assert infer_auto_device_map(model, {0: 30, 1: 0}, fallback_allocation=fallback) == {"": "disk"}
        assert "0 (880 bytes required, 30 bytes in the budget), 1 (440 bytes required, 0 bytes" in caplog.text
        caplog.clear()
        assert infer_auto_device_map(model, {0: 10**5, 1: 10}, fallback_allocation=fallback) == {"": 0}
        assert caplog.text == ""


def test_the_later_piece_is_the_largest_module_that_fits() -> None:
    def pair(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    model = nn.Sequential(pair(10), pair(4), nn.Linear(10, 10))
    budget = {0: 620, "cpu": 10**4}
    assert infer_auto_device_map(model, budget, fallback_allocation=True) == {"0": "cpu", "1": 0, "2": "cpu"}
    # The second accelerator holds nothing rather than a later piece.
    later = {0: 0, 1: 90, "cpu": 10**4}
    assert infer_auto_device_map(model, later, fallback_allocation=True) == {"": "cpu"}


def test_modules_that_were_not_split_are_entries() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(8, 8)))
    assert infer_auto_device_map(model, {0: 736}) == {"": 0}
    # The second module did not fit on 0, and was split.
    assert infer_auto_device_map(model, {0: 447, 1: 400}) == {"0": 0, "1.0": 1, "2": 1}
    only = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert infer_auto_device_map(only, {0: 240}) == {"0": 0}
    assert infer_auto_device_map(only, {0: 10, 1: 240}) == {"": 1}


def test_a_budget_of_all_devices_that_is_too_small_is_refused_with_name_and_numbers() -> None:
    with pytest.raises(SettingError, match=r"'emb' takes 160 bytes, and no device has enough memory \(left: 0: 100"):
        infer_auto_device_map(Model(), {0: 100, "cpu": 100, "disk": 100})
    assert infer_auto_device_map(Model(), {"cpu": 100}) == {"": "disk"}


def test_a_budget_that_is_too_small_names_the_missing_bytes_and_the_nearest_map_that_fits() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with pytest.raises(SettingError) as refused:
        infer_auto_device_map(model, {0: 160, "cpu": 160, "disk": 100})
    assert "the budget {0: 160, 'cpu': 160, 'disk': 100}: 60 bytes are missing" in str(refused.value)
    nearest = {"0": 0, "1": "cpu", "2": "disk", "3": "disk"}
    assert f"Raise the budget of 'disk' to 160 bytes. The nearest device map that fits is then {nearest}" in str(
        refused.value
    )
    assert infer_auto_device_map(model, {0: 160, "cpu": 160, "disk": 160}) == nearest


def test_the_nearest_map_of_a_large_model_is_shortened() -> None:
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    with pytest.raises(SettingError, match=r"'9': 'cpu', and 20 more\}"):
        infer_auto_device_map(model, {"cpu": 80 * 20, "disk": 80})


def test_sizes_in_another_dtype_decide() -> None:
    assert infer_auto_device_map(Model(), {0: 450}, dtype="float16") == {"": 0}
    special = {"emb.weight": torch.float32}
    found = infer_auto_device_map(Model(), {0: 450}, dtype="float16", special_dtypes=special, offload_buffers=True)
    assert found != {"": 0}


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(0, 6),
    width=st.integers(1, 6),
    tie=st.booleans(),
    budget=st.lists(st.integers(0, 900), min_size=0, max_size=3),
    host=st.integers(0, 1500),
    whole=st.booleans(),
    fallback=st.booleans(),
)
def test_no_budget_is_exceeded_and_every_tensor_has_a_device(
    blocks: int, width: int, tie: bool, budget: list[int], host: int, whole: bool, fallback: bool
) -> None:
    with init_empty_weights():
        model = Model(tie, blocks, width)
    memory: dict[int | str, int] = {**dict(enumerate(budget)), "cpu": host}
    classes = ["Block"] if whole else None
    report = explain_device_map(model, memory, classes, offload_buffers=True, fallback_allocation=fallback)
    check_device_map(model, report.device_map)
    seen: dict[int, Any] = {}
    used: dict[Any, int] = dict.fromkeys(report.used, 0)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in tensors:
        device = device_of_name(name, report.device_map)
        assert seen.setdefault(id(tensor), device) == device
    for tensor_id, device in seen.items():
        used[device] += next(t.nbytes for _, t in tensors if id(t) == tensor_id)
    assert used == report.used
    assert all(used[device] <= memory[device] for device in memory)
    if whole:
        for number in range(blocks):
            assert (
                len({device_of_name(n, report.device_map) for n, _ in tensors if n.startswith(f"blocks.{number}.")})
                == 1
            )


def test_the_report_says_why_in_a_table_and_bars(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(Model(), {0: 400, "cpu": 300}, verbose=True)
    shown = capsys.readouterr().out
    assert "it fits" in shown
    assert "160 bytes did not fit" not in shown
    assert "80 bytes did not fit on 0: 228 bytes left, 160 bytes of them kept to load 'head'" in shown
    assert "   cpu  [###########............................." in shown
    assert "disk  612 bytes used, no bound" in shown


@pytest.mark.parametrize(
    ("given_map", "name", "cleaned"),
    [
        ({"a.b": 0, "a.c": 0, "d": 1, "e.x": 0, "e.y": 1}, "", {"a": 0, "d": 1, "e.x": 0, "e.y": 1}),
        ({"a": 0, "b": 0}, "", {"": 0}),
        ({"a.b": 0, "a.c": 0, "d.e": 0}, "a", {"a": 0, "d.e": 0}),
        ({"": 0}, "", {"": 0}),
        ({}, "", {}),
        # A single entry keeps its name.
        ({"a": 0}, "", {"a": 0}),
        ({"a.b": 0, "c.d": 1, "c.e": 1}, "", {"a.b": 0, "c": 1}),
        ({"a.b": 0, "c": 1}, "a", {"a.b": 0, "c": 1}),
    ],
)
def test_device_maps_are_simplified(given_map: dict[str, int], name: str, cleaned: dict[str, int]) -> None:
    assert clean_device_map(given_map, name) == cleaned


def test_a_device_map_must_fit_the_model() -> None:
    check_device_map(Model(), {"": 0})
    check_device_map(Model(), {"emb": 0, "blocks": "cpu", "norm": "disk", "head": "cuda:1", "scale": 0})
    with pytest.warns(UserWarning, match=r"device_map keys do not match any submodules.*: zz, blocks\.7\."):
        check_device_map(Model(), {"": 0, "zz": 1, "blocks.7": 0})
    with pytest.raises(SettingError, match=r"no device for: head\.weight, scale|no device for: scale, head\.weight"):
        check_device_map(Model(), {"emb": 0, "blocks": 0, "norm": 0})
    for wrong in ("nowhere", -1, None, 1.5):
        with pytest.raises(SettingError, match="is not a device"):
            check_device_map(Model(), {"": wrong})  # type: ignore[dict-item]


def test_devices_that_are_not_there_are_refused() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    for missing in ("disk", "cuda:99", 99, "xpu:3"):
        with pytest.raises(SettingError, match="Cannot use the device"):
            resolve_device(missing)
    with pytest.raises(SettingError, match="compute on the disk"):
        resolve_device("disk")
    assert check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cuda:1"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cpu"), torch.device("cuda"))


def calls_of(blocks: int) -> int:
    with init_empty_weights():
        model = Model(tie=True, blocks=blocks)
    total = compute_module_sizes(model)[""]

    def work() -> None:
        infer_auto_device_map(model, {0: total // 3, "cpu": total // 3}, ["Block"])
        layout_of(model, infer_auto_device_map(model, {0: total // 3, "cpu": total // 3}, clean_result=False))
        get_balanced_memory(model, {0: total, 1: total})

    return count_calls(work)


def test_work_grows_with_the_model_not_with_its_square() -> None:
    assert calls_of(400) < 4.5 * calls_of(100)


def memory_of(blocks: int, width: int) -> int:
    with init_empty_weights():
        model = Model(blocks=blocks, width=width)
    total = compute_module_sizes(model)[""]
    # A full collection empties Python's free lists, whose memory tracemalloc does not count when it is used again; one
    # that fell into the call would change what is counted.
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        infer_auto_device_map(model, {0: total // 3, "cpu": total // 3}, offload_buffers=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()


def test_memory_grows_with_the_number_of_modules_not_with_their_sizes() -> None:
    small, wide = memory_of(100, 4), memory_of(100, 4096)
    # Sizes up to 256 are objects that Python shares; larger ones take some bytes each.
    assert wide < 1.5 * small
    assert memory_of(400, 4) < 4.5 * small
