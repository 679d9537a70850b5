"""The backends that a launch can select: their switches, their settings, and what `distributed_type` stands for.

Everything is read from manifests and settings classes, without torch. A backend that cannot be loaded does not affect
the others: the launcher reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_cli.launch.devices import ask_probe
from accel_cli.launch.outer_launch import PLACE_VARIABLES
from accel_plugins.manifest import Axis, Manifest
from accel_plugins.resolve import BACKENDS
from accel_state.choices import SageMakerDistributedType
from accel_state.devices.specs import SPECS
from accel_state.errors import Conflict
from accel_state.labels import DistributedType
from accel_state.plugins import LoadedPlugin
from accel_state.settings.schema import BOOLEAN, Setting, field_of, setting, settings_of

__all__ = (
    "BackendRow",
    "Selection",
    "SwitchSettings",
    "ask_backends",
    "backend_rows",
    "backend_settings",
    "backends",
    "select",
    "switch_of_axes",
    "switches",
    "tables_of_switches",
)

_HEADING: Final = "Backend"
_MULTI_GPU: Final = "multi_gpu"
"""The switch that selects several devices and no backend."""

_ONE_PROCESS_LABEL: Final = DistributedType.NO.value
_CPU_LABEL: Final = SPECS["cpu"].label.value
_LABELS_WITHOUT_DEVICES: Final = frozenset(
    (_ONE_PROCESS_LABEL, _CPU_LABEL, *(label.value for label in SageMakerDistributedType))
)
"""Labels of runs that need no backend and no accelerator on this machine; SageMaker sets its own up itself."""

_LABELS_OF_DEVICES: Final = _LABELS_WITHOUT_DEVICES.union(spec.label.value for spec in SPECS.values())


@lru_cache(maxsize=1)
def backends() -> tuple[LoadedPlugin[Manifest], ...]:
    """Every installed backend with its settings class, sorted by name."""
    return tuple(
        backend.with_settings(backend.value.config) if backend.value else backend for backend in BACKENDS.loaded()
    )


def backend_settings() -> tuple[type, ...]:
    """Settings classes of the backends, each once."""
    return tuple(dict.fromkeys(one.settings for one in backends() if one.settings and settings_of(one.settings)))


def switches() -> dict[str, tuple[Manifest, ...]]:
    """For each switch, the manifests of the backends that it selects."""
    users: dict[str, tuple[Manifest, ...]] = {}
    for manifest in BACKENDS.values():
        if manifest.switch is not None:
            users[manifest.switch.name] = (*users.get(manifest.switch.name, ()), manifest)
    return users


def _switch_settings() -> type:
    several = setting(
        False,
        type=BOOLEAN,
        flag="--{name}",
        help="Run one process on each of several GPUs or other devices.",
        group=_HEADING,
    )
    of_backends = [
        (name, bool, field_of(users[0].switch._replace(group=_HEADING)))
        for name, users in switches().items()
        if users[0].switch is not None
    ]
    doc = "Switches that select backends or several devices; at most one may be set."
    return make_dataclass(
        "SwitchSettings",
        [(_MULTI_GPU, bool, several), *of_backends],
        namespace={"__doc__": doc, "__module__": __name__},
    )


SwitchSettings: Final = _switch_settings()


class Selection(NamedTuple):
    """What a switch or a `distributed_type` selects.

    Args:
        source: the setting that selects it.
        label: the `distributed_type`.
        manifests: the backends; empty if the devices imply the backend, or if no installed one has the label.
    """

    source: ResolvedSetting
    label: str
    manifests: tuple[Manifest, ...] = ()

    @property
    def switch(self) -> Setting | None:
        """The switch of the backends, or None."""
        return self.manifests[0].switch if self.manifests else None

    @property
    def by_switch(self) -> bool:
        """Whether the user gave a switch; without, a config file selects."""
        return bool(self.source.definition.flag)

    @property
    def alone(self) -> bool:
        """Whether it is a run of one process."""
        return self.label == _ONE_PROCESS_LABEL

    @property
    def on_cpu(self) -> bool:
        """Whether it is a run on the CPU."""
        return self.label == _CPU_LABEL

    @property
    def by_device(self) -> bool:
        """Whether the devices imply it, so that it needs no backend."""
        return not self.manifests and self.label in _LABELS_OF_DEVICES

    @property
    def on_devices(self) -> bool:
        """Whether it contradicts a run on the CPU."""
        if not self.manifests:
            return self.by_device and self.label not in _LABELS_WITHOUT_DEVICES
        families = self.manifests[0].families
        return bool(families) and "cpu" not in families

    @property
    def names(self) -> frozenset[str]:
        """Names of the backends."""
        return frozenset(manifest.name for manifest in self.manifests)


def select(settings: ResolvedSettings) -> Selection | None:
    """What the settings select, or None. A switch has priority over a file.

    Raises:
        Conflict: two switches are set.
    """
    users = switches()
    chosen = [settings[name] for name in (_MULTI_GPU, *users) if settings[name].value]
    if len(chosen) > 1:
        one, other = chosen[:2]
        raise Conflict(
            f"Cannot combine {one.definition.name} ({one.origin}) and {other.definition.name} ({other.origin}).",
            "Each selects a backend or devices, and a run has only one selection.",
            "Remove one of them.",
        )
    if chosen:
        manifests = users.get(chosen[0].definition.name, ())
        if not manifests:
            return Selection(chosen[0], DistributedType.MULTI_GPU.value)
        return Selection(chosen[0], _label(manifests[0]) or manifests[0].name, manifests)
    place = settings["distributed_type"]
    if place.value is None:
        return None
    return Selection(place, place.value, tuple(one for one in BACKENDS.values() if _label(one) == place.value))


def _label(manifest: Manifest) -> str | None:
    """The `distributed_type` of the backend's runs; None if the devices determine it."""
    return None if manifest.label is None else str(manifest.label.value)


def tables_of_switches() -> dict[str, str]:
    """For each table of settings in a config file, the switch of its backends."""
    tables: dict[str, str] = {}
    settings_by_name: Callable[[type], Mapping[str, Setting]] = settings_of
    for backend in backends():
        switch: Any = backend.value.switch if backend.value else None
        if switch is not None and backend.settings is not None:
            keys = [setting.key for setting in settings_by_name(backend.settings).values()]
            tables.update({key.partition(".")[0]: switch.name for key in keys if key and "." in key})
    return tables


def switch_of_axes() -> str:
    """The switch of the backend that the sizes of mesh axes imply."""
    dividing = [manifest for manifest in BACKENDS.values() if Axis.SHARD in manifest.axes]
    first = max(dividing, key=lambda manifest: manifest.priority, default=None)
    return "" if first is None or first.switch is None else str(first.switch.name)


# ---------------------------------------------------------------------- whether they work on this machine


class BackendRow(NamedTuple):
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


def backend_rows(answers: Mapping[str, Mapping[str, Any]] | None = None) -> list[BackendRow]:
    """Every installed backend, sorted by name; `answers` is the result of `ask_backends`."""
    answered = answers or {}
    listed = [_row(backend, answered.get(backend.name, {})) for backend in backends()]
    present = [row for row in listed if row.state == "available" and answered[row.name]["present"]]
    best = max((row.priority for row in present), default=None)
    return [row._replace(state="default") if row in present and row.priority == best else row for row in listed]


def _row(backend: LoadedPlugin[Manifest], answer: Mapping[str, Any]) -> BackendRow:
    package, _, version = backend.origin.rpartition(" ")
    failure = "" if backend.unmet else backend.failure or answer.get("failed", "")
    obstacle = backend.obstacle or _last_line(failure)
    state = "unusable" if obstacle else "available" if answer else "unknown"
    row = BackendRow(backend.name, package, version, state=state, obstacle=obstacle, failure=failure)
    return row if backend.value is None else row._replace(tier=backend.value.tier, priority=backend.value.priority)


def ask_backends(environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Ask the backends in a separate process; return their answers, and the reason if that failed, else ""."""
    return ask_probe("backends", {name: value for name, value in environ.items() if name not in PLACE_VARIABLES})


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
