"""What the launcher asks of installed backends, through their manifests and without importing torch.

A backend whose manifest or settings cannot be loaded takes nothing from the others: it is kept with its error, and the
launcher tells of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from accel_cli.launch.kinds import kind_of
from accel_state.errors import Missing, PluginError, SettingError
from accel_state.settings.extension import Extension, extensions
from accel_state.settings.schema import closest, settings_of

if TYPE_CHECKING:
    from accel_cli.config.resolved import ResolvedSettings

__all__ = (
    "GROUP",
    "Backend",
    "backend_for",
    "backend_settings",
    "backends",
    "check_backend",
    "check_requirements",
    "failures",
)

GROUP: Final = "accel.backends"


class Backend(NamedTuple):
    """One entry point of the group, loaded as far as it could be.

    Args:
        extension: where it is offered.
        manifest: its declaration, or None.
        settings: its settings class when it has one with settings.
        error: why something of it is missing.
    """

    extension: Extension
    manifest: Any = None
    settings: type | None = None
    error: Exception | None = None


@lru_cache(maxsize=1)
def backends() -> tuple[Backend, ...]:
    """Every offered backend."""
    return tuple(map(_load, extensions(GROUP)))


def backend_settings() -> tuple[type, ...]:
    """Settings classes of the backends, each once."""
    return tuple(dict.fromkeys(backend.settings for backend in backends() if backend.settings is not None))


def failures() -> tuple[Backend, ...]:
    """Backends of which something could not be loaded."""
    return tuple(backend for backend in backends() if backend.error is not None)


def check_backend(name: str, origin: str) -> None:
    """Refuse the name of a backend that nobody offers.

    Raises:
        SettingError: there is no such backend.
    """
    names = [extension.name for extension in extensions(GROUP)]
    if name not in names:
        near = closest(name, names)
        raise SettingError(
            f"Cannot find the backend {name!r} ({origin}).",
            f"Installed backends: {', '.join(names) or 'none'}.",
            f"Did you mean {near!r}?" if near else "Install the package that offers it.",
        )


def backend_for(label: str, origin: str) -> str | None:
    """Name of the backend whose runs carry a label of `distributed_type`; None where several do.

    Of several, such as two versions of one engine, the processes choose by their settings.

    Raises:
        Missing: no installed backend carries it.
    """
    found = [backend.manifest for backend in backends() if _label(backend.manifest) == label]
    if found:
        return str(found[0].name) if len(found) == 1 else None
    raise Missing(
        f"Cannot start a run with distributed_type {label} ({origin}).",
        "No installed backend supports it.",
        "Install the package that offers such a backend (`accel backends` lists what there is), or remove the option.",
    )


def check_requirements(settings: ResolvedSettings) -> None:
    """Refuse a backend that cannot start: what it needs is not installed, or it cannot be loaded.

    Where several backends train in the requested way, one that can start is enough.

    Raises:
        Missing: a package that it requires is absent or too old.
        PluginError: it could not be loaded.
    """
    named, asked = settings["backend"], kind_of(settings)
    if named.value is not None:
        origin = named.origin
        chosen = [backend for backend in backends() if backend.extension.name == named.value]
    elif asked is not None and not asked[0].by_device:
        origin = asked[1].origin
        chosen = [backend for backend in backends() if _label(backend.manifest) == asked[0].label]
    else:
        return
    errors = [error for error in (_unusable(backend, origin) for backend in chosen) if error is not None]
    if errors and len(errors) == len(chosen):
        raise errors[0]


def _unusable(backend: Backend, origin: str) -> Exception | None:
    asked = f"Cannot start the backend {backend.extension.name!r} ({origin})."
    if backend.manifest is None:
        package = backend.extension.origin
        remedy = f"Repair, update or remove {package.split()[0]}."
        return PluginError(asked, f"That of {package} could not be loaded: {backend.error!r}.", remedy)
    for requirement in backend.manifest.requires:
        obstacle = requirement.obstacle()
        if obstacle is not None:
            return Missing(asked, obstacle, requirement.remedy())
    return None


def _label(manifest: Any) -> str | None:
    label = getattr(manifest, "label", None)
    return None if label is None else str(label.value)


def _load(extension: Extension) -> Backend:
    try:
        manifest = extension.load()
    except Exception as error:
        return Backend(extension, error=error)
    if not manifest.config:
        return Backend(extension, manifest)
    try:
        settings: Any = Extension(GROUP, extension.name, manifest.config, extension.origin).load()
    except Exception as error:
        return Backend(extension, manifest, error=error)
    return Backend(extension, manifest, settings if _has_settings(settings) else None)


def _has_settings(settings_class: type) -> bool:
    known: Callable[[type], Any] = settings_of
    return bool(known(settings_class))
