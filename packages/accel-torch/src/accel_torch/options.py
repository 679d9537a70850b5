"""The arguments of an Accelerator, checked before the run starts."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from accel_data.config import DataLoaderConfiguration
from accel_plugins.checkpoint.config import ProjectConfiguration
from accel_plugins.resolve import check_config
from accel_state.errors import Conflict, SettingError, UnknownKind
from accel_state.gradient import GradientAccumulationPlugin
from accel_state.kwargs import KwargsHandler
from accel_state.labels import PrecisionType, RNGType
from accel_state.library import stack_level
from accel_state.run_state import precision_name
from accel_state.settings.environ import LAUNCH_RECORD, resolve
from accel_state.settings.integers import as_int
from accel_state.settings.run import COMPILE_VARIABLE, PROJECT_DIR_VARIABLE, RunSettings

if TYPE_CHECKING:
    from accel_plugins.transform import Transform
    from accel_plugins.transforms.config import TorchDynamoPlugin
    from accel_state.choices import DynamoBackend
    from accel_state.mesh import ParallelismConfig

__all__ = (
    "UNSET",
    "Options",
    "accumulation_plugin",
    "backend_config",
    "checked_handlers",
    "checked_interval",
    "checked_placement",
    "checked_trackers",
    "checked_transforms",
    "compile_settings",
    "generator_names",
    "given_precision",
    "goodput_enabled",
    "is_run_recorded",
    "loader_configuration",
    "project_configuration",
    "resolve_alias",
    "without_none",
)

H = TypeVar("H", bound=KwargsHandler)

UNSET: Final[Any] = object()
"""Default of keywords that moved to `DataLoaderConfiguration`, which distinguishes them from given ones."""


class Options(NamedTuple):
    """The arguments of one Accelerator.

    Args:
        cpu: use the CPU even if another device is present.
        mixed_precision: name of the precision that the argument selects, or None.
        backend: name of the backend that the argument selects, or None.
        backend_config: settings object of a backend, or None.
        device_placement: move models and batches to the device.
        loader: how loaders are prepared.
        splits_by_argument: whether `split_batches=True` was an argument of the Accelerator, and not of `loader`.
        project: the folders of checkpoints and logs.
        accumulation: how gradients are accumulated.
        rng_types: random-number generators that loaders synchronise at the start of each epoch.
        log_with: trackers, by name or as instances.
        step_scheduler_with_optimizer: whether a scheduler steps only when its optimizer steps.
        handlers: settings objects such as `AutocastKwargs`.
        backends: the given settings objects of backends, by argument name.
        plugins: the given settings objects of model transforms, by argument name.
        parallelism_config: the sizes of the mesh axes, or None.
        transforms: the given transforms of every model.
        check_replicas_every: see `checked_interval`.
        straggler_report: whether to report at the end how each process spent its time.
        goodput: whether to record how each process spends its time in the project folder.
        records_run: see `is_run_recorded`.
    """

    cpu: bool
    mixed_precision: str | None
    backend: str | None
    backend_config: Any
    device_placement: bool
    loader: DataLoaderConfiguration
    project: ProjectConfiguration
    accumulation: GradientAccumulationPlugin
    rng_types: tuple[str, ...]
    log_with: tuple[Any, ...]
    step_scheduler_with_optimizer: bool
    handlers: tuple[KwargsHandler, ...] = ()
    backends: Mapping[str, Any] = MappingProxyType({})
    plugins: Mapping[str, Any] = MappingProxyType({})
    parallelism_config: ParallelismConfig | None = None
    transforms: tuple[Transform, ...] = ()
    check_replicas_every: int | None = None
    straggler_report: bool = False
    goodput: bool = False
    splits_by_argument: bool = False
    records_run: bool = False

    def handler(self, kind: type[H]) -> H | None:
        """The settings object of a class, or None."""
        return next((handler for handler in self.handlers if isinstance(handler, kind)), None)


def given_precision(mixed_precision: PrecisionType | str | None) -> str | None:
    """The name of the precision that the argument selects; None if it is not given.

    Raises:
        SettingError: there is no such precision.
    """
    return None if mixed_precision is None else precision_name(mixed_precision)


def loader_configuration(
    configuration: DataLoaderConfiguration | None, moved: Mapping[str, Any]
) -> DataLoaderConfiguration:
    """The configuration of loaders, with keywords that moved into it.

    Args:
        configuration: the configuration, or None.
        moved: keywords by name; those that are `UNSET` were not given.

    Raises:
        Conflict: a keyword contradicts the configuration.
    """
    keywords = {name: value for name, value in moved.items() if value is not UNSET}
    if keywords:
        named = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
        warnings.warn(
            f"Accelerator({named}) is deprecated; give DataLoaderConfiguration({named}) as dataloader_config.",
            FutureWarning,
            stacklevel=stack_level(),
        )
    if configuration is None:
        return DataLoaderConfiguration(**keywords)
    defaults = DataLoaderConfiguration()
    for name, value in keywords.items():
        configured = getattr(configuration, name)
        if configured not in (value, getattr(defaults, name)):
            raise Conflict(
                f"Cannot construct an Accelerator with {name}={value!r}.",
                f"The dataloader_config has {name}={configured!r}.",
                f"Give {name} in the DataLoaderConfiguration only.",
            )
    return dataclasses.replace(configuration, **keywords)


def project_configuration(
    configuration: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """The project configuration. If it has no folder, that is `project_dir`, or the folder given to `accel launch`."""
    configuration = ProjectConfiguration() if configuration is None else configuration
    folder = os.environ.get(PROJECT_DIR_VARIABLE) if project_dir is None else project_dir
    if folder and configuration.project_dir is None:
        configuration.set_directories(os.fspath(folder))
    return configuration


def is_run_recorded(
    project: ProjectConfiguration, project_dir: str | os.PathLike[str] | None, trackers: Sequence[Any]
) -> bool:
    """Whether the project folder gets the record of the run.

    It does if the folder is an argument of the Accelerator, or the run has trackers, or `accel launch` started it. A
    ProjectConfiguration alone may name a folder for checkpoints only, whose entries scripts count.
    """
    is_one_to_look_at = project_dir is not None or bool(trackers) or LAUNCH_RECORD in os.environ
    return project.project_dir is not None and is_one_to_look_at


def accumulation_plugin(
    plugin: GradientAccumulationPlugin | None, steps: int, loader: DataLoaderConfiguration
) -> GradientAccumulationPlugin:
    """The accumulation settings: the plugin, else the number of steps, else the environment variable.

    Raises:
        Conflict: the plugin and another argument were given.
        SettingError: the number of steps is invalid.
    """
    if plugin is not None and loader.gradient_accumulation_kwargs is not None:
        raise Conflict(
            "Cannot combine gradient_accumulation_plugin and DataLoaderConfiguration.gradient_accumulation_kwargs.",
            "Both set the same option.",
            "Give the plugin only.",
        )
    if plugin is not None and steps != 1:
        raise Conflict(
            f"Cannot combine gradient_accumulation_steps={steps!r} and a gradient_accumulation_plugin.",
            "Both set the same option.",
            "Give GradientAccumulationPlugin(num_steps=...) only.",
        )
    plugin = plugin or GradientAccumulationPlugin(**(loader.gradient_accumulation_kwargs or {}))
    if plugin.num_steps is not None:
        return plugin
    arguments = {"gradient_accumulation_steps": steps if steps != 1 else None}
    return dataclasses.replace(plugin, num_steps=resolve(RunSettings, arguments)["gradient_accumulation_steps"].value)


def generator_names(rng_types: Iterable[str | RNGType] | None) -> tuple[str, ...]:
    """The names of the generators to synchronise; by default the sampler's.

    Raises:
        SettingError: there is no such generator.
    """
    names = tuple(str(name) for name in rng_types) if rng_types is not None else (str(RNGType.GENERATOR),)
    for name in names:
        if name not in RNGType:
            raise SettingError(
                f"Cannot synchronise rng_types={list(names)}.",
                f"There is no generator {name!r}.",
                f"Choose from {', '.join(RNGType.list())}.",
            )
    return names


def checked_placement(device_placement: bool) -> bool:
    """Whether `prepare` moves objects to the device of the process.

    Raises:
        UnknownKind: it is a text; it is the first argument, where others expect the name of a device.
    """
    if isinstance(device_placement, str):
        raise UnknownKind(
            f"Cannot use device_placement={device_placement!r}.",
            "It says whether prepare() moves objects to the device, which each process chooses by itself.",
            "Leave it out; Accelerator(cpu=True) and `accel launch --cpu` choose the CPU.",
        )
    return device_placement


def checked_handlers(handlers: Iterable[KwargsHandler] | None) -> tuple[KwargsHandler, ...]:
    """Settings objects, at most one of each kind.

    Raises:
        UnknownKind: one of them is not a settings object, or they are not in a list.
        Conflict: two of them have the same type.
    """
    if isinstance(handlers, KwargsHandler):
        raise UnknownKind(
            f"Cannot use {type(handlers).__name__}(...) as kwargs_handlers.",
            "It is one settings object, and not a list of them.",
            f"Write kwargs_handlers=[{type(handlers).__name__}(...)].",
        )
    checked: list[KwargsHandler] = []
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise UnknownKind(
                f"Cannot use {handler!r} in kwargs_handlers.",
                f"It is of type {type(handler).__name__}, not a KwargsHandler.",
                "Give settings objects such as AutocastKwargs(...), or leave it out.",
            )
        if any(type(other) is type(handler) for other in checked):
            raise Conflict(
                f"Cannot use two {type(handler).__name__} in kwargs_handlers.",
                "Only one of each type can be used.",
                "Give one.",
            )
        checked.append(handler)
    return tuple(checked)


def resolve_alias(name: str, value: Any, older_name: str, older: Any) -> Any:
    """The value of an argument with two names.

    Raises:
        Conflict: both have a value.
    """
    if value is not None and older is not None:
        raise Conflict(
            f"Cannot combine {name} and {older_name}.",
            "They are two names of one argument.",
            f"Give {name} only.",
        )
    return older if value is None else value


def checked_interval(steps: int | None) -> int | None:
    """Optimizer steps between two comparisons of replicas; 0 disables them, None compares once after the second step.

    Raises:
        SettingError: not an int of at least 0.
    """
    interval = as_int(steps)
    if steps is not None and (interval is None or interval < 0):
        raise SettingError(
            f"Cannot use check_replicas_every={steps!r}.",
            "The value must be an int of at least 0: the optimizer steps between two comparisons, or 0 for none.",
            "Give for example 100, or leave it out.",
        )
    return interval


def goodput_enabled(goodput: bool | None) -> bool:
    """Whether to record goodput: the argument, or if it is None, whether `accel launch` was given a project folder.

    Raises:
        SettingError: not a bool or None.
    """
    if goodput is not None and not isinstance(goodput, bool):
        raise SettingError(
            f"Cannot use goodput={goodput!r}.",
            "The value must be a bool or None: whether to record how each process spends its time.",
            "Remove it to record runs that were started with accel launch --project_dir.",
        )
    return bool(os.environ.get(PROJECT_DIR_VARIABLE)) if goodput is None else goodput


def without_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def backend_config(configs: Mapping[str, Any]) -> Any:
    """The settings object of a backend among the arguments, or None.

    Raises:
        Conflict: there are several, or it is not a settings object of an installed backend.
    """
    chosen = without_none(configs)
    if len(chosen) > 1:
        raise Conflict(
            f"Cannot combine {' and '.join(chosen)}.",
            "Each selects a backend, and a run has one backend.",
            "Give one of them.",
        )
    for name, config in chosen.items():
        check_config(name, config)
    return next(iter(chosen.values()), None)


def compile_settings(plugin: TorchDynamoPlugin | None, backend: DynamoBackend | str | None) -> TorchDynamoPlugin | None:
    """The compile settings: the plugin, else the backend's name, else environment variables; None without any.

    Raises:
        Conflict: plugin and name were both given.
        SettingError: there is no such backend.
    """
    if plugin is not None and backend is not None:
        raise Conflict(
            f"Cannot combine dynamo_backend={str(backend)!r} and a dynamo_plugin.",
            "Both set the same option.",
            "Give TorchDynamoPlugin(backend=...) only.",
        )
    if plugin is None and backend is None and not os.environ.get(COMPILE_VARIABLE, "").strip():
        return None
    from accel_plugins.transforms.config import TorchDynamoPlugin
    from accel_state.choices import DynamoBackend

    chosen = plugin or TorchDynamoPlugin(backend=backend)  # type: ignore[arg-type]
    return None if chosen.backend is DynamoBackend.NO else chosen


def checked_transforms(transforms: Iterable[Transform] | None) -> tuple[Transform, ...]:
    """The transforms of every model, checked.

    Raises:
        UnknownKind: one of them is not a transform.
    """
    checked = tuple(transforms or ())
    for one in checked:
        if not callable(getattr(one, "apply", None)):
            raise UnknownKind(
                f"Cannot use {one!r} in transforms.",
                f"It is of type {type(one).__name__}, not a Transform of accel_plugins.",
                "Give objects such as ActivationCheckpoint(), or leave it out.",
            )
    return checked


def checked_trackers(log_with: Any, logging_dir: str | None) -> tuple[Any, ...]:
    """The trackers as a tuple; checked here, since `init_trackers` may be called much later.

    Raises:
        SettingError: a name is unknown, or a tracker needs a folder and has none.
        Missing: the library of a tracker is not installed.
    """
    if log_with is None:
        return ()
    from accel_tracking.registry import filter_trackers

    trackers = tuple(log_with) if isinstance(log_with, (list, tuple)) else (log_with,)
    filter_trackers(trackers, logging_dir)
    return trackers
