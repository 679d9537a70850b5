"""Memory of a mapped file that is not needed any more."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

__all__ = ("give_back",)


def give_back(weight: Tensor) -> None:
    """Let the system take the pages under a mapped weight that was copied, before the whole file is unmapped.

    The weight must not be used any more. Does nothing where the system has no such call.
    """
    advise = _advise()
    if advise is None or weight.device.type != "cpu":
        return
    # Only pages that lie in the weight as a whole: its neighbours may be in use.
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


@cache
def _advise() -> Any:
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
