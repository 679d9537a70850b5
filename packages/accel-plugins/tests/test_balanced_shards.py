"""Who writes what in a sharded save: each tensor once, about as many bytes on each process, planned once a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accel_plugins.checkpoint.shard_metadata import read_metadata
from accel_plugins.checkpoint.shards import SavePlans, read_whole, write_shards
from accel_state import PartialState
from accel_state.errors import CheckpointError
from accel_testing.processes import Processes

ROWS = 64


def tensors(replicated: int) -> dict[str, Tensor]:
    """Three large tensors that are sharded, and some of different sizes that all processes hold."""
    sharded = {f"sharded.{index}": torch.arange(float(ROWS * 512)).reshape(ROWS, 512) + index for index in range(3)}
    whole = {f"whole.{index}": torch.full((ROWS * 32 * (1 + index % 5),), float(index)) for index in range(replicated)}
    return {**sharded, **whole}


def save_on_four(folder: str, replicated: int) -> list[int]:
    """How often the first process planned for all, after each of five saves: three alike, a new layout, the same."""
    process = PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (process.num_processes,))
    planned: list[int] = []
    real = default_planner.create_default_global_save_plan

    def counted(*given: Any, **options: Any) -> Any:
        planned.append(1)
        return real(*given, **options)

    default_planner.create_default_global_save_plan = counted
    try:
        plans, counts = SavePlans(), []
        for turn in range(5):
            state: dict[str, Any] = {}
            for name, value in tensors(replicated + (turn >= 3)).items():
                kind = Shard(0) if name.startswith("sharded") else Replicate()
                # Half of the replicated ones are plain tensors.
                plain = name.endswith(("1", "3"))
                state[name] = (
                    value + turn if plain and kind.is_replicate() else distribute_tensor(value + turn, mesh, [kind])
                )
            write_shards({"model": state}, Path(folder) / f"{turn}", plans)
            counts.append(len(planned))
    finally:
        default_planner.create_default_global_save_plan = real
    return counts


@pytest.mark.parametrize("replicated", [1, 30])
def test_four_processes_write_each_tensor_once_and_share_the_bytes(
    four: Processes, tmp_path: Path, replicated: int
) -> None:
    counts = four.run(save_on_four, str(tmp_path), replicated)
    assert counts == [[1, 1, 1, 2, 2], [0] * 5, [0] * 5, [0] * 5]
    for turn in range(5):
        folder = tmp_path / str(turn)
        metadata = read_metadata(folder / ".metadata")
        written: dict[str, int] = {}
        for place in (metadata.storage_data or {}).values():
            written[place.relative_path] = written.get(place.relative_path, 0) + place.length
        assert (len(written), len(metadata.storage_data or {})) == (4, 3 * 4 + replicated + (turn >= 3))
        if replicated > 1:
            # torch assigns what several processes hold before it counts the shards of the later ones.
            assert max(written.values()) <= 1.3 * sum(written.values()) / 4
        expected = {name: value + turn for name, value in tensors(replicated + (turn >= 3)).items()}
        found = read_whole(folder)["model"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def fail_once_on_four(folder: str) -> list[str]:
    """The first save fails on one process; the second is complete."""
    process = PartialState(cpu=True)
    plans, outcomes, real = SavePlans(), [], FileSystemWriter.write_data

    def failing(self: FileSystemWriter, *given: Any) -> Any:
        if process.process_index == 2:
            raise OSError("no space left")
        return real(self, *given)

    for turn in range(3):
        FileSystemWriter.write_data = failing if turn == 1 else real  # type: ignore[method-assign, assignment]
        try:
            write_shards({"model": tensors(3)}, Path(folder) / f"{turn}", plans)
            outcomes.append("saved")
        except BaseException as error:
            outcomes.append("failed" if "no space left" in str(error) else str(error))
    FileSystemWriter.write_data = real  # type: ignore[method-assign]
    return outcomes


def test_a_save_that_failed_is_planned_anew(four: Processes, tmp_path: Path) -> None:
    assert four.run(fail_once_on_four, str(tmp_path)) == [["saved", "failed", "saved"]] * 4
    found = read_whole(tmp_path / "2")["model"]
    assert all(torch.equal(found[name], value) for name, value in tensors(3).items())
    described: Metadata = read_metadata(tmp_path / "2" / ".metadata")
    assert all(isinstance(one, TensorStorageMetadata) for one in described.state_dict_metadata.values())


def other_dtypes_on_four(folder: str) -> None:
    """Two saves of one object, the second with its weights in another dtype."""
    PartialState(cpu=True)
    plans = SavePlans()
    for turn, dtype in enumerate((torch.bfloat16, torch.float64)):
        state = {name: value.to(dtype) for name, value in tensors(3).items()}
        write_shards({"model": state}, Path(folder) / f"{turn}", plans)


def test_weights_with_another_dtype_are_planned_anew(four: Processes, tmp_path: Path) -> None:
    four.run(other_dtypes_on_four, str(tmp_path))
    found = read_whole(tmp_path / "1")["model"]
    assert {value.dtype for value in found.values()} == {torch.float64}
    assert all(torch.equal(found[name], value.double()) for name, value in tensors(3).items())


def first_has_no_plans(folder: str) -> tuple[str, str]:
    """A process that lost its plans, as after an interrupt, refuses the others' empty ones; the next save works."""
    process, plans, outcomes = PartialState(cpu=True), SavePlans(), []
    write_shards({"model": tensors(3)}, Path(folder) / "0", plans)
    if process.is_main_process:
        plans.forget()
    for turn in (1, 2):
        try:
            write_shards({"model": tensors(3)}, Path(folder) / f"{turn}", plans)
            outcomes.append("saved")
        except CheckpointError as error:
            outcomes.append("refused" if "has no plans of an earlier save" in str(error) else str(error))
    return outcomes[0], outcomes[1]


def test_a_process_without_plans_does_not_take_the_empty_ones_of_others(four: Processes, tmp_path: Path) -> None:
    assert four.run(first_has_no_plans, str(tmp_path)) == [("refused", "saved")] * 4
    found = read_whole(tmp_path / "2")["model"]
    assert all(torch.equal(found[name], value) for name, value in tensors(3).items())
