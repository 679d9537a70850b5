"""The installed backends as the launcher needs them: their manifests and settings, read without torch.

A backend with a manifest or settings that cannot be loaded does not affect the others: its error is stored, and the
launcher reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, Final, NamedTuple

from accel_plugins.resolve import Found, available
from accel_plugins.separate import install_remedy, package_of
from accel_state.errors import Missing, PluginError, SettingError
from accel_state.plugins import Plugin, plugins_of
from accel_state.settings.schema import closest, settings_of
from accel_state.untrusted import printable

__all__ = (
    "GROUP",
    "OfferedBackend",
    "backend_for",
    "backend_settings",
    "backends",
    "check_backend",
    "failures",
    "label_of",
    "switches",
    "why_unusable",
)

GROUP: Final = "accel.backends"


class OfferedBackend(NamedTuple):
    """One entry point of the group, loaded as far as possible.

    Args:
        name: name of the entry point.
        origin: name and version of the distribution.
        manifest: its declaration, or None.
        settings: its settings class, if it has settings.
        failure: the reason why a part could not be loaded, as a traceback or a sentence; empty without one.
    """

    name: str
    origin: str
    manifest: Any = None
    settings: type | None = None
    failure: str = ""

    @property
    def reason(self) -> str:
        """The last line of `failure`."""
        return (self.failure.strip().splitlines() or [""])[-1]


@lru_cache(maxsize=1)
def backends() -> tuple[OfferedBackend, ...]:
    """Every installed backend, sorted by name."""
    return tuple(map(_with_settings, available()))


def backend_settings() -> tuple[type, ...]:
    """Settings classes of the backends, each once."""
    return tuple(dict.fromkeys(backend.settings for backend in backends() if backend.settings is not None))


def switches() -> dict[str, tuple[Any, ...]]:
    """For each switch, the manifests of the backends that it selects."""
    found: dict[str, tuple[Any, ...]] = {}
    for manifest in (backend.manifest for backend in backends()):
        switch = getattr(manifest, "switch", None)
        if switch is not None:
            found[switch.name] = (*found.get(switch.name, ()), manifest)
    return found


def failures() -> tuple[OfferedBackend, ...]:
    """Backends that could not be loaded completely."""
    return tuple(backend for backend in backends() if backend.failure)


def check_backend(name: str, origin: str) -> None:
    """Check that a backend with this name is installed.

    Raises:
        SettingError: there is no such backend.
    """
    names = [extension.name for extension in plugins_of(GROUP)]
    if name not in names:
        near = closest(name, names)
        raise SettingError(
            f"Cannot find the backend {name!r} ({origin}).",
            f"Installed backends: {', '.join(names) or 'none'}.",
            f"Did you mean {near!r}?" if near else "Use one of these, or install the package that provides it.",
        )


def backend_for(label: str, origin: str, names: Collection[str] = ()) -> str | None:
    """Name of the backend for a `distributed_type` label, or of the only one of `names`; None if there are several.

    If there are several, such as two versions of one engine, the processes select one by their settings.

    Raises:
        Missing: no installed backend has this label.
    """
    offered = [backend.manifest for backend in backends() if backend.manifest is not None]
    found = [one for one in offered if (one.name in names if names else label_of(one) == label)]
    if found:
        return str(found[0].name) if len(found) == 1 else None
    package = package_of(label)
    raise Missing(
        f"Cannot start a run with distributed_type {label} ({origin}).",
        "No installed backend supports it.",
        "Install a package that provides one (`accel backends` lists what is installed), or remove the option."
        if package is None
        else install_remedy(package),
    )


def why_unusable(backend: OfferedBackend, origin: str) -> Exception | None:
    """The error for a backend that cannot start, or None."""
    asked = f"Cannot start the backend {backend.name!r} ({origin})."
    if backend.manifest is None:
        package = backend.origin
        remedy = f"Repair, update or remove {package.split()[0]}."
        return PluginError(asked, f"The backend of {package} could not be loaded: {backend.reason}.", remedy)
    for requirement in backend.manifest.requires:
        obstacle = requirement.obstacle()
        if obstacle is not None:
            return Missing(asked, obstacle, requirement.remedy())
    return None


def label_of(manifest: Any) -> str | None:
    """The `distributed_type` of the backend's runs; None if the devices determine it."""
    label = getattr(manifest, "label", None)
    return None if label is None else str(label.value)


def _with_settings(found: Found) -> OfferedBackend:
    target = found.manifest.config if found.manifest is not None else ""
    if not target:
        return OfferedBackend(found.name, found.origin, found.manifest, failure=found.failure)
    try:
        settings: Any = Plugin(GROUP, found.name, target, found.origin).load()
    except Exception:
        import traceback

        return OfferedBackend(
            found.name, found.origin, found.manifest, failure=printable(traceback.format_exc(), keep="\n\t")
        )
    return OfferedBackend(found.name, found.origin, found.manifest, settings if _has_settings(settings) else None)


def _has_settings(settings_class: type) -> bool:
    known: Callable[[type], Any] = settings_of
    return bool(known(settings_class))
