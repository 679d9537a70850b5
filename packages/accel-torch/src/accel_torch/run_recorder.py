"""Writes the record of the run (`accel_tracking.record`) on the main process, if its Accelerator has a project folder.

The script waits while the facts of this process are collected. A thread then asks git and writes the file; it imports
nothing, because a script may fork meanwhile.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.metadata  # noqa: F401 - so that the thread imports nothing
import json
import logging
import os
import platform
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_state.settings.environ import DEFAULT, LAUNCH_RECORD, resolve
from accel_state.settings.run import MeshSettings, ProcessSettings, RunSettings
from accel_state.watch.record import STATUS_FOLDER
from accel_torch.hooks import Hook
from accel_tracking.record import (
    attempt_entry,
    describe_code,
    describe_command,
    describe_environment,
    describe_packages,
    write_run_record,
)

if TYPE_CHECKING:
    from accel_torch.session import Session

__all__ = ("RunRecorder", "record_run", "wait_for_records")

_log = logging.getLogger(__name__)

_AT_EXIT: Final = 5.0
"""Longest time in seconds that the end of the process waits for the file."""

_MOST_LOADERS: Final = 64
_LONGEST_VALUE: Final = 2000


def record_run(session: Session) -> None:
    """Write the record of a session's run, and add the data of its loaders when they are prepared."""
    folder = os.path.abspath(session.options.project.project_dir or "")
    recorder = _recorders.get(folder)
    if recorder is None or recorder.pid != os.getpid():
        recorder = _recorders[folder] = RunRecorder(folder)
        atexit.register(recorder.wait)
    recorder.describe(session)
    session.hooks.enter(recorder)


_recorders: Final[dict[str, RunRecorder]] = {}
"""The recorder of each project folder; several Accelerators of a process describe one start of the run."""


def wait_for_records() -> None:
    """Wait until what is known of each run is in its file, for a bounded time."""
    for recorder in _recorders.values():
        recorder.wait()


class RunRecorder(Hook):
    """Keeps the record of one project folder.

    Args:
        folder: the project folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.pid = folder, os.getpid()
        launch = os.path.basename(os.path.dirname(os.environ.get(STATUS_FOLDER, "")))
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._attempt = attempt_entry(launch, int(restarts) if restarts.isdecimal() else 0, socket.gethostname())
        self._content: dict[str, Any] = {"data": []}
        self._changed, self._writing = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._launcher_writes, self._warned = _launcher_writes_to(folder), ""

    def describe(self, session: Session) -> None:
        """Collect the facts of a session, and let the thread write them."""
        launch = _launch()
        self._content.update(
            command=_command(launch),
            settings=dict(_settings(session, launch.get("settings") or {})),
            devices=_devices(session),
            world=_world(session, launch),
            seeds=_seeds(session),
            environment=describe_environment(os.environ),
        )
        self._write()

    def after_prepare(self, session: Session, bundle: Any) -> None:
        """Add the data sets of the loaders that were prepared; a script may also have seeded again meanwhile."""
        loaders = session.prepared.loaders[:_MOST_LOADERS]
        data, seeds = [_data_set(loader) for loader in loaders], _seeds(session)
        if (data, seeds) != (self._content["data"], self._content["seeds"]):
            self._content.update(data=data, seeds=seeds)
            self._write()

    def _write(self) -> None:
        self._changed.set()
        # A thread that still runs may have looked for changes for the last time; this one waits until it has ended.
        self._thread = threading.Thread(target=self._write_changes, name="accel-run-record", daemon=True)
        self._thread.start()

    def _write_changes(self) -> None:
        with self._writing:
            while self._changed.is_set():
                self._changed.clear()
                if "code" not in self._content:
                    main = getattr(sys.modules.get("__main__"), "__file__", None)
                    self._content.update(code=describe_code(main or ""), packages=describe_packages())
                problem = write_run_record(self.folder, dict(self._content), self._attempt)
                if problem and problem != self._warned and not self._launcher_has_warned():
                    self._warned = problem
                    _log.warning("The record of the run cannot be written to %s: %s", self.folder, problem)

    def _launcher_has_warned(self) -> bool:
        """Whether the launcher, which writes to the folder before it starts this process, could not do so either."""
        writable = os.path.isdir(self.folder) and os.access(self.folder, os.W_OK)
        return self._launcher_writes and not writable

    def wait(self) -> None:
        """Wait for the file, for a bounded time."""
        if self._thread is not None and self.pid == os.getpid():
            self._thread.join(_AT_EXIT)


def _launch() -> dict[str, Any]:
    """What `accel launch` passes on; empty without it."""
    try:
        launch = json.loads(os.environ.get(LAUNCH_RECORD, "{}"))
    except ValueError:
        return {}
    return launch if isinstance(launch, dict) else {}


def _launcher_writes_to(folder: str) -> bool:
    """Whether the launcher of this process keeps an account of the run in the folder."""
    launch = _launch()
    project_dir = (launch.get("settings") or {}).get("project_dir")
    # The others start a program that starts the processes, and leave the folder to them.
    if launch.get("launcher") != "local" or not isinstance(project_dir, list):
        return False
    return os.path.abspath(os.path.join(str(launch.get("folder", "")), str(project_dir[0]))) == folder


def _command(launch: Mapping[str, Any]) -> dict[str, Any]:
    if launch.get("command"):
        return describe_command(launch["command"], str(launch.get("folder", "")), launched=True)
    return describe_command(sys.orig_argv, os.getcwd(), launched=False)


def _settings(session: Session, launched: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each setting under its name in config files, with its value and its source."""
    options, state = session.options, session.state
    settings = {name: _sourced(*one) for name, one in launched.items() if isinstance(one, list) and len(one) == 2}
    accumulation = options.accumulation.num_steps
    arguments = {"mixed_precision": options.mixed_precision, "backend": options.backend, "cpu": options.cpu or None}
    for settings_class in (ProcessSettings, RunSettings, MeshSettings):
        for name, entry in resolve(settings_class, arguments).items():
            # The launcher knows the source of a value that it passes on in a variable.
            if entry.value is not None and settings.get(name, {}).get("value") != entry.value:
                settings[name] = _sourced(entry.value, entry.origin)
    effective = {
        "mixed_precision": state.mixed_precision,
        "backend": session.backend.name,
        "gradient_accumulation_steps": accumulation,
        "project_dir": options.project.project_dir,
        "num_processes": state.num_processes,
    }
    for name, value in effective.items():
        if name not in settings or settings[name]["value"] != value:
            source = "argument" if name in ("gradient_accumulation_steps", "project_dir") else "selected by the run"
            settings[name] = _sourced(value, source)
    settings.update(_of_fields("dataloader_config", options.loader))
    settings.update(_of_fields("project_config", options.project, without=("project_dir", "logging_dir", "iteration")))
    for handler in options.handlers:
        settings.update(_of_fields(type(handler).__name__, handler))
    if session.strategy.config is not None:
        settings.update(_of_fields(f"{session.backend.name}_config", session.strategy.config))
    others = ("rng_types", "device_placement", "step_scheduler_with_optimizer", "check_replicas_every", "goodput")
    for name in (*others, "straggler_report", "transforms", "plugins", "parallelism_config", "log_with"):
        value = getattr(options, name)
        if value not in (None, (), {}):
            settings[name] = _sourced(value, "the Accelerator")
    yield from sorted(settings.items())


def _sourced(value: Any, source: Any) -> dict[str, Any]:
    return {"value": _plain(value), "source": str(source)}


def _of_fields(table: str, settings: Any, without: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The fields of a settings object, under the name of its table."""
    if not dataclasses.is_dataclass(settings):
        return {table: _sourced(settings, "argument")}
    entries = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name, None)
        if value is not None and field.name not in without:
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            source = DEFAULT if value == default else "argument"
            entries[f"{table}.{field.name}"] = _sourced(value, source)
    return entries


def _plain(value: Any) -> Any:
    """A setting as JSON, alike in two processes: the class of an object without a text of its own."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    named = value if isinstance(value, type) or callable(value) else None
    if named is not None and hasattr(named, "__qualname__"):
        return f"{named.__module__}.{named.__qualname__}"
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text[:_LONGEST_VALUE]


def _devices(session: Session) -> dict[str, Any]:
    """The device of this process, and the versions of what drives it."""
    process = session.process
    described, software = "", {}
    try:
        described = process.family.description(process.device.index or 0)
        software = dict(process.family.software())
    except Exception as error:
        # A vendor's library may fail in its own ways, and the run goes on without it.
        software = {"unknown": str(error)}
    return {
        "family": process.family.name,
        "device": str(process.device),
        "description": described,
        "count": process.family.count(),
        "software": software,
        "torch": {
            "version": torch.__version__,
            "git": torch.version.git_version,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        },
        "processor": _processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(4096).splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _world(session: Session, launch: Mapping[str, Any]) -> dict[str, Any]:
    topology, mesh = session.process.topology, session.state.parallelism_config
    sizes = {} if mesh is None else {axis: mesh.size(axis) for axis in mesh.active_mesh_dims}
    return {
        "processes": session.state.num_processes,
        "processes_per_machine": topology.local_world_size,
        "mesh": sizes,
        "launcher": launch.get("launcher") or topology.scheme,
        "communication": session.process.backend,
        "host": socket.gethostname(),
    }


def _seeds(session: Session) -> dict[str, Any]:
    seed = torch.initial_seed()
    return {
        "torch": seed,
        # Without a seed of the script, torch draws one of 53 bits; scripts give 32 bits.
        "given": seed < 2**32,
        "data_seed": session.options.loader.data_seed,
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED"),
    }


def _data_set(loader: Any) -> dict[str, Any]:
    """Class, length and fingerprint of a loader's data set, and of the one that it wraps."""
    data_set = getattr(loader, "dataset", None)
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    description = {**_about(data_set), "batch_size": size if isinstance(size, int) else None}
    inner = getattr(data_set, "dataset", None)
    return {**description, "of": _about(inner)} if inner is not None else description


def _about(data_set: Any) -> dict[str, Any]:
    kind = type(data_set)
    try:
        length = len(data_set)
    except Exception:
        # A stream has none, and a script's own may raise anything.
        length = None
    # The data sets of Hugging Face have one of the data and of all that was done to them.
    fingerprint = getattr(data_set, "fingerprint", None) or getattr(data_set, "_fingerprint", None)
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "length": length,
        "fingerprint": fingerprint if isinstance(fingerprint, (str, int)) else None,
    }
