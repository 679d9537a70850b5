"""What the launcher asks of installed backends, through their manifests and without importing torch.

A backend whose manifest or settings cannot be loaded takes nothing from the others: it is kept with its error, and the
launcher tells of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, Final, NamedTuple

from accel_plugins.resolve import Found, available
from accel_state.errors import Missing, PluginError, SettingError
from accel_state.settings.extension import Extension, extensions
from accel_state.settings.schema import closest, settings_of

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
    """One entry point of the group, loaded as far as it could be.

    Args:
        name: name of the entry point.
        origin: name and version of the distribution.
        manifest: its declaration, or None.
        settings: its settings class when it has one with settings.
        failure: why something of it is missing, as a traceback or a sentence; empty when nothing is.
    """

    name: str
    origin: str
    manifest: Any = None
    settings: type | None = None
    failure: str = ""

    @property
    def reason(self) -> str:
        """The last line of its failure."""
        return (self.failure.strip().splitlines() or [""])[-1]


@lru_cache(maxsize=1)
def backends() -> tuple[OfferedBackend, ...]:
    """Every offered backend, in order of name."""
    return tuple(map(_with_settings, available()))


def backend_settings() -> tuple[type, ...]:
    """Settings classes of the backends, each once."""
    return tuple(dict.fromkeys(backend.settings for backend in backends() if backend.settings is not None))


def switches() -> dict[str, tuple[Any, ...]]:
    """By name of a switch, the manifests of the backends that it chooses."""
    found: dict[str, tuple[Any, ...]] = {}
    for manifest in (backend.manifest for backend in backends()):
        switch = getattr(manifest, "switch", None)
        if switch is not None:
            found[switch.name] = (*found.get(switch.name, ()), manifest)
    return found


def failures() -> tuple[OfferedBackend, ...]:
    """Backends of which something could not be loaded."""
    return tuple(backend for backend in backends() if backend.failure)


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


def backend_for(label: str, origin: str, names: Collection[str] = ()) -> str | None:
    """Name of the backend whose runs carry a label of `distributed_type`, or that is one of `names`; None for several.

    Of several, such as two versions of one engine, the processes choose by their settings.

    Raises:
        Missing: no installed backend carries it.
    """
    offered = [backend.manifest for backend in backends() if backend.manifest is not None]
    found = [one for one in offered if (one.name in names if names else label_of(one) == label)]
    if found:
        return str(found[0].name) if len(found) == 1 else None
    raise Missing(
        f"Cannot start a run with distributed_type {label} ({origin}).",
        "No installed backend supports it.",
        "Install the package that offers such a backend (`accel backends` lists what there is), or remove the option.",
    )


def why_unusable(backend: OfferedBackend, origin: str) -> Exception | None:
    """The error for a backend that cannot start, or None."""
    asked = f"Cannot start the backend {backend.name!r} ({origin})."
    if backend.manifest is None:
        package = backend.origin
        remedy = f"Repair, update or remove {package.split()[0]}."
        return PluginError(asked, f"The one of {package} could not be loaded: {backend.reason}.", remedy)
    for requirement in backend.manifest.requires:
        obstacle = requirement.obstacle()
        if obstacle is not None:
            return Missing(asked, obstacle, requirement.remedy())
    return None


def label_of(manifest: Any) -> str | None:
    """What users read as `distributed_type` of its runs; None where the devices say so."""
    label = getattr(manifest, "label", None)
    return None if label is None else str(label.value)


def _with_settings(found: Found) -> OfferedBackend:
    target = found.manifest.config if found.manifest is not None else ""
    if not target:
        return OfferedBackend(found.name, found.origin, found.manifest, failure=found.failure)
    try:
        settings: Any = Extension(GROUP, found.name, target, found.origin).load()
    except Exception:
        import traceback

        return OfferedBackend(found.name, found.origin, found.manifest, failure=traceback.format_exc())
    return OfferedBackend(found.name, found.origin, found.manifest, settings if _has_settings(settings) else None)


def _has_settings(settings_class: type) -> bool:
    known: Callable[[type], Any] = settings_of
    return bool(known(settings_class))
