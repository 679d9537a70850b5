"""The blocks of code in the documents and READMEs, with the marks in the comments above each.

A comment directly above a block is one mark:

    <!-- processes: 2 -->                    `accel launch` starts it, with that number of processes
    <!-- part of a script for: deepspeed --> it is incomplete, so it is only compiled
    <!-- file: train.py -->                  it is saved under this name, for the commands that follow on the page
    <!-- not run: it installs -->            these commands are neither run nor checked, for this reason

A block marked `text` right below another one contains lines that its output must have; `...` in a line matches
anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ("ROOT", "Block", "Page", "commands_in", "pages")

ROOT = Path(__file__).resolve().parents[1]
WHERE = ("README.md", "packages/*/README.md", "tests-integration/*/README.md", "docs/**/*.md")

BLOCK = re.compile(
    r"^(?P<marks>(?:<!-- [^\n]* -->\n+)*)"
    r"```(?P<language>[a-z]*)\n(?P<code>.*?)^```\n"
    r"(?:\n*```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
MARK = re.compile(r"<!-- (?P<name>[^:\n]*)(?:: (?P<value>[^\n]*))? -->")
SHELLS = ("", "bash", "console", "sh", "shell")
OURS = ("accel", "accelerate")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        document: its path, relative to the repository.
        line: the line of the document where its code begins.
        language: the language after the fence; empty if there is none.
        marks: the comments above it, by name.
        output: the lines that are shown as its output.
    """

    document: str
    line: int
    language: str
    code: str
    marks: dict[str, str]
    output: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    def missing_from(self, printed: str) -> list[str]:
        """The lines of the shown output that are not in what was printed; processes may share a line."""
        patterns = {line: ".*".join(map(re.escape, line.split("..."))) for line in self.output}
        return [line for line, pattern in patterns.items() if not re.search(pattern, printed)]


@dataclass(frozen=True)
class Page:
    """A document with its blocks, in their order."""

    name: str
    text: str
    blocks: tuple[Block, ...]


def read_page(path: Path, root: Path = ROOT) -> Page:
    """Finds the blocks of a document."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(root).as_posix()
    blocks = []
    for match in BLOCK.finditer(text):
        marks = {mark["name"]: mark["value"] or "" for mark in MARK.finditer(match["marks"])}
        line = text.count("\n", 0, match.start("code")) + 1
        output = tuple((match["output"] or "").splitlines())
        blocks.append(Block(name, line, match["language"], match["code"], marks, output))
    return Page(name, text, tuple(blocks))


def pages(root: Path = ROOT) -> list[Page]:
    """Every document that is not generated."""
    paths = [path for pattern in WHERE for path in sorted(root.glob(pattern))]
    return [read_page(path, root) for path in paths if "generated" not in path.parts]


def commands_in(block: Block) -> Iterator[list[str]]:
    """The commands of this project in a block for the shell, as lists of words from the name of the command on."""
    if block.language not in SHELLS:
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        # Lines of a console without a prompt are what a command printed.
        if block.language == "console" and not line.startswith("$ "):
            continue
        if not block.language and not line.startswith(("$ ", *OURS)):
            continue
        yield from _commands(line.removeprefix("$ "))


def _commands(line: str) -> Iterator[list[str]]:
    """Divides a line at pipes and the like, and drops what stands before the name of a command of ours."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    # "model.py:example" and "dp_shard=16,tp=4" are one word each.
    lexer.wordchars += ":,"
    words: list[str] = []
    for token in [*lexer, ";"]:
        if set(token) <= set("();<>|&"):
            if "pip" not in words:
                start = next((place for place, word in enumerate(words) if word in OURS), None)
                if start is not None:
                    yield words[start:]
            words = []
        else:
            words.append(token)
