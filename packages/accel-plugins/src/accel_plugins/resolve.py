"""Find the installed backends, choose the one of the run, and create its strategy.

The choice follows this order: the argument, a settings object that belongs to a backend, the environment. Without any
of these, it is the backend with the highest priority among those that are present; if that one does not support the
axes of the `ParallelismConfig`, it is the one with the highest priority that does. All processes must choose the same
one. Importing this module imports neither torch nor any backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from accel_plugins.manifest import OLDEST_PROTOCOL, PROTOCOL, Manifest
from accel_plugins.separate import check_variables
from accel_state.errors import Conflict, NotOffered, PluginError, SettingError
from accel_state.library import stack_level
from accel_state.plugins import Plugin, contained, plugins_of
from accel_state.settings.environ import from_environment, resolve
from accel_state.settings.run import RunSettings
from accel_state.settings.schema import closest
from accel_state.untrusted import printable

if TYPE_CHECKING:
    from accel_plugins.context import Context
    from accel_plugins.memory_plans import MemoryPlans
    from accel_plugins.strategy import Strategy
    from accel_state.current import Process
    from accel_state.mesh import ParallelismConfig

__all__ = (
    "Found",
    "available",
    "build",
    "choose",
    "config_among",
    "configured_precision",
    "memory_plans",
    "settings",
    "strategy_class",
)

_GROUP: Final = "accel.backends"


class Found(NamedTuple):
    """A backend that an installed distribution provides.

    Args:
        name: name of its entry point.
        origin: name and version of the distribution.
        manifest: its manifest, or None when it could not be loaded.
        failure: why it cannot be used, as a traceback or a sentence; empty when it can be used.
    """

    name: str
    origin: str
    manifest: Manifest | None = None
    failure: str = ""

    @property
    def obstacle(self) -> str | None:
        """Why it cannot be used, in one line, or None."""
        if self.failure:
            return self.failure.strip().splitlines()[-1]
        unmet = (requirement.obstacle() for requirement in (self.manifest.requires if self.manifest else ()))
        return next((obstacle for obstacle in unmet if obstacle is not None), None)


def available() -> tuple[Found, ...]:
    """All installed backends, sorted by name; those that cannot be loaded have a `failure`."""
    return tuple(sorted((_look_at(extension) for extension in plugins_of(_GROUP)), key=lambda found: found.name))


def _look_at(extension: Any) -> Found:
    try:
        manifest = extension.load()
    except Exception:
        import traceback

        return Found(extension.name, extension.origin, failure=printable(traceback.format_exc(), keep="\n\t"))
    failure = ""
    if not isinstance(manifest, Manifest):
        failure = f"{extension.target} is a {type(manifest).__name__}, not an accel_plugins.Manifest."
    elif manifest.common_protocol is None:
        failure = (
            f"It supports {_versions(*manifest.protocols)} of the backend interface; this release supports "
            f"{_versions(OLDEST_PROTOCOL, PROTOCOL)}."
        )
    elif manifest.name != extension.name:
        failure = f"Its manifest has the name {manifest.name!r}, but its entry point has the name {extension.name!r}."
    return Found(extension.name, extension.origin, None if failure else manifest, failure)


def _versions(oldest: int, newest: int) -> str:
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


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
        PluginError: the chosen backend cannot be loaded.
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
    config_class = _imported(manifest, manifest.config)
    if config is None:
        found = resolve(config_class, {})
        defaults = {name: value for name, value in manifest.settings.items() if found[name].origin == "default"}
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
    """
    made = strategy_class(manifest)
    context = context._replace(manifest=manifest)
    return made(context, settings(manifest, config)) if manifest.config else made(context)


def strategy_class(manifest: Manifest) -> type[Strategy]:
    """The strategy class of a backend.

    Raises:
        PluginError: the class cannot be imported, or is not a strategy.
    """
    from accel_plugins.strategy import Strategy

    found = _imported(manifest, manifest.strategy)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise PluginError(
            f"Cannot start the backend {manifest.name!r}.",
            f"{manifest.strategy} is not a subclass of accel_plugins.Strategy.",
            "Correct `strategy` in its Manifest.",
        )
    return found


def memory_plans(manifest: Manifest) -> MemoryPlans:
    """The memory plans of a backend, from the class that the manifest names.

    Raises:
        PluginError: the class cannot be imported, or is not a subclass of `MemoryPlans`.
    """
    from accel_plugins.memory_plans import MemoryPlans

    found = _imported(manifest, manifest.memory_plans)
    if not (isinstance(found, type) and issubclass(found, MemoryPlans)):
        raise PluginError(
            f"Cannot estimate the memory of the backend {manifest.name!r}.",
            f"{manifest.memory_plans} is not a subclass of accel_plugins.memory_plans.MemoryPlans.",
            "Correct `memory_plans` in its Manifest.",
        )
    return found()


def config_among(manifest: Manifest, given: Iterable[object]) -> Any:
    """The settings object of a backend among other objects, such as a script's `kwargs_handlers`, or None."""
    return next((candidate for candidate in given if _target_is_type_of(manifest.config, candidate)), None)


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
    found = available()
    if name is not None:
        return _named(name, "argument", found)
    if config is not None:
        return _of_config(_first_of(config), found)
    given = resolve(RunSettings, {})["backend"]
    if given.value is not None:
        return _named(given.value, given.origin, found)
    present = _present(process, found)
    return present if parallelism_config is None else _for_axes(parallelism_config, found, present)


def _named(name: str, origin: str, found: Sequence[Found]) -> Manifest:
    asked = f"Cannot use the backend {name!r} ({origin})."
    bearers = [one for one in found if one.name == name]
    if not bearers:
        names = sorted({one.name for one in found})
        near = closest(name, names)
        raise SettingError(
            asked,
            f"Installed backends: {', '.join(names) or 'none'}.",
            f"Did you mean {near!r}?" if near else "Install the package that provides it, or choose one of these.",
        )
    if len(bearers) > 1:
        raise Conflict(
            asked,
            f"Several packages provide a backend with that name: {', '.join(one.origin for one in bearers)}.",
            "Uninstall all of them except one.",
        )
    return _usable(asked, bearers[0])


def _usable(asked: str, found: Found) -> Manifest:
    if found.manifest is None:
        raise PluginError(
            asked,
            f"The backend of {found.origin} cannot be used:\n{found.failure}",
            "Repair, update or remove that package.",
        )
    for requirement in found.manifest.requires:
        requirement.demand(asked)
    return found.manifest


def _of_config(config: object, found: Sequence[Found]) -> Manifest:
    owners = [one for one in found if one.manifest is not None and _target_is_type_of(one.manifest.config, config)]
    asked = f"Cannot find a backend for settings of type {type(config).__name__}."
    if len(owners) > 1:
        # Versions of one backend share their settings class; an attribute of the settings selects the version.
        meant = getattr(config, "backend_name", None)
        owners = [one for one in owners if one.name == meant] or owners
    if len(owners) == 1:
        return _usable(asked, owners[0])
    if owners:
        _refuse_tie(asked, owners)
    raise NotOffered(
        asked,
        "No installed backend has this settings class. Installed backends: "
        f"{', '.join(one.name for one in found) or 'none'}.",
        "Install the package that provides it.",
    )


def _first_of(config: Any) -> Any:
    """The first of several settings objects by name, or the object itself."""
    return next(iter(config.values()), config) if isinstance(config, Mapping) else config


def _target_is_type_of(target: str, config: object) -> bool:
    """Whether "module:class" names the type of an object or one of its bases; imports nothing."""
    return any(target == f"{base.__module__}:{base.__qualname__}" for base in type(config).__mro__)


def _present(process: Process, found: Sequence[Found]) -> Manifest:
    for broken in (one for one in found if one.manifest is None):
        warnings.warn(
            f"The backend {broken.name!r} of {broken.origin} cannot be used and was ignored: {broken.obstacle} "
            "(`accel backends` shows the full traceback)",
            stacklevel=stack_level(),
        )
    check_variables({one.manifest.switch.variable for one in found if one.manifest and one.manifest.switch})
    asked = "Cannot choose a backend for this process."
    claims = [(one.manifest.priority, one) for one in found if one.manifest and _is_present(one, process)]
    if not claims:
        raise PluginError(
            asked, "None of the installed backends fits this process.", "Choose one with --backend or ACCEL_BACKEND."
        )
    highest = max(priority for priority, _ in claims)
    best = [one for priority, one in claims if priority == highest]
    if len(best) > 1:
        _refuse_tie(asked, best)
    return _usable(asked, best[0])


def _for_axes(parallelism_config: ParallelismConfig, found: Sequence[Found], present: Manifest) -> Manifest:
    """The backend that is present, or one of higher priority if the present one does not support the axes."""
    from accel_plugins import mesh

    axes = mesh.active_axes(parallelism_config)
    if mesh.takes(present, axes):
        return present
    claims = [
        (one.manifest.priority, one)
        for one in found
        if one.manifest and one.manifest.priority > present.priority and mesh.takes(one.manifest, axes)
    ]
    if not claims:
        return present
    highest = max(priority for priority, _ in claims)
    best = [one for priority, one in claims if priority == highest]
    asked = f"Cannot choose a backend for {mesh.named(axes)}."
    if len(best) > 1:
        _refuse_tie(asked, best)
    return _usable(asked, best[0])


def _is_present(found: Found, process: Process) -> bool:
    assert found.manifest is not None
    if found.manifest.present is None:
        return False
    try:
        with contained():
            return bool(_imported(found.manifest, found.manifest.present)(process))
    except SettingError:
        raise
    except Exception as error:
        warnings.warn(
            f"The backend {found.name!r} of {found.origin} was ignored, because its function `present` failed: "
            f"{error!r}",
            stacklevel=stack_level(),
        )
        return False


def _refuse_tie(asked: str, equal: Sequence[Found]) -> NoReturn:
    claims = ", ".join(f"{one.name!r} ({one.origin})" for one in equal)
    raise Conflict(
        asked,
        f"Several backends have the same priority: {claims}.",
        "Choose with --backend, ACCEL_BACKEND, or Accelerator(backend=...).",
    )


def _imported(manifest: Manifest, target: str) -> Any:
    try:
        return Plugin(_GROUP, manifest.name, target, "").load()
    except Exception as error:
        raise PluginError(
            f"Cannot start the backend {manifest.name!r}.",
            f"Importing {target} failed: {error!r}.",
            "Repair or update the package that provides it.",
        ) from error


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
