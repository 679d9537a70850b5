from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    save_weights,
)
from accel_state.errors import CheckpointError, Missing, SettingError, ShapeMismatch
from accel_testing.processes import Processes


class Net(nn.Module):
    def __init__(self, tie: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.middle = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.middle(self.embed(ids))))


IDS = torch.tensor([1, 2, 3])


def saved(folder: Path, size: int | str = "10GB", safe: bool = True, tie: bool = False) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    model = Net(tie).eval()
    save_weights(model.state_dict(), folder, size, safe)
    with torch.no_grad():
        return model, model(IDS)


def empty(tie: bool = False) -> Net:
    with init_empty_weights():
        return Net(tie).eval()


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", 300])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, "auto"])
def test_checkpoints_load_into_empty_models(
    tmp_path: Path, safe: bool, size: int | str, tie: bool, device_map: Any
) -> None:
    _, expected = saved(tmp_path, size, safe, tie)
    model = load_checkpoint_and_dispatch(empty(tie), tmp_path, device_map, {"cpu": "1GB"}, strict=True)
    assert torch.equal(output(model), expected)
    assert not tie or model.head.weight is model.embed.weight


def test_weights_that_only_the_model_has_are_offloaded_with_those_of_the_checkpoint(tmp_path: Path) -> None:
    model, expected = saved(tmp_path / "whole")
    weights = {name: weight for name, weight in model.state_dict().items() if not name.startswith("head")}
    save_weights(weights, tmp_path / "checkpoint")
    load_checkpoint_and_dispatch(model, tmp_path / "checkpoint", {"": "disk"}, offload_folder=tmp_path / "offloaded")
    assert model.head.weight.is_meta
    assert torch.equal(output(model), expected)


def mapped_from(tensor: torch.Tensor) -> str | None:
    """The file that a tensor's memory is mapped from, None if from none, "" where the system does not tell."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else None
    return None if maps.exists() else ""


def test_weights_are_mapped_not_copied(tmp_path: Path) -> None:
    saved(tmp_path)
    model = empty()
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    assert mapped_from(model.head.weight) in ("", str(tmp_path / "model.safetensors"))
    with torch.no_grad():
        model.head.weight.zero_()
    again = empty()
    load_checkpoint_in_model(again, tmp_path, {"": "cpu"})
    assert again.head.weight.abs().sum() > 0


PEAK = """
import resource, sys, torch
from accel_bigmodel import init_empty_weights, load_checkpoint_in_model
folder, how, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
make = lambda: torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(layers)))
with init_empty_weights():
    model = make()
# What the first load imports and the threads of torch take is not memory of the load.
load_checkpoint_in_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), folder + "/small", dtype=torch.bfloat16)
before = peak()
if how == "in place":
    model = make().to_empty(device="cpu")
load_checkpoint_in_model(model, folder + "/large", dtype=torch.bfloat16 if how == "bf16" else None)
print(peak() - before - sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is counted in other units elsewhere")
@pytest.mark.parametrize("how", ["in place", "bf16"])
def test_loading_100_mb_takes_at_most_64_mb_beside_the_weights(tmp_path: Path, how: str) -> None:
    save_weights(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path / "small")
    large = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    save_weights(large.state_dict(), tmp_path / "large", "60MB")
    command = [sys.executable, "-c", PEAK, str(tmp_path), how, "6"]
    beside = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert beside < 64e6


def test_a_model_with_memory_is_filled_in_place(tmp_path: Path) -> None:
    _, expected = saved(tmp_path)
    model = Net().eval()
    weight, address = model.head.weight, model.head.weight.data_ptr()
    report = load_checkpoint_in_model(model, tmp_path)
    assert model.head.weight is weight
    assert weight.data_ptr() == address
    assert torch.equal(output(model), expected)
    assert (report.missing, report.unexpected) == ([], [])


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64, "float64"])
def test_parts_stay_on_the_disk(tmp_path: Path, safe: bool, dtype: Any) -> None:
    _, expected = saved(tmp_path / "weights", 300, safe)
    device_map = {"embed": "cpu", "middle": "disk", "norm": "cpu", "head": "disk"}
    off = tmp_path / "off"
    model = load_checkpoint_and_dispatch(empty(), tmp_path / "weights", device_map, offload_folder=off, dtype=dtype)
    for _ in range(3):
        assert torch.allclose(output(model).float(), expected, atol=1e-6)
        assert model.head.weight.is_meta
    assert sorted(path.name for path in off.iterdir()) == (
        ["index.json"] if safe else ["head.weight.dat", "index.json", "middle.bias.dat", "middle.weight.dat"]
    )
    if safe:
        assert json.loads((off / "index.json").read_text())["head.weight"]["weight_name"] == "head.weight"


def test_dtypes_are_converted_and_some_parts_kept(tmp_path: Path) -> None:
    saved(tmp_path)
    model = empty()
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["norm"])
    assert model.head.weight.dtype == torch.float16
    assert model.norm.weight.dtype == torch.float32
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_buffers_for_the_disk_are_loaded_unless_they_are_offloaded(tmp_path: Path) -> None:
    saved(tmp_path / "w")
    for offload_buffers in (False, True):
        model = empty()
        load_checkpoint_in_model(
            model, tmp_path / "w", {"": "cpu", "norm": "disk"}, tmp_path / "off", offload_buffers=offload_buffers
        )
        assert model.norm.running_mean.is_meta == offload_buffers


def test_names_that_do_not_agree_are_reported_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = saved(tmp_path)
    state = model.state_dict()
    state["extra"] = state.pop("head.weight")
    save_weights(state, tmp_path)
    report = load_checkpoint_in_model(Net(), tmp_path)
    assert (report.missing, report.unexpected) == (["head.weight"], ["extra"])
    assert "does not have: head.weight" in caplog.text
    assert "were not used when loading Net: extra." in caplog.text
    fresh = Net()
    before = fresh.embed.weight.clone()
    with pytest.raises(CheckpointError, match=r"Missing: head\.weight\. Unexpected: extra\. Nothing was loaded"):
        load_checkpoint_in_model(fresh, tmp_path, strict=True)
    assert torch.equal(fresh.embed.weight, before)


@pytest.mark.parametrize("safe", [True, False])
def test_a_shape_that_does_not_fit_changes_nothing(tmp_path: Path, safe: bool) -> None:
    saved(tmp_path, 300, safe)
    model = Net(width=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ShapeMismatch, match=r"The file has shape \(10, 8\), the model \(10, 4\)"):
        load_checkpoint_in_model(model, tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(SettingError, match="no such file"):
        load_checkpoint_in_model(Net(), tmp_path / "missing")
    with pytest.raises(SettingError, match="'atuo'"):
        load_checkpoint_and_dispatch(Net(), tmp_path, device_map="atuo")
    with pytest.raises(SettingError, match="Cannot load parts of Net to the disk"):
        load_checkpoint_in_model(Net(), tmp_path, {"": "cpu", "head": "disk"})
    with pytest.warns(UserWarning, match=": haed"), pytest.raises(SettingError, match="no device for: "):
        load_checkpoint_in_model(Net(), tmp_path, {"haed": "cpu"})
    with pytest.raises(SettingError, match="broadcast_from_rank0"):
        load_checkpoint_in_model(Net(), tmp_path, {"": "cpu"}, broadcast_from_rank0=True)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("unknown", ["cpu", "disk"])
def test_names_of_a_device_map_that_the_model_lacks_are_ignored(tmp_path: Path, safe: bool, unknown: str) -> None:
    _, expected = saved(tmp_path / "a", safe=safe)
    rest = {"embed": "cpu", "middle": "cpu", "norm": "cpu", "head": "cpu"}
    # No folder is needed: no weight of the model is for the disk.
    with pytest.warns(UserWarning, match=r"of Net: lm_head\. They are ignored"):
        model = load_checkpoint_and_dispatch(empty(), tmp_path / "a", {**rest, "lm_head": unknown}, force_hooks=True)
    assert torch.equal(output(model), expected)
    with pytest.warns(UserWarning, match=r"of Net: lm_head\. They are ignored"):
        load_checkpoint_in_model(plain := empty(), tmp_path / "a", {**rest, "lm_head": unknown})
    assert torch.equal(output(plain), expected)
    with pytest.warns(UserWarning, match=r"of Net: lm_head\. They are ignored"):
        model = load_checkpoint_and_dispatch(
            empty(), tmp_path / "a", {**rest, "head": "disk", "lm_head": unknown}, offload_folder=tmp_path / "off"
        )
    assert torch.equal(output(model), expected)


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_model_that_would_lack_weights_is_not_dispatched(tmp_path: Path, device: str) -> None:
    model, _ = saved(tmp_path)
    state = model.state_dict()
    del state["head.weight"]
    save_weights(state, tmp_path)
    device_map = {"": "cpu", "head": device}
    with pytest.raises(
        CheckpointError, match=r"1 of its weights are missing there and stay on the meta device: head\.weight"
    ):
        load_checkpoint_and_dispatch(empty(), tmp_path, device_map, offload_folder=tmp_path / "off")
    assert torch.isfinite(output(load_checkpoint_and_dispatch(Net().eval(), tmp_path, {"": "cpu"}))).all()


@pytest.mark.parametrize("damage", ["truncated", "climbs out", "lost file", "no index"])
def test_a_damaged_checkpoint_leaves_the_model_as_it_was(tmp_path: Path, damage: str) -> None:
    model, expected = saved(tmp_path, 300)
    index, shard = tmp_path / "model.safetensors.index.json", tmp_path / "model-00002-of-00004.safetensors"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-4])
    elif damage == "climbs out":
        index.write_text(index.read_text().replace(shard.name, f"../{shard.name}"))
    elif damage == "lost file":
        shard.unlink()
    else:
        index.write_text("{")
    fresh = Net().eval()
    fresh.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError) as error:
        load_checkpoint_and_dispatch(fresh, tmp_path, {"": "cpu", "head": "disk"}, offload_folder=tmp_path / "off")
    assert (shard.name if damage in ("truncated", "lost file") else index.name) in str(error.value)
    assert torch.equal(output(fresh), expected)
    assert not (tmp_path / "off").exists()


def test_a_disk_that_is_full_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    torch.manual_seed(0)
    model = Net(width=64).eval()
    expected = output(model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"Cannot offload 'middle\.weight' \(16384 bytes\)"):
            dispatch_model(model, {"": "cpu", "middle": "disk"}, offload_dir=tmp_path)
        with pytest.raises(CheckpointError, match=r"free space"):
            disk_offload(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert torch.equal(output(model), expected)


def test_a_name_on_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = saved(tmp_path / "repo", safe=False)
    asked: list[Any] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns[0]))
        if name == "org/gone":
            raise OSError("404")
        return str(tmp_path / "repo")

    hub: Any = ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    model = empty()
    load_checkpoint_in_model(model, "org/name")
    assert torch.equal(output(model), expected)
    assert asked == [("org/name", "*.safetensors"), ("org/name", "*.bin")]
    with pytest.raises(SettingError, match="404"):
        load_checkpoint_in_model(empty(), "org/gone")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Missing, match="huggingface"):
        load_checkpoint_in_model(empty(), "org/name")


def from_the_first(folder: str, elsewhere: str, meta: bool) -> list[float]:
    from accel_state.process import PartialState

    state = PartialState(cpu=True)
    model = empty() if meta else Net().eval()
    load_checkpoint_in_model(
        model, folder if state.is_main_process else elsewhere, broadcast_from_rank0=True, strict=True
    )
    return output(model).flatten().tolist()  # type: ignore[no-any-return]


def missing_everywhere(folder: str) -> str:
    from accel_state.process import PartialState

    PartialState(cpu=True)
    try:
        load_checkpoint_in_model(Net(), folder, broadcast_from_rank0=True)
    except SettingError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("meta", [True, False])
def test_only_the_first_process_reads(two: Processes, tmp_path: Path, meta: bool) -> None:
    _, expected = saved(tmp_path / "w", 300)
    results = two.run(from_the_first, str(tmp_path / "w"), str(tmp_path / "nothing"), meta)
    assert results == [expected.flatten().tolist()] * 2


def test_what_the_first_process_meets_every_process_raises(two: Processes, tmp_path: Path) -> None:
    first, second = two.run(missing_everywhere, str(tmp_path / "nothing"))
    assert second.replace("Process 0 failed: ", "") == first
    assert "no such file" in first


class TiedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))  # type: ignore[no-any-return]


def test_a_tied_weight_stays_on_the_disk_under_both_names(tmp_path: Path) -> None:
    whole, ids = TiedLayers(), torch.arange(4)
    expected = whole(ids)
    save_weights({"embedding.weight": whole.embedding.weight}, tmp_path)
    with init_empty_weights():
        model = TiedLayers()
    model.head.weight = model.embedding.weight
    folder = tmp_path / "offload"
    loaded = load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "disk"}, offload_folder=folder)
    assert torch.equal(loaded(ids), expected)
    assert torch.equal(disk_offload(whole, folder)(ids), expected)
