"""Rows 65 and 67 of reference/seeds_vs_peer.md, and that no row is without a test."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_state.errors import Missing
from accel_state.settings.installed import importable
from accel_testing.processes import run_command
from accelerate import BnbQuantizationConfig, init_empty_weights
from accelerate.utils import load_and_quantize_model

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)
NAMED = re.compile(r"^def test_rows?_(\d+(?:_to_\d+)?(?:_and_\d+(?:_to_\d+)?)*)_", re.MULTILINE)


def covered(name: str) -> set[int]:
    """The numbers in a name such as `10_and_13_to_22`."""
    numbers: set[int] = set()
    for part in name.split("_and_"):
        first, _, last = part.partition("_to_")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def test_every_row_is_covered() -> None:
    rows = {
        int(number) for number in ROW.findall((HERE / "reference" / "seeds_vs_peer.md").read_text(encoding="utf-8"))
    }
    texts = [path.read_text(encoding="utf-8") for path in HERE.glob("test_seeds_rows_*.py")]
    names = [name for text in texts for name in NAMED.findall(text)]
    assert rows == set(range(1, 71))
    assert rows - {number for name in names for number in covered(name)} == set()


def test_row_65_quantised_while_it_is_loaded(tmp_path: Path) -> None:
    config = BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        skip_modules=["1"],
    )
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)).state_dict(), tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    if not importable("bitsandbytes"):
        with pytest.raises(Missing, match="bitsandbytes"):
            load_and_quantize_model(model, config, weights_location=tmp_path, device_map={"": "cpu"})
        return
    quantised = load_and_quantize_model(model, config, weights_location=tmp_path, device_map={"": "cpu"})
    assert type(quantised[0]).__name__ == "Linear4bit"
    assert quantised(torch.ones(1, 64, dtype=torch.bfloat16)).shape == (1, 2)


SCRIPT = "import os, sys; os.write(1, f\"{os.environ['WORLD_SIZE']} {sys.argv[1:]} \".encode())"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_row_67_configured_once_and_launched_without_options(elsewhere: bool, tmp_path: Path) -> None:
    script, file = tmp_path / "script.py", tmp_path / "home" / "accelerate" / "default_config.yaml"
    script.write_text(SCRIPT, encoding="utf-8")
    place = ["--config_file", str(tmp_path / "elsewhere.yaml")] if elsewhere else []
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    environment = {"HF_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path)}
    made = run_command([*command, "config", *place, "default"], env=environment)
    assert made.returncode == 0, made.stderr
    written = tmp_path / "elsewhere.yaml" if elsewhere else file
    text = written.read_text(encoding="utf-8")
    assert file.exists() is not elsewhere
    for key, value in (("num_processes", "2"), ("use_cpu", "true"), ("distributed_type", "MULTI_CPU")):
        text = re.sub(f"{key}: .*", f"{key}: {value}", text)
    written.write_text(text)
    done = run_command([*command, "launch", *place, str(script), "--epochs", "3"], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("2 ")[1:] == ["['--epochs', '3'] "] * 2
