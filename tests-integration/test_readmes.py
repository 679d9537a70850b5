"""The examples in the READMEs and guides run, and print what stands under them.

A comment `<!-- processes: 2 -->` above an example says that `accel launch` starts it. A block marked `text` below an
example holds lines that its output must have. A comment `<!-- part of a script for: deepspeed -->` says that a block
does not stand alone; such a block is compiled only.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel_state.testing.processes import run_command

ROOT = Path(__file__).resolve().parents[1]
WITH_EXAMPLES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/how-to/*.md"))]

EXAMPLE = re.compile(
    r"(?:<!-- processes: (?P<processes>\d+) -->\n+)?"
    r"(?P<part><!-- part of a script for: \w+ -->\n+)?"
    r"```python\n(?P<code>.*?)```\n"
    r"(?:\n*```text\n(?P<output>.*?)```\n)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Example:
    """One block of Python in a document."""

    document: str
    number: int
    processes: int
    code: str
    output: tuple[str, ...]
    stands_alone: bool

    def __str__(self) -> str:
        return f"{self.document}:{self.number}"


def examples() -> list[Example]:
    """Every example of every document."""
    found = []
    for path in WITH_EXAMPLES:
        name = path.relative_to(ROOT).as_posix()
        for number, match in enumerate(EXAMPLE.finditer(path.read_text(encoding="utf-8")), start=1):
            lines = tuple((match["output"] or "").splitlines())
            found.append(Example(name, number, int(match["processes"] or 1), match["code"], lines, not match["part"]))
    return found


def test_every_readme_has_an_example() -> None:
    documents = {example.document for example in examples()}
    assert documents == {path.relative_to(ROOT).as_posix() for path in WITH_EXAMPLES}


@pytest.mark.parametrize("example", examples(), ids=str)
def test_an_example_runs(example: Example, tmp_path: Path) -> None:
    compile(example.code, str(example), "exec")
    if not example.stands_alone:
        return
    script = tmp_path / "example.py"
    script.write_text(example.code, encoding="utf-8")
    launch = ["-m", "accel_cli.main", "launch", "--cpu", "--num_processes", str(example.processes)]
    starter = launch if example.processes > 1 else []
    finished = run_command([sys.executable, *starter, str(script)], cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # Processes that print at the same time may share a line.
    for line in example.output:
        assert line in finished.stdout
