"""Modules of Megatron-LM, imported when something of them is first asked for.

So engines, train steps and stand-ins can be imported where Megatron-LM is not installed.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from accel_state.settings.installed import Requirement

__all__ = (
    "REQUIREMENT",
    "dist_checkpointing",
    "mapping",
    "parallel_state",
    "pipeline_parallel",
    "tensor_parallel",
    "tools",
)

REQUIREMENT: Final = Requirement("megatron.core", "megatron-core", ">=0.16", extra="accel-plugins[megatron]")


class _Module:
    """A placeholder for a module until the first access to an attribute.

    Args:
        name: the module's.

    Raises:
        Missing: Megatron-LM is not installed.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        REQUIREMENT.demand(f"Cannot use {self._name}.{attribute}.")
        found = getattr(importlib.import_module(self._name), attribute)
        vars(self)[attribute] = found
        return found


parallel_state: Final[Any] = _Module("megatron.core.parallel_state")
tensor_parallel: Final[Any] = _Module("megatron.core.tensor_parallel")
pipeline_parallel: Final[Any] = _Module("megatron.core.pipeline_parallel")
dist_checkpointing: Final[Any] = _Module("megatron.core.dist_checkpointing")
mapping: Final[Any] = _Module("megatron.core.dist_checkpointing.mapping")
tools: Final[Any] = _Module("megatron.core.utils")
