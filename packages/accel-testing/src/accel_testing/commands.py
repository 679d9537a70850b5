"""`CommandSuite` and `ExaminationSuite`: the tests that commands of `accel`, and checks of its doctor, pass.

For example:

    class TestCountWords(CommandSuite):
        target = "accel_words:COMMAND"
        calls = [(["three", "short", "words"], 0)]

    class TestScratch(ExaminationSuite):
        target = "accel_words:scratch"
        verdicts = [({"SCRATCH": "/tmp"}, "ok"), ({}, "warning")]

The suites call the objects of entry points as `accel` does, in this process and without a package being installed.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest import mock

import pytest

from accel_cli.doctor.examine import ERROR, OK, WARNING, Finding
from accel_cli.launch.request import request_of
from accel_cli.parser import Parser
from accel_state.errors import AccelError

__all__ = ("CommandSuite", "ExaminationSuite")

_IMPORT_TIMEOUT_S: Final = 120
_VERDICTS_BY_GRAVITY: Final = (OK, WARNING, ERROR)


class _Loaded:
    """An object that an entry point names."""

    target: ClassVar[str]
    """The object as "module:attribute", as the entry point names it."""

    @property
    def loaded(self) -> Any:
        """The object under test, imported from `target`."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def test_its_module_imports_no_torch_and_prints_nothing(self) -> None:
        """The list of commands and the doctor load it on machines where torch cannot be imported, and before a run."""
        module = self.target.partition(":")[0]
        code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; sys.exit('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], timeout=_IMPORT_TIMEOUT_S, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, f"importing {module} imports torch, or fails:\n{done.stderr}"
        assert done.stdout == ""


class CommandSuite(_Loaded):
    """Tests of one command: its help, its arguments, and its exit codes."""

    calls: ClassVar[Sequence[tuple[Sequence[str], int]]] = ()
    """Arguments and the exit code that they lead to."""

    refused: ClassVar[Sequence[Sequence[str]]] = ()
    """Arguments with which the command raises an `AccelError`."""

    def parser(self) -> Parser:
        """A parser with the arguments of the command, as `accel` makes it."""
        parser = Parser("accel this-command", self.loaded.help)
        self.loaded.add_arguments(parser)
        return parser

    def test_its_help_is_one_line_of_the_list_of_commands(self) -> None:
        about = self.loaded.help
        assert isinstance(about, str)
        assert about.strip() == about != ""
        assert len(about.splitlines()) == 1, "the list of commands has one line for each"
        assert not about.endswith("."), "`accel` adds the full stop of the sentence"

    def test_every_argument_is_described_in_the_help_text(self) -> None:
        """Unless the command writes its help text itself (`manual`)."""
        if hasattr(self.loaded, "manual"):
            assert self.loaded.manual("accel this-command").strip()
            return
        for parser in _with_subcommands(self.parser()):
            for action in parser._actions:
                described = action.help or isinstance(action, _SubParsersAction)
                assert described, f"the argument {action.option_strings or action.dest} has no help"
            assert parser.format_help(), "argparse formats the help, where a single % is an error"

    def test_its_arguments_can_be_declared_several_times(self) -> None:
        """Help texts, completion and runs declare them in a parser each."""
        assert self.parser().format_help() == self.parser().format_help()

    def test_its_exit_code_is_a_number(self) -> None:
        assert self.calls, "set `calls` to arguments and the exit codes that they lead to"
        for arguments, code in self.calls:
            returned = self.loaded.run(self.parser().parse_args(list(arguments)))
            assert type(returned) is int, f"run() of {arguments} returned {returned!r}"
            assert returned == code, f"run() of {arguments}"

    def test_its_errors_have_three_parts(self) -> None:
        for arguments in self.refused:
            with pytest.raises(AccelError) as refusal:
                self.loaded.run(self.parser().parse_args(list(arguments)))
            error = refusal.value
            assert all((error.failure, error.obstacle, error.remedy)), f"what failed, why and what to do: {error}"


def _with_subcommands(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for inner in action.choices.values():
                yield from _with_subcommands(inner)


class ExaminationSuite(_Loaded):
    """Tests of one check of `accel doctor`: its findings with the variables of the environment that you give."""

    verdicts: ClassVar[Sequence[tuple[Mapping[str, str], str]]]
    """Variables, and the worst verdict with them: "ok", "warning" or "error". One must be "ok" and one must not."""

    def findings(self, variables: Mapping[str, str]) -> list[Finding]:
        """The findings when the environment has these variables besides its own."""
        with mock.patch.dict(os.environ, variables):
            findings: list[Finding] = list(self.loaded(request_of((), os.environ)))
        return findings

    def test_it_reports_what_is_right_and_what_is_wrong(self) -> None:
        worst = {verdict for _, verdict in self.verdicts}
        assert OK in worst, "give variables with which nothing is wrong"
        assert worst - {OK}, "give variables with which something is wrong"
        for variables, verdict in self.verdicts:
            findings = self.findings(variables)
            assert findings, f"nothing is reported with {dict(variables)}"
            assert max((one.verdict for one in findings), key=_VERDICTS_BY_GRAVITY.index) == verdict, (
                f"with {dict(variables)}"
            )

    def test_each_finding_is_a_line_with_a_remedy_where_something_is_wrong(self) -> None:
        for variables, _ in self.verdicts:
            for finding in self.findings(variables):
                assert isinstance(finding, Finding)
                assert finding.verdict in _VERDICTS_BY_GRAVITY
                for text in (finding.subject, finding.message):
                    assert text.strip(), f"{finding} says nothing"
                    assert len(text.splitlines()) == 1, f"{finding} is a line of a table"
                assert finding.remedy or finding.verdict == OK, f"{finding} does not say what to do"

    def test_it_changes_nothing_and_prints_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Other checks follow in the same process, and `--json` prints to the same output."""
        for variables, _ in self.verdicts:
            with mock.patch.dict(os.environ, variables):
                request, before = request_of((), os.environ), (dict(os.environ), Path.cwd(), list(sys.path))
                capfd.readouterr()
                first = list(self.loaded(request))
                assert capfd.readouterr().out == ""
                assert (dict(os.environ), Path.cwd(), list(sys.path)) == before
                assert list(self.loaded(request)) == first, "a second call reports something else"
