"""Commands and config files that the documents show are understood."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import nox.registry
import pytest
import tomli
import yaml

from accel_cli.command import find_command, installed_commands
from accel_cli.main import main
from accel_cli.parser import Parser
from accel_state.errors import SettingError
from documents import ROOT, Block, commands_in, pages, read_page

BLOCKS = [block for page in pages() for block in page.blocks if "not run" not in block.marks]
READERS = {"yaml": lambda text: list(yaml.safe_load_all(text)), "toml": tomli.loads, "json": json.loads}


def understand(words: list[str]) -> None:
    """Asserts that a command and its options exist, without running it."""
    _, *rest = words
    if not rest or rest[0] in ("--help", "--version", "-h"):
        return
    name, *arguments = rest
    command = find_command(name)
    parser = Parser(f"accel {name}", command.help)
    command.add_arguments(parser)
    if "--help" not in arguments:
        parser.parse_args(arguments)


@pytest.mark.parametrize("block", [block for block in BLOCKS if any(commands_in(block))], ids=str)
def test_a_command_exists_with_its_options(block: Block) -> None:
    for words in commands_in(block):
        understand(words)


@pytest.mark.parametrize("name", installed_commands())
def test_the_help_of_a_command_ends_with_two_examples_that_are_understood(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = getattr(find_command(name), "examples", ())
    assert len(examples) >= 2
    for example in examples:
        understand(["accel", name, *shlex.split(example)])
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out.rstrip().splitlines()
    assert shown[-len(examples) :] == [f"  accel {name} {example}".rstrip() for example in examples]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in READERS], ids=str)
def test_a_config_file_can_be_read(block: Block) -> None:
    assert READERS[block.language](block.code)


def test_the_sessions_of_nox_that_are_named_exist() -> None:
    runpy.run_path(str(ROOT / "noxfile.py"))
    existing = set(nox.registry.get())
    named = {name for page in pages() for name in re.findall(r"\bnox -s ([\w-]+)", page.text)}
    assert named - existing == set()


@pytest.mark.parametrize(
    "shown",
    [
        "```bash\naccel lunch train.py\n```\n",
        "```bash\naccel launch --num_pocesses 2 train.py\n```\n",
        "```console\n$ FIRST=1 srun accel launch \\\n    --nothing_like_it 2 train.py | tee log\n```\n",
        "```\naccel checkpoint prone runs/one\n```\n",
    ],
)
def test_documented_commands_that_do_not_exist_are_refused(tmp_path: Path, shown: str) -> None:
    (tmp_path / "page.md").write_text(shown, encoding="utf-8")
    (block,) = read_page(tmp_path / "page.md", tmp_path).blocks
    (words,) = commands_in(block)
    with pytest.raises(SettingError):
        understand(words)


def test_what_is_no_command_of_ours_is_left_alone(tmp_path: Path) -> None:
    shown = (
        "```bash\npip install accelerate\npython train.py  # accel launch --nothing\n```\n```text\naccel lunch\n```\n"
    )
    (tmp_path / "page.md").write_text(shown, encoding="utf-8")
    (block,) = read_page(tmp_path / "page.md", tmp_path).blocks
    assert list(commands_in(block)) == []
    assert block.output == ("accel lunch",)
