"""Functions for scripts that use DeepSpeed directly: gathered parameters, and the active configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accel_plugins.deepspeed.engine import gathered
from accel_state.errors import SettingError
from accel_state.run_state import AcceleratorState


@contextmanager
def GatheredParameters(  # noqa: N802 - the name is given
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Context manager in which parameters that DeepSpeed shards are full tensors.

    Args:
        params: a parameter or several.
        modifier_rank: rank of the process that changes the parameters for all; None if no process changes them.
        fwd_module: the module that uses the parameters in forward, if it is not their owner.
        enabled: whether to gather; False does nothing.

    Raises:
        Missing: parameters are sharded, and DeepSpeed is not installed.
    """
    with gathered(params, modifier_rank, fwd_module, enabled):
        yield


def get_active_deepspeed_plugin(state: AcceleratorState) -> Any:
    """The active DeepSpeed configuration.

    Raises:
        SettingError: the run does not use DeepSpeed.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise SettingError(
            "Cannot read the DeepSpeed configuration of the run.",
            "The run does not use DeepSpeed.",
            "Give DeepSpeedPlugin(...) to the Accelerator, or launch with --use_deepspeed.",
        )
    return plugin
