"""Files of tensors are read into memory that is there, and give what torch itself would read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_bigmodel.weight_files import save_weights_file
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.parts import read_part, read_weights, with_own_memory, write_part
from accel_plugins.manifest import ObjectKind
from accel_state.errors import CheckpointError


def stepped(width: int = 4, seed: int = 0) -> tuple[nn.Module, torch.optim.Adam]:
    """A model with a layer of images, and an optimizer that has stepped."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, width), nn.BatchNorm1d(width))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(8, 2, 3, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return (first.dtype, first.stride()) == (second.dtype, second.stride()) and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.parametrize("safe", [True, False])
def test_weights_and_moments_stay_where_they_are(tmp_path: Path, safe: bool) -> None:
    model, optimizer = stepped()
    write_part(ObjectKind.MODEL, model.state_dict(), tmp_path, 0, safe_serialization=safe)
    write_part(ObjectKind.OPTIMIZER, optimizer.state_dict(), tmp_path, 0)
    expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, stale = stepped(seed=1)
    places = [value.data_ptr() for value in (*other.state_dict().values(), *moments(stale))]

    read_part(ObjectKind.MODEL, other, tmp_path, 0)
    read_part(ObjectKind.OPTIMIZER, stale, tmp_path, 0, models=[other])

    assert same(dict(other.state_dict()), dict(expected[0]))
    assert same(stale.state_dict(), expected[1])
    assert [value.data_ptr() for value in (*other.state_dict().values(), *moments(stale))] == places


def test_an_optimizer_that_has_not_stepped_gets_memory_that_no_file_is_under(tmp_path: Path) -> None:
    _, optimizer = stepped()
    write_part(ObjectKind.OPTIMIZER, optimizer.state_dict(), tmp_path, 0)
    fresh = torch.optim.Adam(stepped(seed=1)[0].parameters())
    read_part(ObjectKind.OPTIMIZER, fresh, tmp_path, 0)
    (tmp_path / "optimizer.bin").write_bytes(b"")

    assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_gradient_that_needs_what_was_there_before_is_refused(tmp_path: Path) -> None:
    model, _ = stepped()
    write_part(ObjectKind.MODEL, model.state_dict(), tmp_path, 0)
    loss = model(torch.randn(8, 2, 3, 3)).sum()
    read_part(ObjectKind.MODEL, model, tmp_path, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_state_of_another_optimizer_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = stepped()
    groups = [{"params": list(model[0].parameters())}, {"params": [*model[2].parameters(), *model[3].parameters()]}]
    write_part(ObjectKind.OPTIMIZER, torch.optim.Adam(groups).state_dict(), tmp_path, 0)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="different number of parameter groups"):
        read_part(ObjectKind.OPTIMIZER, optimizer, tmp_path, 0)
    assert same(optimizer.state_dict(), before)


def test_other_dtypes_and_shapes_are_torchs_to_convert_or_refuse(tmp_path: Path) -> None:
    model, optimizer = stepped()
    write_part(ObjectKind.MODEL, {name: value.double() for name, value in model.state_dict().items()}, tmp_path, 0)
    state = optimizer.state_dict()
    for moment in state["state"].values():
        moment["exp_avg"] = moment["exp_avg"].half()
    write_part(ObjectKind.OPTIMIZER, state, tmp_path, 0)
    other, stale = stepped(seed=1)
    read_part(ObjectKind.MODEL, other, tmp_path, 0)
    read_part(ObjectKind.OPTIMIZER, stale, tmp_path, 0)

    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert all(value.dtype == torch.float32 for value in moments(stale))
    assert torch.equal(moments(stale)[1], moments(optimizer)[1].half().float())
    with pytest.raises(CheckpointError, match=r"Other shapes: .* and not \("):
        read_part(ObjectKind.MODEL, stepped(width=5)[0], tmp_path, 0)


def test_weights_that_are_tied_here_and_not_in_the_file_are_as_torch_loads_them(tmp_path: Path) -> None:
    weights = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "1.weight": torch.zeros(2, 2)}
    save_weights_file({**weights, "1.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    found, expected = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    for tied in (found, expected):
        tied[1].weight = tied[0].weight
    expected.load_state_dict({**weights, "1.bias": torch.ones(2)})
    read_part(ObjectKind.MODEL, found, tmp_path, 0)
    assert same(dict(found.state_dict()), dict(expected.state_dict()))


def test_tensors_under_several_names_stay_one(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    saved = {"all": base, "twice": [base, (base[2:6], base.view(3, 4).t())], "none": torch.empty(0, 3), "n": 3}
    torch.save(saved, tmp_path / "a")
    mapped = pickled.read(tmp_path / "a", mapped=True)
    found = with_own_memory(mapped, {"all": torch.zeros(12), "twice": [torch.zeros(12)]})
    assert same(found, saved)
    found["all"].fill_(7)
    assert found["twice"][1][1].unique().tolist() == [7.0]
    assert torch.load(tmp_path / "a", weights_only=True)["all"][0] == 0


KINDS = {
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "a number": torch.tensor(5),
    "a parameter": nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "complex": torch.ones(2, dtype=torch.complex64).conj(),
    "expanded": torch.ones(1).expand(4),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("zipped", [True, False])
def test_every_kind_of_tensor_is_read_as_torch_reads_it(tmp_path: Path, name: str, zipped: bool) -> None:
    torch.save({"a": KINDS[name], "b": torch.ones(5)}, tmp_path / "a", _use_new_zipfile_serialization=zipped)
    expected = torch.load(tmp_path / "a", weights_only=True)
    mapped = pickled.read(tmp_path / "a", mapped=True)
    found = with_own_memory(mapped, {"a": torch.empty_like(KINDS[name]), "b": torch.zeros(5)})

    assert type(found["a"]) is type(expected["a"])
    assert found["a"].layout == expected["a"].layout
    assert torch.equal(found["a"].to_dense(), expected["a"].to_dense())
    assert torch.equal(found["b"], torch.ones(5))


def test_weights_and_a_state_are_read_into_given_memory(tmp_path: Path) -> None:
    saved = {name: torch.randn(size) for name, size in zip("abcde", (1, 16, 17, 100, 333), strict=True)}
    save_weights_file(saved, tmp_path / "a.safetensors")
    pickled.write(saved, tmp_path / "a")
    own = {name: torch.zeros_like(value) for name, value in saved.items()}
    assert same(dict(sorted(read_weights(tmp_path / "a.safetensors", own).items())), saved)
    assert same(own, saved)
    assert same(with_own_memory(pickled.read(tmp_path / "a", mapped=True), {}), saved)


def mapped_bytes() -> int:
    """Memory of this process that is of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssFile:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="The system does not tell it.")
@pytest.mark.parametrize("stepped_before", [True, False])
def test_a_state_that_was_read_takes_no_memory_besides_its_own(tmp_path: Path, stepped_before: bool) -> None:
    saved = {number: torch.full((1 << 20,), float(number)) for number in range(8)}
    pickled.write(saved, tmp_path / "a")
    own = {number: torch.zeros(1 << 20) for number in saved} if stepped_before else {}
    mapped = pickled.read(tmp_path / "a", mapped=True)
    kept = list(mapped.values())
    before = mapped_bytes()
    found = with_own_memory(mapped, own)

    assert mapped_bytes() - before < 4 << 20
    assert same(found, saved)
    # What is still mapped is as it was.
    assert same(kept, list(saved.values()))
    assert mapped_bytes() - before > 24 << 20
