"""What a run trains with: the backends or the devices that a switch, or `distributed_type` in a file, selects.

Everything is read from manifests and settings classes, without torch. A backend that cannot be loaded does not affect
the others: the launcher reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import make_dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_plugins.manifest import Axis, Manifest
from accel_plugins.resolve import BACKENDS
from accel_plugins.separate import install_remedy, package_of
from accel_state.choices import SageMakerDistributedType
from accel_state.devices.specs import SPECS
from accel_state.errors import Conflict, Missing, SettingError
from accel_state.labels import DistributedType
from accel_state.plugins import LoadedPlugin
from accel_state.settings.run import RunSettings
from accel_state.settings.schema import BOOLEAN, Setting, field_of, setting, settings_of

__all__ = (
    "Selection",
    "SwitchSettings",
    "backend_settings",
    "backends",
    "check_requirements",
    "check_selection",
    "check_several_devices",
    "given_sizes",
    "idle",
    "idle_tables",
    "implied_backend",
    "is_shared",
    "launched_classes",
    "selection_of",
    "selection_origins",
    "selection_variables",
    "switches",
)

_GROUP: Final = "Kind of run"
_MESH: Final = "parallelism_config."
_EIGHT_BITS: Final = ("fp8_config", "fp8")
_SHARED: Final = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",)
_SEVERAL: Final = "multi_gpu"
"""The switch that selects several devices and no backend."""

_ONE: Final = DistributedType.NO.value
_CPU: Final = SPECS["cpu"].label.value
_WITHOUT_DEVICES: Final = frozenset((_ONE, _CPU, *(label.value for label in SageMakerDistributedType)))
"""Labels of runs that need no backend and no accelerator on this machine; SageMaker sets its own up itself."""

_OF_DEVICES: Final = _WITHOUT_DEVICES.union(spec.label.value for spec in SPECS.values())


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
        group=_GROUP,
    )
    of_backends = [
        (name, bool, field_of(users[0].switch._replace(group=_GROUP)))
        for name, users in switches().items()
        if users[0].switch is not None
    ]
    doc = "Switches that select backends or several devices; at most one may be set."
    return make_dataclass(
        "SwitchSettings",
        [(_SEVERAL, bool, several), *of_backends],
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
    def alone(self) -> bool:
        """Whether it is a run of one process."""
        return self.label == _ONE

    @property
    def on_cpu(self) -> bool:
        """Whether it is a run on the CPU."""
        return self.label == _CPU

    @property
    def by_device(self) -> bool:
        """Whether the devices imply it, so that it needs no backend."""
        return not self.manifests and self.label in _OF_DEVICES

    @property
    def on_devices(self) -> bool:
        """Whether it contradicts a run on the CPU."""
        if not self.manifests:
            return self.by_device and self.label not in _WITHOUT_DEVICES
        families = self.manifests[0].families
        return bool(families) and "cpu" not in families

    @property
    def names(self) -> frozenset[str]:
        """Names of the backends."""
        return frozenset(manifest.name for manifest in self.manifests)


def selection_of(resolved: ResolvedSettings) -> Selection | None:
    """What the settings select, or None. A switch has priority over a file.

    Raises:
        Conflict: the settings select two things.
    """
    users = switches()
    chosen = [resolved[name] for name in (_SEVERAL, *users) if resolved[name].value]
    if len(chosen) > 1:
        one, other = chosen[:2]
        raise Conflict(
            f"Cannot combine {one.setting.name} ({one.origin}) and {other.setting.name} ({other.origin}).",
            "A run can have only one kind.",
            "Remove one of them.",
        )
    if chosen:
        manifests = users.get(chosen[0].setting.name, ())
        if not manifests:
            return Selection(chosen[0], DistributedType.MULTI_GPU.value)
        return Selection(chosen[0], _label(manifests[0]) or manifests[0].name, manifests)
    place = resolved["distributed_type"]
    if place.value is None:
        return None
    return Selection(place, place.value, tuple(one for one in BACKENDS.values() if _label(one) == place.value))


def _label(manifest: Manifest) -> str | None:
    """The `distributed_type` of the backend's runs; None if the devices determine it."""
    return None if manifest.label is None else str(manifest.label.value)


def implied_backend(resolved: ResolvedSettings) -> str | None:
    """Name of the backend that the selection implies; None if none does, or one of several versions of an engine.

    Raises:
        Missing: no installed backend has the selected label.
    """
    selection = selection_of(resolved)
    if selection is None or selection.by_device or resolved["backend"].value is not None:
        return None
    if selection.manifests:
        return selection.manifests[0].name if len(selection.manifests) == 1 else None
    package = package_of(selection.label)
    raise Missing(
        f"Cannot start a run with distributed_type {selection.label} ({selection.source.origin}).",
        "No installed backend supports it.",
        "Install a package that provides one (`accel backends` lists what is installed), or remove the option."
        if package is None
        else install_remedy(package),
    )


def check_selection(resolved: ResolvedSettings) -> None:
    """Check that a switch does not contradict other settings.

    Raises:
        Conflict: it needs several devices, but devices are disabled, or there is only one.
    """
    selection = selection_of(resolved)
    if selection is None or not selection.on_devices or not selection.source.setting.flag:
        return
    source, cpu, processes = selection.source, resolved["cpu"], resolved["num_processes"]
    # The variable selects the CPU for every run on a machine, including runs on several devices.
    if cpu.value and not (selection.by_device and cpu.origin.startswith("$")):
        raise Conflict(
            f"Cannot combine {source.setting.name} ({source.origin}) and {cpu.setting.name} ({cpu.origin}).",
            "One selects accelerators, the other the CPU.",
            "Remove one of them.",
        )
    if selection.by_device and processes.value == 1 and processes.given:
        raise Conflict(
            f"Cannot combine {source.setting.name} ({source.origin}) and num_processes=1 ({processes.origin}).",
            "One process uses only one device.",
            "Set --num_processes to 2 or more, or remove the switch.",
        )


def check_several_devices(resolved: ResolvedSettings, processes: int) -> None:
    """Check that the machine has several devices if a switch needs them.

    Raises:
        SettingError: the machine has one device, and the settings have no number of processes.
    """
    selection = selection_of(resolved)
    if selection is None or processes > 1 or not (selection.by_device and selection.on_devices):
        return
    if selection.source.setting.flag:
        raise SettingError(
            f"Cannot launch with {selection.source.setting.name} ({selection.source.origin}).",
            "This machine has fewer than two devices.",
            "Remove the switch, or set --num_processes.",
        )


def check_requirements(resolved: ResolvedSettings) -> None:
    """Check that the backend can start: its requirements are installed, and it can be loaded.

    If several backends support the request, one that can start is enough.

    Raises:
        Missing: a required package is absent or too old.
        PluginError: the backend could not be loaded.
    """
    named, selection = resolved["backend"], selection_of(resolved)
    names = {named.value} if named.value is not None else selection.names if selection is not None else frozenset()
    origin = named.origin if named.value is not None or selection is None else selection.source.origin
    chosen = [backend for backend in backends() if backend.name in names]
    errors = [backend.error(f"Cannot start the backend {backend.name!r} ({origin}).") for backend in chosen]
    if errors and errors[0] is not None and None not in errors:
        raise errors[0] from chosen[0].cause


def selection_variables(resolved: ResolvedSettings) -> dict[str, str]:
    """Variables that pass the selection and the axes of its `ParallelismConfig` to the processes."""
    selection, mesh = selection_of(resolved), resolved["use_parallelism_config"]
    switch = selection.switch if selection is not None else None
    variables = {switch.variable: "true"} if switch is not None and switch.variable else {}
    if not mesh.given and given_sizes(resolved):
        variables[str(mesh.setting.variable)] = "true"
    return variables


def selection_origins(resolved: ResolvedSettings) -> dict[str, str]:
    """The setting that the user gave, for each of `selection_variables` and for the implied backend."""
    selection, sizes = selection_of(resolved), given_sizes(resolved)
    origins = {}
    if selection is not None:
        origins = dict.fromkeys(selection_variables(resolved), selection.source.origin)
        origins[str(resolved["backend"].setting.variable)] = selection.source.origin
    if sizes:
        origins[str(resolved["use_parallelism_config"].setting.variable)] = sizes[0].origin
    return origins


def launched_classes(resolved: ResolvedSettings) -> tuple[type, ...]:
    """Settings classes with variables that other libraries read in this run."""
    selection = selection_of(resolved)
    if selection is None or given_sizes(resolved):
        # Axes select the version of an engine.
        return (RunSettings,)
    return (RunSettings, *(one.settings for one in backends() if one.settings and one.name in selection.names))


def given_sizes(resolved: ResolvedSettings) -> list[ResolvedSetting]:
    """The given sizes and implementations of mesh axes."""
    return [effect for name, effect in resolved.items() if name.startswith(_MESH) and effect.given]


def idle_tables(resolved: ResolvedSettings) -> dict[str, str]:
    """For each table of settings that this run does not read: the option with which a run would read it."""
    selection, named = selection_of(resolved), resolved["backend"].value
    names = {*(selection.names if selection is not None else ()), named}
    chosen = {name for name, users in switches().items() if not names.isdisjoint(one.name for one in users)}
    if given_sizes(resolved):
        chosen.add(_chosen_by_axes())
    idle = {table: f"--{switch}" for table, switch in _tables().items() if switch not in chosen}
    if resolved["mixed_precision"].value != _EIGHT_BITS[1]:
        idle[_EIGHT_BITS[0]] = f"--mixed_precision {_EIGHT_BITS[1]}"
    return idle


def idle(resolved: ResolvedSettings) -> Iterator[tuple[str, ResolvedSetting, str]]:
    """Options of engines that are not in use: label, setting, and what would use it."""
    tables = idle_tables(resolved)
    for name, effect in resolved.items():
        table = name.partition(".")[0]
        if effect.given and table in tables and not is_shared(effect):
            yield name, effect, tables[table]


def is_shared(effect: ResolvedSetting) -> bool:
    """Whether a setting of an engine passes its value on in a variable that runs without the engine read too."""
    return effect.setting.variable in _SHARED


def _tables() -> dict[str, str]:
    """For each table of settings, the switch of its backends."""
    tables: dict[str, str] = {}
    known: Callable[[type], Mapping[str, Setting]] = settings_of
    for backend in backends():
        switch: Any = backend.value.switch if backend.value else None
        if switch is not None and backend.settings is not None:
            keys = [setting.key for setting in known(backend.settings).values()]
            tables.update({key.partition(".")[0]: switch.name for key in keys if key and "." in key})
    return tables


def _chosen_by_axes() -> str:
    """The switch of the backend that the sizes of mesh axes imply."""
    dividing = [manifest for manifest in BACKENDS.values() if Axis.SHARD in manifest.axes]
    first = max(dividing, key=lambda manifest: manifest.priority, default=None)
    return "" if first is None or first.switch is None else str(first.switch.name)
