"""The installed backends as the launcher needs them: their manifests and settings, read without torch.

A backend with a manifest or settings that cannot be loaded does not affect the others: the launcher reports it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from accel_plugins.manifest import Manifest
from accel_plugins.resolve import BACKENDS
from accel_plugins.separate import install_remedy, package_of
from accel_state.errors import Missing
from accel_state.plugins import LoadedPlugin
from accel_state.settings.schema import settings_of

__all__ = ("backend_for", "backend_settings", "backends", "label_of", "switches")


@lru_cache(maxsize=1)
def backends() -> tuple[LoadedPlugin[Manifest], ...]:
    """Every installed backend with its settings class, sorted by name."""
    return tuple(
        backend.with_settings(backend.value.config) if backend.value else backend for backend in BACKENDS.loaded()
    )


def backend_settings() -> tuple[type, ...]:
    """Settings classes of the backends, each once."""
    return tuple(dict.fromkeys(one.settings for one in backends() if one.settings and settings_of(one.settings)))


def switches() -> dict[str, tuple[Any, ...]]:
    """For each switch, the manifests of the backends that it selects."""
    found: dict[str, tuple[Any, ...]] = {}
    for manifest in BACKENDS.values():
        if manifest.switch is not None:
            found[manifest.switch.name] = (*found.get(manifest.switch.name, ()), manifest)
    return found


def backend_for(label: str, origin: str, names: Collection[str] = ()) -> str | None:
    """Name of the backend for a `distributed_type` label, or of the only one of `names`; None if there are several.

    If there are several, such as two versions of one engine, the processes select one by their settings.

    Raises:
        Missing: no installed backend has this label.
    """
    suitable = [
        manifest.name
        for manifest in BACKENDS.values()
        if (manifest.name in names if names else label_of(manifest) == label)
    ]
    if suitable:
        return suitable[0] if len(suitable) == 1 else None
    package = package_of(label)
    raise Missing(
        f"Cannot start a run with distributed_type {label} ({origin}).",
        "No installed backend supports it.",
        "Install a package that provides one (`accel backends` lists what is installed), or remove the option."
        if package is None
        else install_remedy(package),
    )


def label_of(manifest: Manifest) -> str | None:
    """The `distributed_type` of the backend's runs; None if the devices determine it."""
    return None if manifest.label is None else str(manifest.label.value)
