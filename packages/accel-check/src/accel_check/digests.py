"""Digests: short texts that are equal for equal bytes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

__all__ = ("digest", "digests_of", "generators", "leaves", "sample_digests")


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested state, with their paths."""
    if isinstance(state, Mapping):
        items: Iterable[tuple[Any, Any]] = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        yield path or "value", state
        return
    for key, value in items:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def digests_of(state: Any) -> dict[str, str]:
    """A digest of each leaf of a nested state, by its path."""
    return {path: digest(leaf) for path, leaf in leaves(state)}


def digest(value: Any) -> str:
    """The digest of a value; of a sharded tensor, that of this process's part."""
    hasher = blake2b(digest_size=8)
    for chunk in _chunks(value):
        hasher.update(chunk)
    return hasher.hexdigest()


def sample_digests(batch: Any) -> list[str]:
    """A digest of each sample of a batch: of its row in all arrays that have as many rows as the first one."""
    arrays = [leaf for _, leaf in leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim]
    if not arrays:
        return [digest(batch)]
    rows = len(arrays[0])
    matching = [array for array in arrays if len(array) == rows]
    return [digest([array[row] for array in matching]) for row in range(rows)]


def generators() -> dict[str, str]:
    """Digests of the generators of torch, numpy and random."""
    state: Any = np.random.get_state(legacy=False)
    return {
        "torch": digest(torch.get_rng_state()),
        "numpy": digest(state["state"]),
        "random": digest(random.getstate()),
    }


def _chunks(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        value = value.to_dense() if value.is_sparse else value
        value = value.cpu().contiguous()
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _chunks(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _chunks(item)
            yield b","
    elif isinstance(value, (int, float, str, bytes, bool, type(None))):
        yield repr(value).encode()
    else:
        # The text of other objects may contain their address.
        yield type(value).__qualname__.encode()
