"""The kits for commands and for checks of the doctor catch every fault that was planted, and accept what is right."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from command_of_words import CountWords, scratch

from accel_cli.doctor.examine import OK, WARNING, Finding
from accel_state.errors import SettingError
from accel_testing.commands import CommandSuite, ExaminationSuite


class SuiteOfCountWords(CommandSuite):
    calls = ((["two", "words"], 0), (["--most", "1", "two", "words"], 1))
    refused = ([],)


class SuiteOfScratch(ExaminationSuite):
    verdicts: ClassVar[Sequence[tuple[Mapping[str, str], str]]] = (({"SCRATCH": "/tmp"}, OK), ({}, WARNING))


class TestCountWords(SuiteOfCountWords):
    target = "command_of_words:COMMAND"


class TestScratch(SuiteOfScratch):
    target = "command_of_words:scratch"


def write_module(folder: Path, name: str, content: str, patch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(content)
    patch.syspath_prepend(str(folder))


# ------------------------------------------------------------------ planted faults


class LongHelp(CountWords):
    help = "count the words\nof a text"


class HelpWithAFullStop(CountWords):
    help = "count the words of a text."


class NoHelpOfAnArgument(CountWords):
    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--fast", action="store_true")


class PercentInTheHelp(CountWords):
    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--share", help="How many % of the words count.")


class DeclaresOnce(CountWords):
    declared = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        if not self.declared:
            super().add_arguments(parser)
        self.declared = True


class ReturnsNothing(CountWords):
    def run(self, arguments: Namespace) -> int:
        super().run(arguments)
        return None  # type: ignore[return-value]


class ReturnsABoolean(CountWords):
    def run(self, arguments: Namespace) -> int:
        return bool(super().run(arguments))


class AlwaysSucceeds(CountWords):
    def run(self, arguments: Namespace) -> int:
        super().run(arguments)
        return 0


class CountsNothing(CountWords):
    def run(self, arguments: Namespace) -> int:
        return super().run(arguments) if arguments.words else 0


class NoRemedy(CountWords):
    def run(self, arguments: Namespace) -> int:
        if not arguments.words:
            raise SettingError("Cannot count words.", "The text is empty.")
        return super().run(arguments)


def failures(suite: Any) -> set[str]:
    """The names of the tests of a suite that fail, without that of the import."""
    failed = set()
    for name in dir(suite):
        if name.startswith("test_") and "imports_no_torch" not in name and "prints_nothing" not in name:
            try:
                getattr(suite, name)()
            except (Exception, pytest.fail.Exception):
                failed.add(name)
    return failed


def command_of(command: CountWords) -> CommandSuite:
    class Suite(SuiteOfCountWords):
        @property
        def loaded(self) -> Any:
            return command

    return Suite()


def check_of(check: Callable[[Any], Any]) -> ExaminationSuite:
    class Suite(SuiteOfScratch):
        @property
        def loaded(self) -> Any:
            return check

    return Suite()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (LongHelp, "its_help_is_one_line"),
        (HelpWithAFullStop, "its_help_is_one_line"),
        (NoHelpOfAnArgument, "every_argument_is_described"),
        (PercentInTheHelp, "every_argument_is_described"),
        (DeclaresOnce, "its_exit_code"),
        (ReturnsNothing, "its_exit_code"),
        (ReturnsABoolean, "its_exit_code"),
        (AlwaysSucceeds, "its_exit_code"),
        (CountsNothing, "its_errors"),
        (NoRemedy, "its_errors"),
    ],
)
def test_a_fault_of_a_command_is_found(broken: type[CountWords], test: str) -> None:
    assert failures(command_of(CountWords())) == set()
    assert any(test in name for name in failures(command_of(broken())))


def warns_always(request: Any) -> Iterator[Finding]:
    yield Finding("scratch", WARNING, "SCRATCH may be slow.", "Set it to a folder on a local disk.")


def says_nothing(request: Any) -> Iterator[Finding]:
    return iter(())


def without_a_remedy(request: Any) -> Iterator[Finding]:
    for finding in scratch(request):
        yield Finding(finding.subject, finding.verdict, finding.message)


def in_several_lines(request: Any) -> Iterator[Finding]:
    for finding in scratch(request):
        yield Finding(finding.subject, finding.verdict, f"{finding.message}\nSee the manual.", finding.remedy)


def with_a_verdict_of_its_own(request: Any) -> Iterator[Finding]:
    for finding in scratch(request):
        yield Finding(finding.subject, "fine" if finding.verdict == OK else WARNING, finding.message, finding.remedy)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (warns_always, "it_reports"),
        (says_nothing, "it_reports"),
        (without_a_remedy, "each_finding"),
        (in_several_lines, "each_finding"),
        (with_a_verdict_of_its_own, "each_finding"),
    ],
)
def test_a_fault_of_a_check_is_found(broken: Callable[[Any], Any], test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCRATCH", raising=False)
    assert failures(check_of(scratch)) == set()
    assert any(test in name for name in failures(check_of(broken)))


def prints(request: Any) -> Iterator[Finding]:
    print("looking for SCRATCH")
    yield from scratch(request)


def sets_a_variable(request: Any) -> Iterator[Finding]:
    yield from list(scratch(request))
    os.environ["SCRATCH_WAS_CHECKED"] = "yes"


def moves_away(request: Any) -> Iterator[Finding]:
    os.chdir("/")
    yield from scratch(request)


def counts_its_calls() -> Callable[[Any], Iterator[Finding]]:
    calls: list[None] = []

    def counted(request: Any) -> Iterator[Finding]:
        calls.append(None)
        yield Finding("scratch", OK, f"call {len(calls)}")

    return counted


@pytest.mark.parametrize("broken", [prints, sets_a_variable, moves_away, counts_its_calls()])
def test_a_check_that_leaves_traces_is_found(
    broken: Callable[[Any], Any],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    check_of(scratch).test_it_changes_nothing_and_prints_nothing(capfd)
    with pytest.raises(AssertionError):
        check_of(broken).test_it_changes_nothing_and_prints_nothing(capfd)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("COMMAND = 1", False),
        ("import torch", True),
        ("print('hello')", True),
        ("import a_module_that_is_absent", True),
    ],
)
def test_a_module_that_is_slow_or_talks_is_found(
    content: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "module_of_a_command", content, monkeypatch)

    class Suite(CommandSuite):
        target = "module_of_a_command:COMMAND"

    if found:
        with pytest.raises(AssertionError):
            Suite().test_its_module_imports_no_torch_and_prints_nothing()
    else:
        Suite().test_its_module_imports_no_torch_and_prints_nothing()
