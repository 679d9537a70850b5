"""The examples in the READMEs and documents run, and print what stands under them.

`tools/documents.py` says what the comments above a block mean. An example runs by itself, in a folder of its own; a
tutorial is followed from its first block to its last in one folder, its files saved and its commands run.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from accel_testing.fresh import LAUNCH_VARIABLES
from accel_testing.processes import Finished, Processes, run_command
from documents import Block, Page, pages

PAGES = pages()
TUTORIALS = [page for page in PAGES if page.name.startswith("docs/tutorials/")]
EXAMPLES = [block for page in PAGES if page not in TUTORIALS for block in page.blocks if block.language == "python"]
BY_ITSELF = [block for block in EXAMPLES if "part of a script for" not in block.marks]

# A tutorial starts several runs on several processes, which takes a busy machine minutes.
# Its scripts do not import torch once more in each process.
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_torch.accelerator", "accel_plugins.fsdp.fsdp2", "sklearn.datasets")
LIMIT = 240.0

# A new shell where this environment's programs come first, as after `source .venv/bin/activate`.
ACTIVATED = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def check(block: Block, finished: Finished) -> None:
    """Asserts that it ended well and printed what the document shows."""
    told = finished.stdout + finished.stderr
    assert finished.returncode == 0, f"{block}\n{told}"
    assert block.missing_from(finished.stdout) == [], f"{block}\n{told}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name.endswith("README.md") and "tests-" not in page.name],
    ids=lambda page: page.name,
)
def test_a_readme_has_an_example(page: Page) -> None:
    assert any(block.language == "python" for block in page.blocks)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_seen(page: Page) -> None:
    fences = len(re.findall(r"^\s*```python", page.text, re.MULTILINE))
    assert fences == sum(block.language == "python" for block in page.blocks), (
        "a block is indented, or marked otherwise"
    )
    known = {"processes", "part of a script for", "file", "not run"}
    assert {name for block in page.blocks for name in block.marks} <= known


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_an_example_is_python(block: Block) -> None:
    compile(block.code, str(block), "exec")


@pytest.mark.parametrize("block", BY_ITSELF, ids=str)
def test_an_example_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.code, encoding="utf-8")
    with Processes(int(block.marks.get("processes", "1")), timeout=LIMIT) as group:
        outcomes = group.outcomes(as_a_script, script, environment={"ACCELERATE_USE_CPU": "true"})
    shown = "\n".join(map(str, outcomes))
    assert all(outcome.ok for outcome in outcomes), f"{block}\n{shown}"
    assert block.missing_from(shown) == [], f"{block}\n{shown}"


def as_a_script(script: Path) -> None:
    """Runs a file as `python FILE` and `accel launch --cpu FILE` do, in a process that has imported torch already."""
    if os.environ["WORLD_SIZE"] == "1":
        for name in {*LAUNCH_VARIABLES, "ACCELERATE_USE_CPU"}:
            os.environ.pop(name, None)
    sys.argv[:] = [str(script)]
    os.chdir(script.parent)
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.skipif(os.name == "nt", reason="the commands are written for bash")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorial_can_be_followed(page: Page, tmp_path: Path) -> None:
    for block in page.blocks:
        if "file" in block.marks:
            (tmp_path / block.marks["file"]).write_text(block.code, encoding="utf-8")
        elif block.language == "bash" and "not run" not in block.marks:
            check(block, run_command(["bash", "-e", "-c", block.code], LIMIT, env=ACTIVATED, cwd=tmp_path))
        else:
            assert block.language != "python" or "part of a script for" in block.marks, f"{block} is not followed"
