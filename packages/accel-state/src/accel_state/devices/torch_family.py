"""Device families that torch drives through a module of their own name, told apart by one row of facts each.

A device that registered itself with torch (`torch.utils.rename_privateuse1_backend`) works without a row, by
`UnlistedFamily`.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.rows import ROWS, Row, generic_row
from accel_state.settings.environ import publish
from accel_state.settings.probe import importable

__all__ = ("HPU", "MLU", "MUSA", "NEURON", "NPU", "SDAA", "XPU", "TorchFamily", "UnlistedFamily", "unlisted_family")


class TorchFamily(DeviceFamily):
    """A family of which a row of facts and torch's module for it tell everything.

    Args:
        row: the facts.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.name = row.name
        self.label = row.label
        self.backend = row.backend
        self.timeout = row.timeout
        self.priority = row.priority
        self.rng_key = row.rng_key
        self.rng_name = row.name
        self.pins_memory = row.pins_memory
        self.visible_variable = row.visible_variable

    def present(self) -> bool:
        if self.row.vendor is not None and not _vendor_loaded(self.row.vendor, self.name):
            return False
        module = getattr(torch, self.name, None)
        if module is None:
            return False
        with _environment(self.row.probing):
            return bool(module.is_available())

    def distributed_backend(self) -> str:
        if self.row.collectives is not None:
            importlib.import_module(self.row.collectives)
        return super().distributed_backend()

    def supports(self, dtype: torch.dtype) -> bool:
        if not torch.amp.autocast_mode.is_autocast_available(self.name):
            return False
        asked = getattr(self.module, "get_amp_supported_dtype", None)
        return dtype in asked() if asked is not None else super().supports(dtype)

    def empty_cache(self) -> None:
        """Give memory that is held but unused back to the device; one that keeps no cache has nothing to give."""
        release = getattr(self.module, "empty_cache", None)
        if release is not None:
            release()


class UnlistedFamily(TorchFamily):
    """A device that registered itself with torch; its backend is the one it registered with torch.distributed."""

    def distributed_backend(self) -> str:
        try:
            self.backend = torch.distributed.get_default_backend_for_device(self.name)
        except ValueError:
            self.backend = ""
        return super().distributed_backend()


@functools.cache
def unlisted_family(name: str) -> UnlistedFamily:
    """The family of a device type that torch knows and that has no row."""
    return UnlistedFamily(generic_row(name))


@functools.cache
def _vendor_loaded(vendor: str, name: str) -> bool:
    """Import a vendor's module if it is installed; a broken one is told of once."""
    try:
        if not importable(vendor):
            return False
        importlib.import_module(vendor)
    except Exception as error:
        warnings.warn(
            f"{vendor} is installed but could not be imported ({error!r}), so {name} devices are not considered.",
            stacklevel=2,
        )
        return False
    return True


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in variables if name in os.environ}
    publish(variables)
    try:
        yield
    finally:
        publish(before, remove=variables.keys() - before.keys())


def _family(name: str) -> Any:
    return functools.partial(TorchFamily, ROWS[name])


XPU: Final = _family("xpu")
NPU: Final = _family("npu")
MLU: Final = _family("mlu")
MUSA: Final = _family("musa")
SDAA: Final = _family("sdaa")
HPU: Final = _family("hpu")
NEURON: Final = _family("neuron")
