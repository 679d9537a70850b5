from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model, save_weights
from accel_state.errors import AccelError, CheckpointError, ShapeMismatch
from accel_state.process import PartialState
from accel_testing.processes import Processes


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, 12), nn.BatchNorm1d(12), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def reference() -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    model.norm.running_mean.normal_()
    return model


def sharded(empty: bool = False) -> Net:
    """A model whose parameters are spread over the processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    PartialState(cpu=True)
    torch.manual_seed(1)
    if empty:
        with init_empty_weights():
            model = Net().eval()
    else:
        model = Net().eval()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def same_as_reference(model: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    expected = reference().state_dict()
    found = whole(model)
    return found.keys() == expected.keys() and all(
        torch.equal(value, expected[name].to(dtype) if value.is_floating_point() else expected[name])
        and (value.dtype == dtype or not value.is_floating_point())
        for name, value in found.items()
    )


def into_shards(folder: str, elsewhere: str, empty: bool, dtype: torch.dtype | None) -> tuple[bool, list[str], bool]:
    model = sharded(empty)
    first = PartialState().is_main_process
    report = load_checkpoint_in_model(model, folder if first else elsewhere, dtype=dtype, strict=True)
    spread = all(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    return same_as_reference(model, dtype or torch.float32), report.missing + report.unexpected, spread


def bytes_of_shards(folder: str, how: str, empty: bool) -> tuple[bool, float]:
    """Whether a model that is sharded in some way loads as it was saved, and bytes read by bytes held."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    PartialState(cpu=True)
    torch.manual_seed(1)
    with init_empty_weights(include_buffers=True) if empty else nullcontext():
        model = wide()
    mesh = init_device_mesh("cpu", (2,))
    if how == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "fsdp by columns":
        from torch.distributed.tensor import Shard

        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    report = load_checkpoint_in_model(model, folder, strict=True)
    held = sum(getattr(t, "_local_tensor", t).nbytes for t in model.state_dict().values())
    expected = wide().state_dict()
    return all(torch.equal(value, expected[name]) for name, value in whole(model).items()), report.bytes_read / held


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 98), nn.ReLU(), nn.Linear(98, 51))


def packed(folder: str, elsewhere: str) -> bool:
    """Load a weight of which each process holds a slice of each half, as of packed projections."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    state = PartialState(cpu=True)
    rank, model = state.process_index, nn.Linear(8, 12)
    layout = {"shape": model.weight.shape, "stride": model.weight.stride(), "run_check": False}
    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(torch.zeros(6, 8), mesh, [_StridedShard(0, split_factor=2)], **layout)
    model.weight = nn.Parameter(shard)
    load_checkpoint_in_model(model, folder if state.is_main_process else elsewhere, strict=True)
    expected = reference().first
    slices = torch.cat([half.chunk(2)[rank] for half in expected.weight.chunk(2)])
    return torch.equal(model.weight.to_local(), slices) and torch.equal(model.bias, expected.bias)


def bytes_by_device_map(folder: str) -> tuple[list[str], int]:
    rank = PartialState(cpu=True).process_index
    with init_empty_weights():
        model = wide()
    own, other = ("0", "2") if rank == 0 else ("2", "0")
    report = load_checkpoint_in_model(model, folder, {own: "cpu", other: "meta"}, dtype=torch.bfloat16)
    return [name for name, tensor in model.named_parameters() if not tensor.is_meta], report.bytes_read


def parts_by_process(folder: str) -> bool:
    """Each process saves its own part and loads it again."""
    saved = sharded()
    load_checkpoint_in_model(saved, f"{folder}/whole")
    own = Path(folder) / f"{PartialState().process_index}.bin"
    torch.save(saved.state_dict(), own)
    model = sharded()
    load_checkpoint_in_model(model, own, full_state_dict=False)
    return same_as_reference(model)


def dispatched(folder: str) -> bool:
    model = load_checkpoint_and_dispatch(sharded(), folder, full_state_dict=True, broadcast_from_rank0=True)
    return same_as_reference(model)


def refused(folder: str, spread: bool, strict: bool, only_second: bool = False) -> str:
    PartialState(cpu=True)
    model = sharded() if spread else Net()
    before = {name: value.clone() for name, value in whole(model).items()}
    rank = PartialState().process_index
    where = f"{folder}/nowhere" if only_second and rank else folder
    try:
        load_checkpoint_in_model(
            model, where, strict=strict, broadcast_from_rank0=not spread, full_state_dict=not only_second
        )
    except AccelError as error:
        unchanged = all(torch.equal(value, before[name]) for name, value in whole(model).items())
        return f"{type(error).__name__} {unchanged} {error}"
    return "loaded"


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_spread_over_processes_come_from_the_first(
    two: Processes, tmp_path: Path, empty: bool, dtype: torch.dtype | None
) -> None:
    save_weights(reference().state_dict(), tmp_path, 300)
    nowhere = str(tmp_path / "nowhere")
    assert two.run(into_shards, str(tmp_path), nowhere, empty, dtype) == [(True, [], True)] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_shards_of_packed_weights_are_loaded(two: Processes, tmp_path: Path, shared: bool) -> None:
    save_weights(reference().first.state_dict(), tmp_path)
    assert two.run(packed, str(tmp_path), str(tmp_path if shared else tmp_path / "nowhere")) == [True, True]


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("how", ["fsdp", "fsdp by columns", "tp"])
def test_each_process_reads_its_own_shards_of_a_checkpoint(
    two: Processes, tmp_path: Path, how: str, safe: bool, empty: bool
) -> None:
    save_weights(wide().state_dict(), tmp_path, "20KB", safe)
    for same, read_by_held in two.run(bytes_of_shards, str(tmp_path), how, empty):
        assert same
        assert 0.99 < read_by_held <= 1.05


def test_each_process_reads_what_its_device_map_places(two: Processes, tmp_path: Path) -> None:
    save_weights(wide().state_dict(), tmp_path)
    assert two.run(bytes_by_device_map, str(tmp_path)) == [
        (["0.weight", "0.bias"], 4 * 98 * 65),
        (["2.weight", "2.bias"], 4 * 51 * 99),
    ]


def differing(folder: str) -> str:
    model, rank = sharded(), PartialState().process_index
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint_in_model(model, f"{folder}/{rank}")
    return str(raised.value)


def test_processes_that_see_different_files_do_not_load_them(two: Processes, tmp_path: Path) -> None:
    save_weights(reference().state_dict(), tmp_path / "0")
    save_weights(reference().state_dict(), tmp_path / "1", 300)
    for message in two.run(differing, str(tmp_path)):
        assert "The files that process 1 sees differ from those of process 0" in message


def test_each_process_loads_the_part_it_saved(two: Processes, tmp_path: Path) -> None:
    save_weights(reference().state_dict(), tmp_path / "whole")
    assert two.run(parts_by_process, str(tmp_path)) == [True, True]


def test_dispatching_without_a_map_only_loads(two: Processes, tmp_path: Path) -> None:
    save_weights(reference().state_dict(), tmp_path)
    assert two.run(dispatched, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("what", ["names", "shapes", "damage"])
def test_what_cannot_be_loaded_is_an_error_on_every_process_and_changes_nothing(
    two: Processes, tmp_path: Path, spread: bool, what: str
) -> None:
    state = (Net(width=4) if what == "shapes" else reference()).state_dict()
    if what == "names":
        del state["last.bias"]
    save_weights(state, tmp_path)
    if what == "damage":
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
    kind = ShapeMismatch if what == "shapes" else CheckpointError
    words = {
        "names": "Missing: last.bias",
        "shapes": "The file has shape (12, 4)",
        "damage": "incomplete metadata, file not fully covered",
    }[what]
    for message in two.run(refused, str(tmp_path), spread, True):
        assert message.startswith(f"{kind.__name__} True ")
        assert words in message


def test_an_error_of_one_process_that_reads_its_own_part_reaches_all(two: Processes, tmp_path: Path) -> None:
    save_weights(reference().state_dict(), tmp_path)
    first, second = two.run(refused, str(tmp_path), True, False, True)
    assert "nowhere" in second
    assert first.replace("Process 1 failed: ", "") == second


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which would end a process of these tests."""


FAILURES: dict[str, type[BaseException]] = {
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
    "Interrupted": Interrupted,
}


def failed_on_one(folder: str, spread: bool, stage: str, rank: int, kind: str) -> str:
    """What a process raises when loading fails on one of them, and whether all can go on together."""
    from accel_bigmodel import load_together, loading
    from accel_ops.collectives import gather

    PartialState(cpu=True)
    model = sharded() if spread else Net()

    def fail(*args: object, **kwargs: object) -> object:
        raise FAILURES[kind]("at this point")

    owner, name = {
        "find": (load_together, "find_weights"),
        "read": (load_together if spread else loading, "copy_all"),
        "allocate": (loading.Loading, "bring"),
        "convert": (nn.Module, "to"),
    }[stage]
    original = getattr(owner, name)
    if PartialState().process_index == rank:
        setattr(owner, name, fail)
    try:
        load_checkpoint_in_model(
            model, folder, dtype=torch.float64, strict=True, broadcast_from_rank0=not spread, full_state_dict=True
        )
        said = "loaded"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        setattr(owner, name, original)
    assert gather(torch.tensor([PartialState().process_index])).tolist() == [0, 1]
    if stage != "find":
        # A part may have been written on any process, so all refuse to use it.
        for use in (lambda: model(torch.ones(1, 8)), model.state_dict):
            with pytest.raises(CheckpointError, match="partly loaded"):
                use()
    return said


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize(
    ("spread", "stage", "rank"),
    [
        (False, "find", 0),
        (False, "read", 0),
        (False, "allocate", 0),
        (False, "allocate", 1),
        (True, "find", 0),
        (True, "read", 0),
        (True, "read", 1),
        (True, "convert", 1),
    ],
)
def test_whatever_fails_on_one_process_while_loading_is_raised_on_all(
    two: Processes, tmp_path: Path, spread: bool, stage: str, rank: int, kind: str
) -> None:
    save_weights(reference().state_dict(), tmp_path)
    said = two.run(failed_on_one, str(tmp_path), spread, stage, rank, kind)
    assert said[rank].startswith(f"{kind}: at this point")
    assert said[1 - rank].startswith(("CheckpointError: ", "ShapeMismatch: "))
    assert f"{kind}: at this point" in said[1 - rank]
