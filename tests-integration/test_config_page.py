"""Each config file of the page about config files is read without a note, and gives what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_cli.launch.request import request_of
from documents import ROOT, Block, read_page

PAGE = read_page(ROOT / "docs/how-to/config-file.md")
FILES = [block for block in PAGE.blocks if block.language == "yaml"]

EXPECTED = {
    "ddp.yaml": {"num_processes": 2, "cpu": True, "mixed_precision": "bf16", "gradient_accumulation_steps": 4},
    "eight.yaml": {"num_processes": 8, "mixed_precision": "bf16"},
    "fsdp2.yaml": {"num_processes": 8, "mixed_precision": "bf16"},
    "deepspeed.yaml": {"num_processes": 8},
    "axes.yaml": {"num_processes": 8},
    "machines.yaml": {"num_processes": 16, "main_process_port": 29500},
    "compile.yaml": {"num_processes": 2},
    "megatron.yaml": {"num_processes": 8},
}
SELECTED = {
    "fsdp2.yaml": "FSDP",
    "axes.yaml": "FSDP",
    "deepspeed.yaml": "DEEPSPEED",
    "megatron.yaml": "MEGATRON_LM",
}


def test_every_file_of_the_page_is_expected() -> None:
    assert [block.marks["file"] for block in FILES] == list(EXPECTED)


@pytest.mark.parametrize("block", FILES, ids=lambda block: block.marks["file"])
def test_a_file_of_the_page_is_read_whole(block: Block, tmp_path: Path) -> None:
    name = block.marks["file"]
    (tmp_path / name).write_text(block.code, encoding="utf-8")
    request = request_of(["--config_file", str(tmp_path / name), "train.py"], {})
    for setting, value in EXPECTED[name].items():
        assert request.settings[setting].value == value, setting
    assert request.config is not None
    assert request.config.unread == ()
    assert not request.config.refused
    if name in SELECTED:
        assert request.selection is not None
        assert SELECTED[name] in str(request.settings["distributed_type"].value)
