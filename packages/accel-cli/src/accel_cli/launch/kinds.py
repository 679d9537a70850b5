"""Kinds of runs: which one `distributed_type` in a file, or a switch of a manifest, selects.

A switch has priority over the file. A table row defines each kind; no other code compares the name of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_cli.launch.backends import backends, label_of, switches
from accel_plugins.manifest import Axis
from accel_plugins.resolve import BACKENDS
from accel_state.choices import SageMakerDistributedType
from accel_state.errors import Conflict, SettingError
from accel_state.labels import DistributedType
from accel_state.settings.run import RunSettings
from accel_state.settings.schema import BOOLEAN, Setting, field_of, setting, settings_of

__all__ = (
    "Kind",
    "KindSettings",
    "check_devices_of_kind",
    "check_kind",
    "check_requirements",
    "given_sizes",
    "idle",
    "idle_tables",
    "is_shared",
    "kind_of",
    "kind_origins",
    "kind_variables",
    "launched_classes",
    "named_by",
)

_GROUP: Final = "Kind of run"
_MESH: Final = "parallelism_config."
_EIGHT_BITS: Final = ("fp8_config", "fp8")
_SHARED: Final = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",)
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


def _kind_settings() -> type:
    of_devices = setting(
        False,
        type=BOOLEAN,
        flag="--{name}",
        help="Run one process on each of several GPUs or other devices.",
        group=_GROUP,
    )
    of_backends = [(name, bool, field_of(users[0].switch._replace(group=_GROUP))) for name, users in switches().items()]
    return make_dataclass(
        "KindSettings",
        [("multi_gpu", bool, of_devices), *of_backends],
        namespace={
            "__doc__": "Switches that select the kind of run; at most one may be set.",
            "__module__": __name__,
        },
    )


KindSettings: Final = _kind_settings()


class Kind(NamedTuple):
    """The properties of a kind of run.

    Args:
        label: its name in `distributed_type`.
        switch: the setting of `KindSettings` that selects it, or empty.
        alone: whether the default number of processes is one.
        by_device: whether the devices imply it, so that it needs no backend.
        on_cpu: whether it is a run on the CPU.
        on_devices: whether it contradicts a run on the CPU.
        variables: variables that pass it to the processes.
        backends: names of the backends that the switch selects.
        imports_from_folder: whether scripts may import modules from the working directory.
    """

    label: str
    switch: str = ""
    alone: bool = False
    by_device: bool = False
    on_cpu: bool = False
    on_devices: bool = False
    variables: Mapping[str, str] = _NONE
    backends: frozenset[str] = frozenset()
    imports_from_folder: bool = False


def _of_backends(switch: str, users: Sequence[Any]) -> Kind:
    variable = users[0].switch.variable
    variables = {variable: "true"} if variable else {}
    names = frozenset(manifest.name for manifest in users)
    families = users[0].families
    on_devices = bool(families) and "cpu" not in families
    return Kind(
        label_of(users[0]) or users[0].name,
        switch,
        on_devices=on_devices,
        variables=variables,
        backends=names,
        imports_from_folder=any(manifest.imports_from_folder for manifest in users),
    )


_OF_DEVICES: Final = (
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_MLU,
    DistributedType.MULTI_SDAA,
    DistributedType.MULTI_MUSA,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_HPU,
    DistributedType.MULTI_NEURON,
)

# SageMaker sets this up itself.
_OF_SAGEMAKER: Final = (SageMakerDistributedType.DATA_PARALLEL, SageMakerDistributedType.MODEL_PARALLEL)

_KINDS: Final = (
    Kind(DistributedType.NO.value, alone=True, by_device=True),
    Kind(DistributedType.MULTI_CPU.value, by_device=True, on_cpu=True),
    Kind(DistributedType.MULTI_GPU.value, "multi_gpu", by_device=True, on_devices=True),
    *(Kind(label.value, by_device=True, on_devices=True) for label in _OF_DEVICES),
    *(_of_backends(name, users) for name, users in switches().items()),
    *(Kind(label.value, by_device=True) for label in _OF_SAGEMAKER),
)


def kind_of(resolved: ResolvedSettings) -> tuple[Kind, ResolvedSetting] | None:
    """The kind of run that the settings select, with the setting that selects it, or None.

    Raises:
        Conflict: the settings select two kinds.
    """
    asked = [(kind, resolved[kind.switch]) for kind in _KINDS if kind.switch]
    asked = [(kind, effect) for kind, effect in asked if effect.value]
    if len(asked) > 1:
        (_, one), (_, other) = asked[:2]
        raise Conflict(
            f"Cannot combine {one.setting.name} ({one.origin}) and {other.setting.name} ({other.origin}).",
            "A run can have only one kind.",
            "Remove one of them.",
        )
    if asked:
        return asked[0]
    place = resolved["distributed_type"]
    of_label = (kind for kind in _KINDS if kind.label == place.value)
    return (next(of_label, Kind(place.value)), place) if place.value is not None else None


def named_by(kind: Kind, effect: ResolvedSetting) -> frozenset[str]:
    """Names of the backends that a switch selects; empty for a kind of run that a file selects."""
    return kind.backends if effect.setting.name == kind.switch else frozenset()


def check_kind(resolved: ResolvedSettings) -> None:
    """Check that the kind of run does not contradict other settings.

    Raises:
        Conflict: it needs several devices, but devices are disabled, or there is only one.
    """
    found = kind_of(resolved)
    if found is None or not found[0].on_devices or not found[1].setting.flag:
        return
    kind, effect = found
    cpu, processes = resolved["cpu"], resolved["num_processes"]
    # The variable selects the CPU for every run on a machine, including runs on several devices.
    if cpu.value and not (kind.by_device and cpu.origin.startswith("$")):
        raise Conflict(
            f"Cannot combine {effect.setting.name} ({effect.origin}) and {cpu.setting.name} ({cpu.origin}).",
            "One selects accelerators, the other the CPU.",
            "Remove one of them.",
        )
    if kind.by_device and processes.value == 1 and processes.given:
        raise Conflict(
            f"Cannot combine {effect.setting.name} ({effect.origin}) and num_processes=1 ({processes.origin}).",
            "One process uses only one device.",
            "Set --num_processes to 2 or more, or remove the switch.",
        )


def kind_variables(resolved: ResolvedSettings) -> dict[str, str]:
    """Variables that pass the kind of run and the axes of its `ParallelismConfig` to the processes."""
    found = kind_of(resolved)
    variables = dict(found[0].variables) if found is not None else {}
    mesh = resolved["use_parallelism_config"]
    if not mesh.given and given_sizes(resolved):
        variables[str(mesh.setting.variable)] = "true"
    return variables


def launched_classes(resolved: ResolvedSettings) -> tuple[type, ...]:
    """Settings classes with variables that other libraries read in a run of this kind."""
    found = kind_of(resolved)
    if found is None or given_sizes(resolved):
        # Axes select the version of an engine.
        return (RunSettings,)
    return (RunSettings, *(one.settings for one in backends() if one.settings and one.name in found[0].backends))


def kind_origins(resolved: ResolvedSettings) -> dict[str, str]:
    """The setting that the user gave, for each of `kind_variables`."""
    found, sizes = kind_of(resolved), given_sizes(resolved)
    origins = dict.fromkeys(found[0].variables, found[1].origin) if found is not None else {}
    if sizes:
        origins[str(resolved["use_parallelism_config"].setting.variable)] = sizes[0].origin
    return origins


def given_sizes(resolved: ResolvedSettings) -> list[ResolvedSetting]:
    """The given sizes and implementations of mesh axes."""
    return [effect for name, effect in resolved.items() if name.startswith(_MESH) and effect.given]


def idle_tables(resolved: ResolvedSettings) -> dict[str, str]:
    """For each table of settings that this run does not read: the option with which a run would read it."""
    found = kind_of(resolved)
    chosen = {found[0].switch if found is not None else ""}
    chosen |= {name for name, users in switches().items() if resolved["backend"].value in {one.name for one in users}}
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
    found: dict[str, str] = {}
    for backend in backends():
        switch = backend.value.switch if backend.value else None
        if switch is not None and backend.settings is not None:
            known: Callable[[type], Mapping[str, Setting]] = settings_of
            keys = [setting.key for setting in known(backend.settings).values()]
            found.update({key.partition(".")[0]: switch.name for key in keys if key and "." in key})
    return found


def _chosen_by_axes() -> str:
    """The switch of the backend that the sizes of mesh axes imply."""
    dividing = [manifest for manifest in BACKENDS.values() if Axis.SHARD in manifest.axes]
    first = max(dividing, key=lambda manifest: manifest.priority, default=None)
    return "" if first is None or first.switch is None else str(first.switch.name)


def check_requirements(settings: ResolvedSettings) -> None:
    """Check that the backend can start: its requirements are installed, and it can be loaded.

    If several backends support the request, one that can start is enough.

    Raises:
        Missing: a required package is absent or too old.
        PluginError: the backend could not be loaded.
    """
    named, asked = settings["backend"], kind_of(settings)
    if named.value is not None:
        origin = named.origin
        chosen = [backend for backend in backends() if backend.name == named.value]
    elif asked is not None and not asked[0].by_device:
        origin = asked[1].origin
        names = named_by(*asked)
        chosen = [
            backend
            for backend in backends()
            if backend.value and (backend.name in names if names else label_of(backend.value) == asked[0].label)
        ]
    else:
        return
    errors = [backend.error(f"Cannot start the backend {backend.name!r} ({origin}).") for backend in chosen]
    if errors and errors[0] is not None and None not in errors:
        raise errors[0] from chosen[0].cause


def check_devices_of_kind(resolved: ResolvedSettings, processes: int) -> None:
    """Check that the machine has several devices if the kind of run needs them.

    Raises:
        SettingError: the machine has one device, and the settings have no number of processes.
    """
    found = kind_of(resolved)
    if found is None or not (found[0].by_device and found[0].on_devices and found[1].setting.flag) or processes > 1:
        return
    raise SettingError(
        f"Cannot launch with {found[1].setting.name} ({found[1].origin}).",
        "This machine has fewer than two devices.",
        "Remove the switch, or set --num_processes.",
    )
