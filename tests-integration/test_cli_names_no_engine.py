"""The sources of accel-cli name no engine: switches, settings, launchers, commands and packages come from manifests.

A module that has to name one is listed here with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "packages" / "accel-cli" / "src" / "accel_cli"
ENGINE = re.compile(
    r"(?<![a-z])(deepspeed|megatron|fsdp\d?|(torch_)?xla|ddp|torchao|transformer_engine|msamp)(?![a-z])", re.IGNORECASE
)

# By path: which engines, and why.
EXCEPTIONS = {
    "launch/deepspeed.py": ({"deepspeed"}, "the launcher of DeepSpeed's own program; launchers belong to this package"),
    "launch/tpu.py": ({"xla"}, "the launcher of TPUs, whose processes torch_xla starts"),
    "launch/tpu_runner.py": ({"xla"}, "what that launcher runs"),
    "config/file.py": (
        {"deepspeed", "fsdp", "megatron"},
        "keys of files of Accelerate, whether anything reads them or not",
    ),
}


def named_engines(text: str) -> set[str]:
    """The engines that a text names."""
    return {match[0].lower().removeprefix("torch_") for match in ENGINE.finditer(text)}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_names_no_engine(path: Path) -> None:
    allowed, _ = EXCEPTIONS.get(str(path.relative_to(SOURCE)), (set(), ""))
    assert named_engines(path.read_text(encoding="utf-8")) == allowed


@pytest.mark.parametrize(
    ("text", "engines"),
    [
        ('"--use_deepspeed"', {"deepspeed"}),
        ("from accel_plugins.fsdp.weights import merge", {"fsdp"}),
        ("MEGATRON_LM_", {"megatron"}),
        ("DistributedType.XLA", {"xla"}),
        ("# FSDP2 and torch_xla", {"fsdp2", "xla"}),
        ("example, address, relaxation", set()),
    ],
)
def test_names_of_engines_are_found(text: str, engines: set[str]) -> None:
    assert named_engines(text) == engines


def test_every_exception_is_needed() -> None:
    assert all((SOURCE / path).is_file() and reason for path, (_, reason) in EXCEPTIONS.items())
