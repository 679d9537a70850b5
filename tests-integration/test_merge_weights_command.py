"""`accel merge-weights` puts together what two processes saved through the Accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel.weight_files import load_weights
from accel_cli.main import main
from accel_testing.processes import Processes
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
    command = ["merge-weights", *flags, "--remove_checkpoint_dir", str(tmp_path / "state"), str(tmp_path / "out")]
    assert main(command) == 0
    torch.manual_seed(4)
    expected = nn.Linear(5, 3).state_dict()
    merged = load_weights(tmp_path / "out" / name)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert not (tmp_path / "state" / "pytorch_model_fsdp_0").exists()


def test_a_folder_without_shards_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", str(tmp_path), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "has no shards" in told
    assert "Traceback" not in told


def test_a_description_that_runs_code_is_refused(
    two: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two.run(save, str(tmp_path / "state"))
    description = tmp_path / "state" / "pytorch_model_fsdp_0" / ".metadata"
    description.write_bytes(code_in_a_field(f"os.mkdir({str(tmp_path / 'it ran')!r})"))
    code = main(["merge-weights", str(tmp_path / "state"), str(tmp_path / "out")])
    told = capsys.readouterr().err
    assert not (tmp_path / "it ran").exists()
    assert code == 2
    assert ".metadata is damaged or contains more than descriptions of tensors" in told
    assert "Traceback" not in told
