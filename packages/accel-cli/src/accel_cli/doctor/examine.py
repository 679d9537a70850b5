"""Checks one machine before a run: finds problems, with a remedy for each."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from accel_cli.launch.devices import describe_devices
from accel_cli.launch.interface import LaunchRequest
from accel_cli.launch.outer_launch import PLACE_VARIABLES
from accel_cli.launch.port import Port
from accel_cli.launch.request import check_backend, check_request
from accel_cli.launch.script import check_script
from accel_cli.terminal import coloured
from accel_state.errors import AccelError
from accel_state.plugins import LoadedPlugin, PluginGroup, contained
from accel_state.untrusted import printable

__all__ = ("ERROR", "EXAMINATIONS", "OK", "WARNING", "Finding", "examine", "examine_launch", "lines_of")

OK: Final = "ok"
WARNING: Final = "warning"
ERROR: Final = "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        subject: what was checked.
        verdict: `OK`, `WARNING` (a run may fail) or `ERROR` (a run will fail).
        message: what the check found.
        remedy: what to do; empty if there is nothing to do.
    """

    subject: str
    verdict: str
    message: str
    remedy: str = ""


def lines_of(findings: Sequence[Finding]) -> list[str]:
    """Findings as text, one per line, each with its remedy below."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        # The text may come from another machine.
        message, remedy = printable(finding.message), printable(finding.remedy)
        lines.append(f"{coloured(format(finding.verdict, '<7'))}  {finding.subject:<{width}}  {message}")
        if remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {remedy}")
    return lines


_MIN_PYTHON: Final = (3, 10)
_SHARED_MEMORY_FOLDER: Final = "/dev/shm"
_MIN_SHARED_MEMORY_BYTES: Final = 512 * 2**20
_MIN_OPEN_FILES: Final = 1024
_MIN_DISK_BYTES: Final = 2**30

_TEST_TORCH: Final = "Test torch: python -c 'import torch'."
_OWN_BACKENDS: Final = "accel-plugins"


def examine(request: LaunchRequest) -> Iterator[Finding]:
    """Run every check of this machine, one after the other."""
    for examination in EXAMINATIONS:
        yield from examination(request)


def _python(request: LaunchRequest) -> Iterator[Finding]:
    old = sys.version_info[:2] < _MIN_PYTHON
    version = f"{sys.version.split()[0]} at {sys.executable}"
    yield _judged("Python", version, old, f"Use Python {'.'.join(map(str, _MIN_PYTHON))} or later.", ERROR)


def _torch_and_devices(request: LaunchRequest) -> Iterator[Finding]:
    try:
        answer = describe_devices("Cannot check torch.")
    except AccelError as error:
        yield Finding("torch", ERROR, error.obstacle, f"{_TEST_TORCH} If that fails, reinstall torch.")
        return
    yield Finding("torch", OK, answer["torch"])
    counts = ", ".join(f"{count} {name}" for name, count in answer["families"].items())
    yield Finding("devices", OK, counts)
    for device, description in answer["described"].items():
        yield Finding(device, OK, description)
    if answer["software"]:
        yield Finding("drivers", OK, ", ".join(f"{name} {version}" for name, version in answer["software"].items()))
    if answer["undescribed"]:
        message = f"The devices did not answer: {answer['undescribed']}"
        yield Finding("devices", WARNING, message, "Check their driver.")
    for name, reason in answer["silent"].items():
        yield Finding("devices", WARNING, f"The {name} devices did not answer: {reason}", "Check their driver.")
    for reason in answer["failed"].values():
        yield Finding("devices", WARNING, reason, "Repair, update or remove that package.")


def _backends(request: LaunchRequest) -> Iterator[Finding]:
    from accel_cli.launch.backends import ask_backends, backend_rows

    answers, unanswered = ask_backends(os.environ)
    listed = backend_rows(answers)
    broken = [row for row in listed if row.failure]
    for row in broken:
        message = f"{row.name} of {row.package} {row.version} could not be loaded: {row.obstacle}"
        yield Finding("backends", WARNING, message, f"Repair, update or remove {row.package}.")
    if unanswered:
        # A backend can end or stop the probe, which loads all of them.
        others = sorted({row.package for row in listed if row.package != _OWN_BACKENDS})
        remedy = (
            f"{_TEST_TORCH} If that works, remove one after the other: {', '.join(others)}." if others else _TEST_TORCH
        )
        yield Finding("backends", WARNING, f"Whether they can be loaded is not known: {unanswered}", remedy)
    elif not broken:
        yield Finding("backends", OK, "all can be loaded")


_PLUGIN_GROUPS: Final = (
    "accel.launchers",
    "accel.trackers",
    "accel.commands",
    "accel.conversions",
    "accel.checkpoint_stores",
    "accel.memory",
)
"""Groups of entry points that no other check loads."""

_EXAMINATIONS: Final[PluginGroup[Callable[[LaunchRequest], Iterable[Finding]]]] = PluginGroup(
    "accel.examinations", "examination"
)
"""The checks that other installed packages provide."""


def _plugins(request: LaunchRequest) -> Iterator[Finding]:
    """The plugins of other packages that cannot be loaded."""
    for name in _PLUGIN_GROUPS:
        group: PluginGroup[Any] = PluginGroup(name, "plugin")
        for plugin in group.plugins():
            if not plugin.is_own:
                yield from _broken(name.removeprefix("accel."), group.load(plugin))


def _broken(subject: str, plugin: LoadedPlugin[Any]) -> Iterator[Finding]:
    if plugin.failure:
        yield Finding(subject, WARNING, plugin.fault, plugin.remedy)


def _added(request: LaunchRequest) -> Iterator[Finding]:
    """The checks that other installed packages provide."""
    for examination in _EXAMINATIONS.loaded():
        yield from _broken(examination.name, examination)
        if examination.value is None:
            continue
        try:
            with contained():
                findings = list(examination.value(request))
            yield from findings
        except Exception as error:
            yield Finding(
                examination.name, WARNING, f"The check of {examination.origin} failed: {error!r}", examination.remedy
            )


def examine_launch(request: LaunchRequest) -> Iterator[Finding]:
    """Check what the launch needs on this machine: its script, settings without contradictions, and the backend."""
    checks: dict[str, Callable[[LaunchRequest], None]] = {"launch": check_request, "backend": check_backend}
    if request.script.target:
        checks = {"script": lambda request: check_script(request.script), **checks}
    for subject, check in checks.items():
        try:
            check(request)
        except AccelError as error:
            yield Finding(subject, ERROR, f"{error.failure} {error.obstacle}", error.remedy)
        else:
            if subject == "script":
                yield Finding(subject, OK, request.script.target)


def _config(request: LaunchRequest) -> Iterator[Finding]:
    if request.config is None:
        yield Finding("config file", OK, "none in use")
        return
    unread = ", ".join(entry.key for entry in request.config.unread)
    if unread:
        message = f"No installed package reads {unread} of {request.config.path}."
        yield Finding("config file", WARNING, message, "Remove these lines, or install the package that reads them.")
    else:
        yield Finding("config file", OK, request.config.path)


def _port(request: LaunchRequest) -> Iterator[Finding]:
    wanted = request.settings["main_process_port"]
    if request.settings["machine_rank"].value != 0:
        return
    try:
        with Port(wanted.value or None, wanted.origin) as port:
            yield Finding("port", OK, f"{port.number} is free" if wanted.value else "a free port is available")
    except AccelError as error:
        yield Finding("port", ERROR, error.obstacle, error.remedy)


def _variables(request: LaunchRequest) -> Iterator[Finding]:
    """Variables with which a launcher describes a process: outside of a launch, they are left over from another one."""
    names = [name for name in (*PLACE_VARIABLES, "MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if os.environ.get(name)]
    if not names:
        yield Finding("variables", OK, "none of another launch")
        return
    variables = ", ".join(f"{name}={os.environ[name]}" for name in names)
    if request.cluster.system:
        yield Finding("variables", OK, f"{variables} ({request.cluster.system})")
        return
    remedy = f"Unless this is a process of that launch: unset {' '.join(names)}."
    yield Finding("variables", WARNING, f"A launch has set {variables}.", remedy)


def _name(request: LaunchRequest) -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        remedy = "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to the name of a network interface."
        yield Finding("host name", WARNING, f"{name} has no address: {error}", remedy)
        return
    yield Finding("host name", OK, f"{name} resolves to {address}")


def _shared_memory(request: LaunchRequest) -> Iterator[Finding]:
    if os.path.isdir(_SHARED_MEMORY_FOLDER):
        free = shutil.disk_usage(_SHARED_MEMORY_FOLDER).free
        remedy = (
            "Give the container more shared memory, for example docker run --shm-size=8g: DataLoader workers need it."
        )
        yield _judged("shared memory", f"{_size(free)} free", free < _MIN_SHARED_MEMORY_BYTES, remedy)


def _open_files(request: LaunchRequest) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "no limit" if limit < 0 else f"limit {limit}"
    remedy = f"Raise the limit, for example ulimit -n {_MIN_OPEN_FILES}."
    yield _judged("open files", shown, 0 <= limit < _MIN_OPEN_FILES, remedy)


def _disk(request: LaunchRequest) -> Iterator[Finding]:
    free = shutil.disk_usage(os.getcwd()).free
    remedy = "Free disk space, or start from another folder: checkpoints are written here by default."
    yield _judged("disk", f"{_size(free)} free in {os.getcwd()}", free < _MIN_DISK_BYTES, remedy)


def _judged(subject: str, message: str, wrong: bool, remedy: str, verdict: str = WARNING) -> Finding:
    return Finding(subject, verdict, message, remedy) if wrong else Finding(subject, OK, message)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


EXAMINATIONS: Final[tuple[Callable[[LaunchRequest], Iterator[Finding]], ...]] = (
    _python,
    _torch_and_devices,
    _backends,
    _plugins,
    _added,
    examine_launch,
    _config,
    _port,
    _variables,
    _name,
    _shared_memory,
    _open_files,
    _disk,
)
"""The checks, in the order in which they run."""
