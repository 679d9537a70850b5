"""What the installed backends are, and whether they work on this machine; only the probe imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from accel_cli.launch.backends import backends
from accel_cli.launch.devices import ask_probe
from accel_cli.launch.outer_launch import PLACE_VARIABLES
from accel_plugins.manifest import Manifest
from accel_state.plugins import LoadedPlugin

__all__ = ("Row", "ask", "rows")


class Row(NamedTuple):
    """One backend that an installed package provides.

    Args:
        name: the name by which users select it.
        package, version: the distribution that provides it.
        tier: 1 is tested with real runs on a CPU, 2 is tested if a GPU is available, 3 has contract tests only; None is
            unknown.
        priority: of the backends that match a run, the one with the highest priority is selected.
        state: "default" for the backend of a single process without options, "available" for others that can run,
            "unusable" with an obstacle, "unknown" without a probe.
        obstacle: the reason why it cannot be used; empty if there is none.
        failure: the traceback of an error; empty if there is none.
    """

    name: str
    package: str
    version: str
    tier: int | None = None
    priority: int = 0
    state: str = "unknown"
    obstacle: str = ""
    failure: str = ""


def rows(answers: Mapping[str, Mapping[str, Any]] | None = None) -> list[Row]:
    """Every installed backend, sorted by name; `answers` is the result of `ask`."""
    answered = answers or {}
    listed = [_row(backend, answered.get(backend.name, {})) for backend in backends()]
    present = [row for row in listed if row.state == "available" and answered[row.name]["present"]]
    best = max((row.priority for row in present), default=None)
    return [row._replace(state="default") if row in present and row.priority == best else row for row in listed]


def _row(backend: LoadedPlugin[Manifest], answer: Mapping[str, Any]) -> Row:
    package, _, version = backend.origin.rpartition(" ")
    failure = "" if backend.unmet else backend.failure or answer.get("failed", "")
    obstacle = backend.obstacle or _last_line(failure)
    state = "unusable" if obstacle else "available" if answer else "unknown"
    row = Row(backend.name, package, version, state=state, obstacle=obstacle, failure=failure)
    return row if backend.value is None else row._replace(tier=backend.value.tier, priority=backend.value.priority)


def ask(environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Ask the backends in a separate process; return their answers, and the reason if that failed, else ""."""
    return ask_probe("backends", {name: value for name, value in environ.items() if name not in PLACE_VARIABLES})


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
