"""Random number generators: seeds them, synchronises them between processes, saves and restores them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from accel_ops.objects import broadcast_object_list
from accel_state import current
from accel_state.data_shards import data_shard
from accel_state.devices.base import DeviceFamily
from accel_state.devices.select import best_family, families
from accel_state.errors import CheckpointError, SettingError
from accel_state.labels import RNGType

__all__ = (
    "missing_in",
    "restore",
    "seed_again",
    "set_seed",
    "snapshot",
    "synchronize_rng_state",
    "synchronize_rng_states",
)


@dataclass(frozen=True)
class _Source:
    """Reads and writes the state of one kind of generator."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _numpy_state() -> Any:
    """The argument of `numpy.random.set_state`, with a tensor for the array, so that its pickle imports no numpy."""
    state = np.random.get_state()
    if not isinstance(state, tuple):
        return state
    name, key, *rest = state
    return name, torch.from_numpy(np.asarray(key).astype(np.int64)), *rest


def _set_numpy_state(state: Any) -> None:
    """Check and set an untrusted state: numpy reads beyond the key when the position is too large."""
    if isinstance(state, Mapping) and state.get("bit_generator") == _NUMPY_GENERATOR:
        inner = state["state"]
        state = _NUMPY_GENERATOR, inner["key"], inner["pos"], state.get("has_gauss", 0), state.get("gauss", 0.0)
    if not isinstance(state, Mapping):
        name, key, position, has_gauss, gauss = state
        words = np.asarray(key)
        fits = words.shape == (_NUMPY_GENERATOR_WORDS,) and words.dtype.kind in "iu" and (words >= 0).all()
        if name != _NUMPY_GENERATOR or not fits or not (words < 2**32).all():
            raise ValueError(f"it is not a key of {_NUMPY_GENERATOR_WORDS} words of {_NUMPY_GENERATOR}")
        if not 0 <= int(position) <= _NUMPY_GENERATOR_WORDS or int(has_gauss) not in (0, 1):
            raise ValueError(f"its position {position} is outside of its key")
        state = name, words.astype(np.uint32), int(position), int(has_gauss), float(gauss)
    np.random.set_state(state)


_NUMPY_GENERATOR: Final = "MT19937"
_NUMPY_GENERATOR_WORDS: Final = 624

_PYTHON = _Source(random.getstate, random.setstate)
# The functions above import numpy's generators at the first use, because the import takes milliseconds.
_NUMPY = _Source(_numpy_state, _set_numpy_state)
_TORCH = _Source(torch.get_rng_state, torch.set_rng_state)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, numpy, torch and the device.

    Args:
        seed: int from 0 to 2**32 - 1, also after the index was added.
        device_specific: add the index of the process's data shard to the seed, so that processes with different samples
            draw different numbers. Without the mesh axes tp, cp and sp this is the rank. If the first Accelerator is
            constructed later with such axes, it seeds again.
        deterministic: let torch use only deterministic algorithms.

    Raises:
        SettingError: the seed is not an int, or is outside numpy's range.
    """
    process = current.process_or_start() if device_specific else current.process_or_none()
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise _seed_error(seed, f"It is of type {type(seed).__name__}.")
    shard = None if process is None or not device_specific else data_shard(process)
    chosen = int(seed) + (0 if shard is None else shard[1])
    if not 0 <= chosen < 2**32:
        raise _seed_error(chosen, "numpy's generator takes seeds from 0 to 2**32 - 1.")
    random.seed(chosen)
    np.random.seed(chosen)
    torch.manual_seed(chosen)
    (best_family() if process is None else process.family).seed(chosen)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    _seeded_apart.clear()
    if shard is not None:
        _seeded_apart.append((int(seed), shard[0]))
        current.on_clear(_seeded_apart.clear)


_seeded_apart: Final[list[tuple[int, int]]] = []
"""Seed and number of data shards of the last `set_seed`, if it seeded processes differently."""


def seed_again() -> None:
    """Seed again if processes were seeded for another number of data shards.

    Called on every process when a run begins, because its mesh may show that processes read the same samples.
    """
    process = current.process_or_none()
    if process is not None and _seeded_apart and _seeded_apart[0][1] != data_shard(process)[0]:
        set_seed(_seeded_apart[0][0], device_specific=True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Set one kind of generator on all processes to its state on process 0.

    Args:
        rng_type: see `synchronize_rng_states`; by default "generator" if one is passed, else "torch".
        generator: the generator for "generator".

    Raises:
        SettingError: an unknown kind, or "generator" without one.
    """
    default = "torch" if generator is None else "generator"
    synchronize_rng_states([default if rng_type is None else rng_type], generator)


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Set kinds of generators on all processes to their states on process 0, in one collective.

    Args:
        rng_types: names among "torch", "python", "numpy", "generator", and the available device families.
        generator: the generator for "generator".

    Raises:
        SettingError: an unknown kind, or "generator" without one.
        CollectiveError: a process ended or did not call this in time.
    """
    sources = [_source(str(kind), generator) for kind in rng_types]
    if not sources or current.process_or_start().world_size == 1:
        return
    states = [source.read() for source in sources]
    # As bytes, because a pickled tensor costs more than the rest of the call.
    flat = [isinstance(state, torch.Tensor) and state.is_cpu and state.dtype == torch.uint8 for state in states]
    sent = [state.numpy().tobytes() if is_flat else state for state, is_flat in zip(states, flat, strict=True)]
    broadcast_object_list(sent)
    for source, state, is_flat in zip(sources, sent, flat, strict=True):
        source.write(torch.frombuffer(bytearray(state), dtype=torch.uint8) if is_flat else state)


def snapshot() -> dict[str, Any]:
    """The states of the generators of Python, numpy, torch and this process's device.

    The keys are those of the `random_states_<rank>.pkl` of a checkpoint.
    """
    return {key: source.read() for key, source in _by_key(current.process_or_start().family).items()}


def restore(states: Mapping[str, Any]) -> tuple[str, ...]:
    """Set the generators to what `snapshot` returned.

    Args:
        states: by key; other keys are ignored.

    Returns:
        The missing keys; their generators keep their states.

    Raises:
        CheckpointError: a state cannot be used.
    """
    sources = _by_key(current.process_or_start().family)
    for key, source in sources.items():
        if key not in states:
            continue
        try:
            source.write(states[key])
        except (TypeError, ValueError, RuntimeError, LookupError, OverflowError) as error:
            raise CheckpointError(
                f"Cannot restore the random number generator {key!r}.",
                f"Its state cannot be used: {error}",
                "Restore from a checkpoint that was saved with the same kind of device.",
            ) from error
    return missing_in(states)


def missing_in(states: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of `snapshot` on this process that some states do not have."""
    return tuple(key for key in _by_key(current.process_or_start().family) if key not in states)


def _by_key(family: DeviceFamily) -> dict[str, _Source]:
    sources = {"random_state": _PYTHON, "numpy_random_seed": _NUMPY, "torch_manual_seed": _TORCH}
    if family.spec.rng_key is not None:
        sources[family.spec.rng_key] = _Source(family.rng_state, family.set_rng_state)
    return sources


def _source(kind: str, generator: torch.Generator | None) -> _Source:
    if kind == "generator":
        if generator is None:
            raise SettingError(
                "Cannot synchronise the state of a generator.",
                "The argument `generator` is missing.",
                "Pass a `generator`, or remove 'generator' from rng_types.",
            )
        return _Source(generator.get_state, generator.set_state)
    sources = {"torch": _TORCH, "python": _PYTHON, "numpy": _NUMPY}
    for family in families():
        if family.spec.rng_key is not None and family.present():
            sources[family.name] = _Source(family.current_rng_state, family.set_current_rng_state)
    if kind not in sources:
        raise SettingError(
            f"Cannot synchronise random number generators of kind {kind!r}.",
            "This process has no generators of this kind.",
            f"Pass one of {', '.join(map(repr, (*sources, 'generator')))}.",
        )
    return sources[kind]


def _seed_error(seed: Any, obstacle: str) -> SettingError:
    return SettingError(f"Cannot seed generators with {seed!r}.", obstacle, f"Pass an int from 0 to {2**32 - 1}.")
