"""No file of a checkpoint can run code when it is loaded, whichever of them is replaced by a pickle that would."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


class Counter:
    """A registered object."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def made(backend: str = "single") -> Accelerator:
    """A run; "alone" is one without a scaler of the loss."""
    fsdp: dict[str, Any] = {}
    if backend.endswith("DICT"):
        fsdp["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=backend)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16" if backend == "single" else "no",
        project_config=ProjectConfiguration(fsync=False),
        **fsdp,
    )
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    parts = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(range(4)))
    accelerator._dataloaders.append(loader)
    accelerator.register_for_checkpointing(Counter())
    accelerator.backward(parts[0](torch.ones(1, 3)).sum())
    parts[1].step()
    return accelerator


def save(folder: str, backend: str, safe: bool) -> None:
    made(backend).save_state(folder, safe_serialization=safe)


def attacks(marker: Path) -> Iterator[bytes]:
    """The payload as a plain pickle and as torch writes it."""
    yield pickle.dumps(Payload(marker))
    buffer = io.BytesIO()
    torch.save({"state": Payload(marker)}, buffer)
    yield buffer.getvalue()


def refused(folder: str, backend: str, names: list[str]) -> list[str]:
    """The files whose replacement was not refused, or did harm."""
    wrong = []
    marker = Path(folder).with_name("it ran")
    for name in names:
        path = Path(folder, name)
        content = path.read_bytes()
        for attack in attacks(marker):
            path.write_bytes(attack)
            try:
                made(backend).load_state(folder)
                wrong.append(f"{name} was accepted")
            except CheckpointError:
                pass
            if marker.exists():
                wrong.append(f"{name} ran")
                marker.rmdir()
        path.write_bytes(content)
    made(backend).load_state(folder)
    return wrong


def files_of(folder: Path) -> list[str]:
    (folder / MANIFEST_NAME).unlink()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("safe", "count"), [(True, 7), (False, 7)])
def test_plain_files(tmp_path: Path, safe: bool, count: int) -> None:
    with fresh():
        save(str(tmp_path / "a"), "single", safe)
        names = files_of(tmp_path / "a")
        assert len(names) == count
        assert refused(str(tmp_path / "a"), "single", names) == []


@pytest.mark.parametrize("backend", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("reader", ["same", "alone"])
def test_files_of_sharded_models(one: Processes, tmp_path: Path, backend: str, reader: str) -> None:
    one.run(save, str(tmp_path / "a"), backend, True)
    names = files_of(tmp_path / "a")
    assert len([name for name in names if "/" in name]) == (4 if backend.startswith("SHARDED") else 0)
    relevant = [name for name in names if "/" in name or name.startswith(("pytorch_model_fsdp", "optimizer"))]
    assert one.run(refused, str(tmp_path / "a"), backend if reader == "same" else reader, relevant) == [[]]


def test_a_pickle_of_ones_own_is_read_when_that_is_asked_for_by_name(tmp_path: Path) -> None:
    with fresh():
        made().save_state(str(tmp_path / "a"))
        (tmp_path / "a" / MANIFEST_NAME).unlink()
        torch.save(Payload(tmp_path / "it ran"), tmp_path / "a" / "custom_checkpoint_0.pkl")
        with pytest.raises(CheckpointError, match="weights_only"):
            made().load_state(str(tmp_path / "a"))
        assert not (tmp_path / "it ran").exists()
        made().load_state(str(tmp_path / "a"), weights_only=False)
    assert (tmp_path / "it ran").exists()


def described_by_code(marker: Path) -> bytes:
    """A `.metadata` of names in the module that describes tensors: its `dataclass` runs what a field is called."""
    name = f"a:os.mkdir({str(marker)!r})"
    metadata = "torch.distributed.checkpoint.metadata"

    def named(text: str) -> bytes:
        return pickle.GLOBAL + f"{metadata}\n{text}\n".encode()

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()

    def pairs(**values: bytes) -> bytes:
        return pickle.EMPTY_DICT + pickle.MARK + b"".join(text(k) + v for k, v in values.items()) + pickle.SETITEMS

    hidden = pairs(init=pickle.NEWFALSE, repr=pickle.NEWFALSE, compare=pickle.NEWFALSE)
    field = named("field") + pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.NONE + hidden + pickle.TUPLE2 + pickle.BUILD
    changed = pairs(**{"__annotations__": pairs(**{name: text("int")}), name: field})
    changed_class = named("BytesStorageMetadata") + pickle.NONE + changed + pickle.TUPLE2 + pickle.BUILD
    return pickle.PROTO + b"\x04" + named("dataclass") + changed_class + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP


def loaded_from_shards(folder: str, marker: str) -> str:
    """What a load says of a checkpoint whose description runs code, and of one whose descriptions of ranks do."""
    shards = Path(folder, "pytorch_model_fsdp_0", ".metadata")
    good = shards.read_bytes()
    found = []
    for whole, of_rank in ((described_by_code(Path(marker)), None), (b"", described_by_code(Path(marker)))):
        shards.write_bytes(whole)
        if of_rank is not None:
            shards.with_name("__0.metadata").write_bytes(of_rank)
        with pytest.raises(CheckpointError, match="metadata") as refusal:
            made("SHARDED_STATE_DICT").load_state(folder)
        found.append(str(refusal.value))
    shards.write_bytes(good)
    made("SHARDED_STATE_DICT").load_state(folder)
    return "\n".join(found)


def test_a_description_of_tensors_runs_no_code(one: Processes, tmp_path: Path) -> None:
    one.run(save, str(tmp_path / "a"), "SHARDED_STATE_DICT", True)
    (tmp_path / "a" / MANIFEST_NAME).unlink()
    told = one.run(loaded_from_shards, str(tmp_path / "a"), str(tmp_path / "it ran"))[0]
    assert not (tmp_path / "it ran").exists()
    assert "torch.distributed.checkpoint.metadata.dataclass" in told
