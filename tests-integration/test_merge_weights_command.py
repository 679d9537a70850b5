"""`accel merge-weights` puts together what two processes saved through the Accelerator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel.weight_files import load_weights
from accel_testing.processes import Processes, run_command
from accel_torch import Accelerator, FullyShardedDataParallelPlugin
from injected.reading import code_in_a_field


def save(folder: str) -> None:
    plugin = FullyShardedDataParallelPlugin(2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(4)
    accelerator.prepare(nn.Linear(5, 3))
    accelerator.save_state(folder)


@pytest.mark.parametrize(
    ("flags", "name"), [([], "model.safetensors"), (["--unsafe-serialization"], "pytorch_model.bin")]
)
def test_shards_become_one_file(two: Processes, tmp_path: Path, flags: list[str], name: str) -> None:
    two.run(save, str(tmp_path / "state"))
    command = [sys.executable, "-m", "accel_cli.main", "merge-weights", *flags, "--remove_checkpoint_dir"]
    done = run_command([*command, str(tmp_path / "state"), str(tmp_path / "out")])
    assert done.returncode == 0, done.stderr
    torch.manual_seed(4)
    expected = nn.Linear(5, 3).state_dict()
    merged = load_weights(tmp_path / "out" / name)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert not (tmp_path / "state" / "pytorch_model_fsdp_0").exists()


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accel_cli.main", "merge-weights", str(tmp_path), str(tmp_path / "out")]
    done = run_command(command)
    assert done.returncode == 2
    assert "has no shards" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_description_that_runs_code_is_refused(two: Processes, tmp_path: Path) -> None:
    two.run(save, str(tmp_path / "state"))
    description = tmp_path / "state" / "pytorch_model_fsdp_0" / ".metadata"
    description.write_bytes(code_in_a_field(f"os.mkdir({str(tmp_path / 'it ran')!r})"))
    command = [sys.executable, "-m", "accel_cli.main", "merge-weights", str(tmp_path / "state"), str(tmp_path / "out")]
    done = run_command(command)
    assert not (tmp_path / "it ran").exists()
    assert done.returncode == 2
    assert ".metadata is damaged or contains more than descriptions of tensors" in done.stderr
    assert "Traceback" not in done.stderr
