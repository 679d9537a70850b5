"""Find the installed backends, choose the one of the run, and create its strategy.

The choice follows this order: the argument, a settings object that belongs to a backend, the environment. Without any
of these, it is the backend with the highest priority among those that are present; if that one does not support the
axes of the `ParallelismConfig`, it is the one with the highest priority that does. All processes must choose the same
one. Importing this module imports neither torch nor any backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from accel_plugins.manifest import OLDEST_PROTOCOL, PROTOCOL, Manifest
from accel_plugins.separate import check_variables
from accel_state.errors import Conflict, NotOffered, PluginError, SettingError
from accel_state.library import stack_level
from accel_state.plugins import Interface, PluginGroup, contained
from accel_state.settings.environ import from_environment, resolve
from accel_state.settings.run import RunSettings

if TYPE_CHECKING:
    from accel_plugins.context import Context
    from accel_plugins.strategy import Strategy
    from accel_state.current import Process
    from accel_state.mesh import ParallelismConfig

__all__ = (
    "BACKENDS",
    "build",
    "check_config",
    "choose",
    "config_among",
    "configured_precision",
    "for_distributed_models",
    "settings",
    "strategy_class",
)

BACKENDS: Final[PluginGroup[Manifest]] = PluginGroup(
    "accel.backends",
    "backend",
    interface=Interface(instance_of=Manifest, named=True, versions=(OLDEST_PROTOCOL, PROTOCOL)),
)
"""The installed backends."""


def choose(
    name: str | None = None,
    config: object | None = None,
    process: Process | None = None,
    parallelism_config: ParallelismConfig | None = None,
) -> Manifest:
    """Choose the backend of the run; every process must call this.

    Args:
        name: the backend that the user passed as argument.
        config: a settings object, or several by name; selects the backend with this settings class.
        process: this process; None: the current one.
        parallelism_config: the axes of the run; if no backend is named, one that supports them is chosen.

    Raises:
        SettingError: no backend has that name, or the processes chose different ones.
        Conflict: several backends have the same priority, or the chosen one does not support the axes.
        PluginError: the chosen backend cannot be loaded, or several packages provide it.
        Missing: a package that the backend requires is not installed.
    """
    if process is None:
        from accel_state import current

        process = current.process_or_start()
    if process.world_size == 1:
        return _pick_for_axes(name, config, process, parallelism_config)
    from accel_ops.agreement import StoreBarrier

    patience = process.transport.timeout.total_seconds()
    barrier = StoreBarrier(process, "backend", "Cannot choose the backend of the run.", patience, SettingError)
    with barrier.reporting():
        manifest = _pick_for_axes(name, config, process, parallelism_config)
    barrier.wait("choice", manifest.name, _same_choice, last=True)
    return manifest


def settings(manifest: Manifest, config: Any) -> Any:
    """The settings of a backend: `config`, or those of the environment; None for a backend without settings.

    Raises:
        PluginError: the class that the manifest names cannot be imported.
        Conflict: `config` belongs to another backend.
    """
    if not manifest.config:
        return None
    config_class = _part(manifest, manifest.config)
    if config is None:
        resolved = resolve(config_class, {})
        defaults = {name: value for name, value in manifest.settings.items() if resolved[name].origin == "default"}
        return from_environment(config_class, None, **defaults)
    if not isinstance(_first_of(config), config_class):
        raise Conflict(
            f"Cannot use settings of type {type(config).__name__} for the backend {manifest.name!r}.",
            f"The settings class of that backend is {manifest.config}.",
            "Remove one of the two.",
        )
    return config


def configured_precision(config: Any) -> str | None:
    """The precision in an engine's settings, or None."""
    name: str | None = getattr(_first_of(config), "configured_precision", None)
    return name


def build(manifest: Manifest, config: Any, context: Context) -> Strategy:
    """Create the strategy of a backend.

    Args:
        manifest: the manifest of the chosen backend.
        config: an instance of its settings class; None: read from the environment.
        context: the context of the run.

    Raises:
        PluginError: the class that the manifest names cannot be imported, or is not a strategy.
        Conflict: `config` belongs to another backend.
        NotOffered: the precision is fp16, and the backend does not train in it.
    """
    if context.precision.name == "fp16":
        manifest.demand("fp16")
    factory = strategy_class(manifest)
    context = context._replace(manifest=manifest)
    return factory(context, settings(manifest, config)) if manifest.config else factory(context)


def strategy_class(manifest: Manifest) -> type[Strategy]:
    """The strategy class of a backend.

    Raises:
        PluginError: the class cannot be imported, or is not a strategy.
    """
    from accel_plugins.strategy import Strategy

    strategy: type[Strategy] = _part(manifest, manifest.strategy, Interface(subclass_of=Strategy))
    return strategy


def check_config(parameter: str, config: object) -> None:
    """Check an argument that selects a backend, before anything starts.

    Args:
        parameter: name of the argument, such as "fsdp_plugin".
        config: a settings object, or several by name.

    Raises:
        Conflict: no installed backend has settings of this class.
    """
    first = _first_of(config)
    manifests = BACKENDS.values()
    if any(_target_is_type_of(manifest.config, first) for manifest in manifests):
        return
    classes = sorted({one.config.rpartition(":")[2] for one in manifests if one.parameter == parameter})
    raise Conflict(
        f"Cannot use {parameter}={config!r:.60}.",
        f"It is a {type(config).__name__}, and no settings object of an installed backend.",
        f"Write {parameter}={classes[0]}(...)." if classes else "Install the package that provides the backend.",
    )


def config_among(manifest: Manifest, objects: Iterable[object]) -> Any:
    """The settings object of a backend among other objects, such as a script's `kwargs_handlers`, or None."""
    return next((candidate for candidate in objects if _target_is_type_of(manifest.config, candidate)), None)


# ---------------------------------------------------------------------------- picking


def _pick_for_axes(
    name: str | None, config: object | None, process: Process, parallelism_config: ParallelismConfig | None
) -> Manifest:
    manifest = _pick(name, config, process, parallelism_config)
    if parallelism_config is not None:
        from accel_plugins import mesh

        mesh.check_mesh(manifest, parallelism_config)
    return manifest


def _pick(
    name: str | None, config: object | None, process: Process, parallelism_config: ParallelismConfig | None
) -> Manifest:
    if name is not None:
        return _named(name, "argument")
    if config is not None:
        return _of_config(_first_of(config))
    setting = resolve(RunSettings, {})["backend"]
    if setting.value is not None:
        return _named(setting.value, setting.origin)
    present = _present(process)
    return present if parallelism_config is None else _for_axes(parallelism_config, present)


def _named(name: str, origin: str) -> Manifest:
    failure = f"Cannot use the backend {name!r} ({origin})."
    return BACKENDS.find(name, failure).usable(failure)


def _of_config(config: object) -> Manifest:
    owners = [manifest for manifest in BACKENDS.values() if _target_is_type_of(manifest.config, config)]
    failure = f"Cannot find a backend for settings of type {type(config).__name__}."
    if len(owners) > 1:
        # Versions of one backend share their settings class; an attribute of the settings selects the version.
        meant = getattr(config, "backend_name", None)
        owners = [manifest for manifest in owners if manifest.name == meant] or owners
    if not owners:
        raise NotOffered(
            failure,
            "No installed backend has this settings class. Installed backends: "
            f"{', '.join(BACKENDS.names()) or 'none'}.",
            "Give settings such as FullyShardedDataParallelPlugin(...), or install the package that provides these.",
        )
    return _only(owners, failure)


def _first_of(config: Any) -> Any:
    """The first of several settings objects by name, or the object itself."""
    return next(iter(config.values()), config) if isinstance(config, Mapping) else config


def _target_is_type_of(target: str, config: object) -> bool:
    """Whether "module:class" names the type of an object or one of its bases; imports nothing."""
    return any(target == f"{base.__module__}:{base.__qualname__}" for base in type(config).__mro__)


def _present(process: Process) -> Manifest:
    for backend in BACKENDS.loaded():
        if backend.failure:
            warnings.warn(f"{backend.warning} (`accel backends` shows the traceback)", stacklevel=stack_level())
    manifests = BACKENDS.values()
    check_variables({manifest.switch.variable for manifest in manifests if manifest.switch})
    failure = "Cannot choose a backend for this process."
    present = [manifest for manifest in manifests if _is_present(manifest, process)]
    if not present:
        raise PluginError(
            failure, "None of the installed backends fits this process.", "Choose one with --backend or ACCEL_BACKEND."
        )
    return _only(_highest(present), failure)


def _for_axes(parallelism_config: ParallelismConfig, present: Manifest) -> Manifest:
    """The backend that is present, or one of higher priority if the present one does not support the axes."""
    from accel_plugins import mesh

    axes = mesh.active_axes(parallelism_config)
    if mesh.takes(present, axes):
        return present
    higher = [
        manifest
        for manifest in BACKENDS.values()
        if manifest.priority > present.priority and mesh.takes(manifest, axes)
    ]
    return _only(_highest(higher), f"Cannot choose a backend for {mesh.named(axes)}.") if higher else present


def for_distributed_models(process: Process, failure: str) -> Manifest:
    """The backend for models that arrive distributed, if none was chosen: that with the highest priority.

    Backends that users select explicitly, and those for other devices, are left out.

    Args:
        process: this process.
        failure: what was attempted, for errors.

    Raises:
        PluginError: no installed backend accepts such models.
        Conflict: several have the same priority.
        Missing: a package that it requires is not installed.
    """
    family = process.family.name
    able = [
        manifest
        for manifest in BACKENDS.values()
        if manifest.capabilities.distributed_models
        and manifest.present
        and (not manifest.families or family in manifest.families)
    ]
    if not able:
        raise PluginError(
            failure, "No installed backend accepts models that arrive distributed.", "Prepare models that are whole."
        )
    return _only(_highest(able), failure)


def _is_present(manifest: Manifest, process: Process) -> bool:
    if not manifest.present:
        return False
    try:
        present = _part(manifest, manifest.present)
        with contained():
            return bool(present(process))
    except SettingError:
        raise
    except Exception as error:
        warnings.warn(
            f"The backend {manifest.name!r} is ignored. Its function {manifest.present} failed: {error!r}",
            stacklevel=stack_level(),
        )
        return False


def _highest(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The backends with the highest priority."""
    highest = max(manifest.priority for manifest in manifests)
    return [manifest for manifest in manifests if manifest.priority == highest]


def _only(manifests: Sequence[Manifest], failure: str) -> Manifest:
    """The only backend of several possible ones.

    Raises:
        Conflict: there are several.
        Missing: a package that it requires is not installed.
    """
    if len(manifests) > 1:
        claims = [f"{one.name!r} ({one.origin})" for one in BACKENDS.loaded() if one.value in manifests]
        raise Conflict(
            failure,
            f"Several backends have the same priority: {', '.join(claims)}.",
            "Choose with --backend, ACCEL_BACKEND, or Accelerator(backend=...).",
        )
    return BACKENDS.find(manifests[0].name, failure).usable(failure)


def _part(manifest: Manifest, target: str, interface: Interface | None = None) -> Any:
    """An object that a manifest names.

    Raises:
        PluginError: it cannot be imported, or does not fit the interface.
    """
    part = BACKENDS.part(manifest.name, target, interface or Interface())
    return part.get(f"Cannot start the backend {manifest.name!r}.")


def _same_choice(choices: Sequence[str]) -> str:
    """The backend that all processes chose.

    Raises:
        SettingError: the processes chose different ones.
    """
    if len(set(choices)) > 1:
        shown = ", ".join(f"process {rank}: {choice}" for rank, choice in enumerate(choices))
        raise SettingError(
            "Cannot choose a backend for this run.",
            f"The processes chose different backends. {shown}.",
            "Start every process with the same arguments, environment and installed packages.",
        )
    return choices[0]
