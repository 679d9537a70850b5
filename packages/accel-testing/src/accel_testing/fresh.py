"""A clean state for a test: inside a block the process is like a new one, and afterwards it is as before."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from accel_state import current
from accel_state.clusters import cluster_environments
from accel_state.devices.select import families

__all__ = ("LAUNCH_VARIABLES", "fresh")

LAUNCH_VARIABLES = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "FORK_LAUNCHED"}
    | {
        name
        for cluster in cluster_environments({})
        for names in (
            cluster.rank_names,
            cluster.world_size_names,
            cluster.local_rank_names,
            cluster.local_world_size_names,
            cluster.node_rank_names,
        )
        for name in names
    }
)
"""Variables in which launchers set ranks and world sizes."""

_VARIABLE_PREFIXES = ("ACCELERATE_", "ACCEL_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


@contextmanager
def fresh(launched: bool = False) -> Iterator[None]:
    """Run a block as in a new process: without state, process groups, or settings in the environment.

    Afterwards it restores environment, generators, threads, processors, default dtype and the root logger's level.

    Args:
        launched: keep the variables in which a launcher set the rank of this process.
    """
    restore = _keep()
    _end()
    for name in list(os.environ):
        if name.startswith(_VARIABLE_PREFIXES) or (not launched and name in LAUNCH_VARIABLES):
            del os.environ[name]
    try:
        yield
    finally:
        _end()
        for put_back in restore:
            put_back()


def _keep() -> list[Callable[[], Any]]:
    """Functions that restore everything that a test may change."""
    environment = dict(os.environ)
    python, host = random.getstate(), torch.get_rng_state()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    logger = logging.getLogger()
    level = logger.level
    return [
        lambda: _set_environment(environment),
        lambda: random.setstate(python),
        lambda: torch.set_rng_state(host),
        lambda: torch.set_num_threads(threads),
        lambda: torch.set_default_dtype(dtype),
        lambda: logger.setLevel(level),
        *_keep_numpy(),
        *_keep_devices(),
        *_keep_processors(),
    ]


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _keep_numpy() -> Iterator[Callable[[], Any]]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        yield lambda: numpy.random.set_state(state)


def _keep_devices() -> Iterator[Callable[[], Any]]:
    for family in families():
        if family.spec.rng_key is not None and family.present() and _is_open(family):
            yield _put_back(family, family.rng_state())


def _is_open(family: Any) -> bool:
    """Whether the device is initialised; reading its generators would initialise it, and prevent forks."""
    is_initialized = getattr(family.module, "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


def _put_back(family: Any, state: Any) -> Callable[[], Any]:
    return lambda: family.set_rng_state(state) if family.present() else None


def _keep_processors() -> Iterator[Callable[[], Any]]:
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        yield lambda: os.sched_setaffinity(0, allowed) if os.sched_getaffinity(0) != allowed else None


def _end() -> None:
    recorder: Any = sys.modules.get("accel_torch.run_recorder")
    if recorder is not None:
        # As at the end of a process: its thread must not write to a folder that the test removes next.
        recorder.wait_for_records()
    current.clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's cache: it contains meshes without groups, and would reuse them for equal new meshes."""
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    # A torch version without this cache needs nothing; the tests of this module check that.
    with suppress(AttributeError):
        tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
