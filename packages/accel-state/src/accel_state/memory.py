"""Memory of devices: freeing it, and recognising out-of-memory errors."""

from __future__ import annotations

import gc
from typing import Any

from accel_state import current
from accel_state.devices.base import DeviceFamily
from accel_state.devices.select import best_family, families

__all__ = (
    "clear_device_cache",
    "release_memory",
    "should_reduce_batch_size",
)


def _family() -> DeviceFamily:
    process = current.process_or_none()
    return best_family() if process is None else process.family


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free the memory that the allocator of the device caches.

    Args:
        garbage_collection: run Python's garbage collector first.
    """
    if garbage_collection:
        gc.collect()
    _family().empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free the memory of objects; assign the result to the variables, so that these no longer refer to the objects.

    Example:
        >>> model, optimizer = object(), object()
        >>> model, optimizer = release_memory(model, optimizer)
        >>> model is None
        True
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error means that a device ran out of memory, so that a smaller batch may fit."""
    return any(family.out_of_memory(exception) for family in families())
