"""A command and a check of the doctor as other packages write them."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from accel_cli.doctor.examine import OK, WARNING, Finding
from accel_state.errors import SettingError


class CountWords:
    """Counts the words of a text."""

    help = "count the words of a text"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("words", nargs="*", help="The text.")
        parser.add_argument("--most", type=int, metavar="N", help="Number of words from which the text is too long.")

    def run(self, arguments: Namespace) -> int:
        if not arguments.words:
            raise SettingError("Cannot count words.", "The text is empty.", "Write a text.")
        return int(arguments.most is not None and len(arguments.words) > arguments.most)


def scratch(request: Any) -> Iterator[Finding]:
    """Whether there is a folder for scratch files."""
    folder = os.environ.get("SCRATCH")
    if folder is None:
        yield Finding("scratch", WARNING, "SCRATCH is not set.", "Set it to a folder on a local disk.")
    else:
        yield Finding("scratch", OK, folder)


COMMAND = CountWords()
