"""A clean state for a test: the slot, the environment and the generators are as before when it ends."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from accel_state import current
from accel_state.topology import SCHEMES

__all__ = ("LAUNCH_VARIABLES", "fresh")

LAUNCH_VARIABLES = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "FORK_LAUNCHED"}
    | {
        name
        for scheme in SCHEMES
        for names in (
            scheme.rank,
            scheme.world_size,
            scheme.local_rank,
            scheme.local_world_size,
            scheme.node_rank,
        )
        for name in names
    }
)
"""Variables by which a launcher tells a process its place."""

_PREFIXES = ("ACCELERATE_", "ACCEL_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


@contextmanager
def fresh(launched: bool = False) -> Iterator[None]:
    """Run a block as in a new process: no state, no settings in the environment, no process group left behind.

    Args:
        launched: keep the variables by which a launcher told this process its place.
    """
    environment = dict(os.environ)
    generators = random.getstate(), torch.get_rng_state()
    _end()
    for name in environment:
        if name.startswith(_PREFIXES) or (not launched and name in LAUNCH_VARIABLES):
            del os.environ[name]
    try:
        yield
    finally:
        _end()
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(generators[0])
        torch.set_rng_state(generators[1])


def _end() -> None:
    current.clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
