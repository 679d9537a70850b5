from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from accel_bigmodel.commands.estimate_memory import COMMAND
from accel_bigmodel.estimate import estimate_memory
from accel_state.errors import Missing, SettingError
from accel_state.plugins import plugins_of

SOURCE = """
import torch
from torch import nn
class Wide(nn.Module):
    def __init__(self, width=1000):
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
class Schedule(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = torch.linspace(0, 1, 4).tolist()
        self.layer = nn.Linear(16, 16, bias=False)
number = 3
def broken():
    raise ValueError("cannot be built")
def text():
    return "text"
"""


def call(*arguments: object) -> int:
    parser = ArgumentParser()
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args([str(argument) for argument in arguments]))


def test_estimates_by_dtype() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 30, bias=False))
    full, half, quarter = estimate_memory(model, ["float32", "bfloat16", "int4"])
    assert (full.total, full.largest_layer, full.layer, full.training) == (1600, 1200, "1", 6400)
    assert (half.total, half.training) == (800, 6400)
    assert (quarter.total, quarter.largest_layer, quarter.training) == (200, 150, None)
    model._no_split_modules = ["Sequential"]  # type: ignore[assignment]
    assert estimate_memory(nn.ModuleDict({"block": model}), ["float32"])[0].layer == "block.1"


def test_the_command_is_offered() -> None:
    (found,) = [found for found in plugins_of("accel.commands") if found.name == "estimate-memory"]
    assert found.load() is COMMAND


def test_a_class_in_a_file_is_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wide_net.py").write_text(SOURCE)
    assert (
        call(f"{tmp_path / 'wide_net.py'}:Wide", "--arguments", '{"width": 100000}', "--dtypes", "float32", "int8") == 0
    )
    header, full, small = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "dtype"
    assert re.split(r"\s{2,}", full)[1:] == ["74.51 GiB (second)", "111.76 GiB", "447.03 GiB"]
    assert "27.94 GiB" in small
    assert "not trained" in small


def test_a_constructor_that_needs_values_gets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schedule_net.py").write_text(SOURCE)
    call(f"{tmp_path / 'schedule_net.py'}:Schedule", "--dtypes", "float32")
    assert "1.0 KiB (layer)" in capsys.readouterr().out


def test_a_class_of_an_installed_package_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    call("torch.nn:Linear", "--arguments", '{"in_features": 256, "out_features": 256, "bias": false}')
    assert "256.0 KiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_package:Model", "No module named"),
        ("torch.nn:NoSuchClass", "NoSuchClass"),
        ("missing.py:Model", "not a Python file"),
        ("FILE:number", "'number' is a int"),
        ("FILE:broken", "cannot be built"),
        ("FILE:text", "returned a str"),
        ("torch.nn:Linear", "TypeError"),
    ],
)
def test_what_cannot_be_built_says_why(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "net_with_faults.py").write_text(SOURCE)
    with pytest.raises(SettingError, match=words):
        call(name.replace("FILE", str(tmp_path / "net_with_faults.py")))


@pytest.mark.parametrize("text", ["not json", "[1]"])
def test_arguments_are_a_json_object(text: str) -> None:
    with pytest.raises(SettingError, match="not a JSON object"):
        call("torch.nn:Linear", "--arguments", text)


def test_a_local_config_is_built_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class AutoConfig:
        @staticmethod
        def from_pretrained(name: str, trust_remote_code: bool) -> Any:
            return json.loads((Path(name) / "config.json").read_text())

    class AutoModel:
        @staticmethod
        def from_config(config: Any, trust_remote_code: bool) -> nn.Module:
            return nn.Linear(config["width"], config["width"], bias=False)

    library: Any = ModuleType("transformers")
    library.AutoConfig, library.AutoModel = AutoConfig, AutoModel
    monkeypatch.setitem(sys.modules, "transformers", library)
    (tmp_path / "config.json").write_text('{"model_type": "x", "width": 512}')
    call(tmp_path, "--dtypes", "float32")
    assert "1.0 MiB" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Missing, match="transformers"):
        call(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingError, match="not a config with a 'model_type'"):
        call(tmp_path)


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys, argparse; from accel_bigmodel.commands.estimate_memory import COMMAND as c\n"
        "c.add_arguments(argparse.ArgumentParser()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=250, check=False).returncode == 0


PROGRAM = """
import argparse
from torch import nn
from beside_{stem} import width
parser = argparse.ArgumentParser()
parser.add_argument("{name}", {options})
arguments = parser.parse_args()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(width, arguments.size, bias=False)
"""


def program(tmp_path: Path, name: str, options: str) -> str:
    path = tmp_path / f"program_{tmp_path.name}.py"
    path.write_text(PROGRAM.format(stem=path.stem, name=name, options=options))
    (tmp_path / f"beside_{path.stem}.py").write_text("width = 64")
    return f"{path}:Net"


@pytest.mark.parametrize("library", [[], ["--library_name", "timm"]])
def test_a_script_that_parses_arguments_does_not_see_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: list[str]
) -> None:
    name = program(tmp_path, "--size", "type=int, default=4")
    words = ["accel", "estimate-memory", name, "--size", "8", *library]
    monkeypatch.setattr(sys, "argv", words)
    before = list(sys.path)
    call(name, "--dtypes", "float32", *library)
    assert "1.0 KiB (layer)" in capsys.readouterr().out
    assert (sys.argv, sys.path) == (words, before)


def test_a_script_that_demands_arguments_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="exited with 2 before it defined the class"):
        call(program(tmp_path, "size", "type=int"))


def test_a_script_that_raises_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "raising_net.py").write_text("1 / 0")
    with pytest.raises(SettingError, match=r"raising_net\.py raised ZeroDivisionError"):
        call(f"{tmp_path / 'raising_net.py'}:Net")
