"""Each message of the page "Messages that people meet first" is one that the packages print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/reference/error-index.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)


def texts(node: ast.AST) -> Iterator[str]:
    """The texts in a source, with a mark for what is filled in."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "".join(one.value if isinstance(one, ast.Constant) else "…" for one in part.values)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


@cache
def printed() -> str:
    """All texts of the packages; parts of one message follow each other."""
    paths = sorted(ROOT.glob("packages/*/src/**/*.py"))
    return "\n".join(text for path in paths for text in texts(ast.parse(path.read_text(encoding="utf-8"))))


def is_printed(message: str) -> bool:
    """Whether the fixed words of a message follow each other in a text, with a few texts in between."""
    words = [
        re.escape(part) for part in re.split(r"…|(?<=\.) (?=[A-Z])|(?<=\.) (?=prepare)", message) if part.strip(" .")
    ]
    return re.search(r"[^\n]*(?:\n[^\n]*){0,4}?".join(words), printed()) is not None


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_index_is_printed_by_the_packages(message: str) -> None:
    assert is_printed(message)


def test_the_index_has_the_messages_that_people_meet() -> None:
    assert len(MESSAGES) >= 60
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("changed", ["Cannot launch. The program is missing.", "Cannot shard a model with FSDP 2."])
def test_a_message_that_nothing_prints_is_found(changed: str) -> None:
    assert not is_printed(changed)
