"""`accel runs repeat RUN`: a recorded command once more, with the same settings and seeds, in a new folder."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from accel_state.errors import NotFound, SettingError
from accel_state.redaction import HIDDEN
from accel_state.settings.environ import REPEATED_RUN
from accel_state.untrusted import printable
from accel_tracking.difference import differences_of
from accel_tracking.record import describe_code, describe_packages, own_folders, read_run_record

__all__ = ("RepeatPlan", "plan_repeat", "repeat_run", "run_plan")

_FILE_AND_LINE: Final = re.compile(r".*:\d+", re.DOTALL)
"""Source of a value from a config file: the file and its line."""

_CONFIG_FILE_NAME: Final = "repeated.yaml"
_COMPARED_PACKAGES: Final = ("torch", "numpy", "transformers", "datasets", "safetensors")
_MAX_NAMED_PACKAGES: Final = 5


class RepeatPlan(NamedTuple):
    """A command that repeats a run.

    Args:
        words: the command line.
        folder: the folder in which it is started.
        output: the project folder of the new run.
        variables: variables to set.
        config: content of the config file of the new run, whose path is in `words`; empty without one.
        warnings: what cannot be repeated.
        obstacle: why the command cannot be started; empty if it can.
    """

    words: tuple[str, ...]
    folder: str
    output: str
    variables: Mapping[str, str]
    config: str
    warnings: tuple[str, ...]
    obstacle: str

    @property
    def shown(self) -> str:
        """The command for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return f"cd {shlex.quote(self.folder)} && {' '.join((*variables, shlex.join(self.words)))}"


def plan_repeat(run: str, output: str | None, last_step: int | None = None, note: bool = False) -> RepeatPlan:
    """Plan the repetition of a run.

    Args:
        run: folder of the run.
        output: project folder of the new run; None for one beside that of the run.
        last_step: step after which it ends, or None.
        note: see `accel_torch.repeated_run.RepeatedRun`.

    Raises:
        NotFound: the run has no record.
        SettingError: the record cannot be read, or the folder of the new run is not empty.
    """
    if last_step is not None and last_step < 1:
        raise SettingError(
            f"Cannot repeat the run {run!r} up to step {last_step}.", "Steps count from 1.", "Give --steps 1 or more."
        )
    record = read_run_record(run)
    target = os.path.abspath(output) if output is not None else _free(record["folder"])
    if os.path.isdir(target) and os.listdir(target):
        raise SettingError(
            f"Cannot repeat the run {run!r} in {target!r}.", "The folder is not empty.", "Choose another --output."
        )
    command, settings = record["command"], record["settings"]
    words, config = [str(word) for word in command.get("words", [])], ""
    arguments = words[1:]
    for pattern in own_folders(record):
        arguments = [pattern.sub(lambda _: target, word) for word in arguments]
    if command.get("launched"):
        config = _config_file(settings)
        arguments = [word for word in arguments[1:] if not word.startswith("--config_file=")]
        path = os.path.join(target, _CONFIG_FILE_NAME)
        words = [sys.executable, "-m", "accel_cli.main", "launch", f"--config_file={path}", *arguments]
    else:
        python = str(command.get("python", ""))
        words = [python if os.access(python, os.X_OK) else sys.executable, *arguments]
    request = {"folder": target, "last_step": last_step, "note": note}
    variables = {**dict(_variables(record, target)), REPEATED_RUN: json.dumps(request)}
    if note:
        variables.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    hidden = [word for word in words if HIDDEN in word]
    folder = str(command.get("folder") or os.getcwd())
    obstacle = ""
    if hidden:
        obstacle = f"The record does not contain secrets: {', '.join(hidden)}. Fill them in, and start it by hand."
    elif not os.path.isdir(folder):
        obstacle = f"The folder {folder} in which it was started does not exist."
    return RepeatPlan(tuple(words), folder, target, variables, config, tuple(_warnings(record)), obstacle)


def _free(folder: str) -> str:
    """A folder beside that of the run that does not exist."""
    return next(name for n in itertools.count(1) if not os.path.exists(name := f"{folder.rstrip('/')}-repeat-{n}"))


def _config_file(settings: Mapping[str, Any]) -> str:
    """The values that came from a config file, as a config file."""
    import yaml

    from accel_cli.config.resolved import label
    from accel_cli.launch.launchers import launch_classes
    from accel_state.settings.schema import settings_of

    document: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
    for settings_class in launch_classes():
        for setting in settings_of(settings_class).values():
            entry = settings.get(label(setting), {})
            if setting.key is not None and _FILE_AND_LINE.fullmatch(str(entry.get("source", ""))):
                table, dot, name = setting.key.rpartition(".")
                (document.setdefault(table, {}) if dot else document)[name] = entry["value"]
    return str(yaml.safe_dump(document))


def _variables(record: Mapping[str, Any], target: str) -> Iterator[tuple[str, str]]:
    """The variables of the run that this shell does not have with the same value."""
    own = own_folders(record)
    variables = dict(record["environment"])
    for entry in record["settings"].values():
        source, value = str(entry.get("source", "")), entry.get("value")
        if source.startswith("$") and value is not None:
            variables[source[1:]] = str(value).lower() if isinstance(value, bool) else str(value)
    for name, text in sorted(variables.items()):
        if HIDDEN not in str(text):
            for pattern in own:
                text = pattern.sub(lambda _: target, str(text))
            if os.environ.get(name) != text:
                yield name, text


def _warnings(record: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be repeated."""
    code, now = record["code"], describe_code(str(record["code"].get("script", "")))
    script = str(code.get("script", ""))
    if script and not os.path.exists(script):
        yield f"The script {script} does not exist any more."
    elif code.get("script_sha256") != now.get("script_sha256"):
        yield f"The script {script} has changed."
    if code.get("revision") != now.get("revision"):
        yield f"The code is at another revision: {now.get('revision') or 'none'} instead of {code.get('revision')}."
    elif code.get("difference_sha256") != now.get("difference_sha256"):
        yield "What is not committed in the repository has changed."
    packages, installed = record["packages"], describe_packages()
    changed = [
        f"{name} {installed.get(name) or 'is missing'} instead of {version}"
        for name, version in packages.items()
        if installed.get(name) != version
    ]
    changed.sort(key=lambda text: (text.split()[0] not in _COMPARED_PACKAGES, "missing" not in text))
    if changed:
        more = f" and {len(changed) - _MAX_NAMED_PACKAGES} more" if len(changed) > _MAX_NAMED_PACKAGES else ""
        yield f"Packages differ: {', '.join(changed[:_MAX_NAMED_PACKAGES])}{more}."
    if not record["seeds"].get("given"):
        yield "The script gave no seed, so its random numbers cannot be repeated: call set_seed(...) first."
    if HIDDEN in json.dumps([record["command"], record["environment"], record["settings"]]):
        yield f"Secrets are not recorded ({HIDDEN}); take them from your environment."


def run_plan(plan: RepeatPlan, output_to: int | None = None) -> int:
    """Start a plan, wait for it, and return its exit code.

    Args:
        plan: the plan.
        output_to: descriptor for what the run prints; None for the standard output of this process.

    Raises:
        NotFound: the command or its folder does not exist.
        SettingError: the record does not contain all of it.
    """
    failure = "Cannot start the repeated run."
    if plan.obstacle:
        raise SettingError(failure, plan.obstacle, f"The command is: {plan.shown}")
    try:
        os.makedirs(plan.output, exist_ok=True)
        if plan.config:
            Path(plan.output, _CONFIG_FILE_NAME).write_text(plan.config, encoding="utf-8")
        return subprocess.call(plan.words, cwd=plan.folder, env={**os.environ, **plan.variables}, stdout=output_to)
    except OSError as error:
        raise NotFound(failure, f"The system reports: {error}.", "Check the command and --output.") from error


def repeat_run(run: str, output: str | None, steps: int | None, start: bool) -> int:
    """Print how a run is repeated and, if asked, start it and compare the metrics of the steps that it made.

    Returns:
        0, the exit code of the repeated run if it failed, or 1 if its metrics differ.
    """
    plan = plan_repeat(run, output, steps)
    for warning in plan.warnings:
        print(printable(f"Warning: {warning}"), file=sys.stderr)
    print(printable(plan.shown))
    if not start:
        print(f"Nothing was started. {plan.obstacle or 'Add --start to start this.'}")
        return 0
    sys.stdout.flush()
    code = run_plan(plan)
    if code:
        return code
    difference = differences_of(run, plan.output, only_common_steps=True)
    first = difference.first_step
    equal = "All metrics are equal" if first is None else f"The metrics differ from step {first:g} on"
    print(printable(f"{equal}: {difference.steps} steps compared. The new run is in {plan.output}"))
    return int(first is not None)
