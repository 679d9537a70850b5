"""Damaged checkpoints: what is found before the first write, and what a model is after a failure in the middle."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model, save_weights
from accel_bigmodel.weight_files.reading import Copy
from accel_state.errors import CheckpointError, SettingError, ShapeMismatch


def model(empty: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    with init_empty_weights() if empty else contextlib.nullcontext():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


INPUTS = torch.ones(1, 4)


@pytest.fixture
def disk_fails_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The disk fails when the last weight of a model is read; the function that is returned ends that."""
    run = Copy.run

    def failing(self: Copy) -> None:
        if self.weight.name == "2.weight":
            raise OSError(5, "Input/output error")
        run(self)

    monkeypatch.setattr(Copy, "run", failing)
    return monkeypatch.undo


USES: dict[str, Callable[[nn.Module], object]] = {
    "call": lambda net: net(INPUTS),
    "call of a part": lambda net: net[0](INPUTS),  # type: ignore[index]
    "state_dict": lambda net: net.state_dict(),
    "state_dict of a part": lambda net: net[2].state_dict(),  # type: ignore[index]
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("empty", [False, True])
def test_a_model_that_was_loaded_in_part_cannot_be_used_until_a_load_succeeds(
    tmp_path: Path, disk_fails_later: Callable[[], None], use: str, empty: bool
) -> None:
    for folder in ("damaged", "sound"):
        save_weights(model().state_dict(), tmp_path / folder)
    net = model(empty)
    with pytest.raises(OSError, match="Input/output"):
        load_checkpoint_in_model(net, tmp_path / "damaged", dtype=torch.float64 if empty else None)
    disk_fails_later()
    with pytest.raises(CheckpointError) as refused:
        USES[use](net)
    assert f"The load from '{tmp_path / 'damaged'}' failed: OSError: [Errno 5] Input/output error" in str(refused.value)
    with pytest.raises(SettingError):
        load_checkpoint_in_model(net, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="damaged"):
        USES[use](net)
    load_checkpoint_in_model(net, tmp_path / "sound")
    USES[use](net.float())
    assert torch.equal(net(INPUTS), model()(INPUTS))


def test_a_state_dict_with_all_names_makes_a_model_usable_again(
    tmp_path: Path, disk_fails_later: Callable[[], None]
) -> None:
    save_weights(model().state_dict(), tmp_path)
    net, state = model(), model().state_dict()
    with pytest.raises(OSError, match="Input/output"):
        load_checkpoint_in_model(net, tmp_path)
    net.load_state_dict({"0.bias": state["0.bias"]}, strict=False)
    with pytest.raises(CheckpointError, match="partly loaded"):
        net(INPUTS)
    net.load_state_dict(state)
    assert torch.equal(net(INPUTS), model()(INPUTS))
    assert pickle.loads(pickle.dumps(net)).state_dict().keys() == state.keys()


def damaged(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 4),
    "overlap": lambda path: damaged(path, lambda header: header["2.bias"].update(header["2.weight"])),
    "gap": lambda path: damaged(path, lambda header: header.pop("2.bias")),
    "header larger than the file": lambda path: path.write_bytes((10**6).to_bytes(8, "little") + path.read_bytes()[8:]),
    "dtype": lambda path: damaged(path, lambda header: header["2.bias"].update(dtype="F16")),
    "dtype that torch lacks": lambda path: damaged(
        path, lambda header: header["2.bias"].update(dtype="F6_E2M3", shape=[0], data_offsets=[0, 0])
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"0": "cpu", "2": "disk"}])
def test_damage_in_the_last_file_is_found_before_anything_is_written(
    tmp_path: Path, damage: str, device_map: Any
) -> None:
    save_weights(model().state_dict(), tmp_path, 150)
    last = max(tmp_path.glob("*.safetensors"))
    DAMAGE[damage](last)
    net = model()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint_and_dispatch(net, tmp_path, device_map, offload_folder=tmp_path / "off")
    assert last.name in str(raised.value)
    assert all(torch.equal(tensor, before[name] + 1) for name, tensor in net.state_dict().items())


NUMBERS = st.integers(-2, 400) | st.integers(2**62, 2**64)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "I64", "BOOL", "F8_E4M3", "F4", "F99", ""]) | st.none(),
        "shape": st.lists(NUMBERS, max_size=3) | st.text(max_size=3),
        "data_offsets": st.lists(NUMBERS, max_size=3) | st.integers(),
    },
)
CHANGES = st.dictionaries(st.sampled_from(["0.weight", "0.bias", "2.weight", "2.bias", "new"]), ENTRIES, max_size=2)


@settings(max_examples=150, deadline=None)
@given(changes=CHANGES, dropped=st.sets(st.sampled_from(["0.bias", "2.weight"])), cut=st.integers(0, 40))
def test_a_damaged_header_is_a_typed_error_that_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], dropped: set[str], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    save_weights(model().state_dict(), folder)
    path = folder / "model.safetensors"

    def change(header: dict[str, Any]) -> None:
        for name, entry in changes.items():
            header[name] = {**header.get(name, {}), **entry}
        for name in dropped:
            header.pop(name)

    damaged(path, change)
    os.truncate(path, path.stat().st_size - cut)
    net, saved = model(), model().state_dict()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    error: Exception | None = None
    try:
        load_checkpoint_in_model(net, folder)
    except (CheckpointError, ShapeMismatch) as met:
        error = met
    written = all(torch.equal(tensor, saved[name]) for name, tensor in net.state_dict().items())
    if error is None:
        # Whatever was changed left the weights of the model as they were.
        assert written
        assert cut == 0
        assert not dropped
    else:
        assert str(path) in str(error)
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
