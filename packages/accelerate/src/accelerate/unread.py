"""Warnings about replaced globals of old modules that nothing here reads; a program would replace them in vain.

`accelerate.private_names` does the same for private names of classes.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, Final

from accel_state.library import stack_level
from accelerate.names import LIBRARIES, PACKAGES, Owner

__all__ = ("warn_of_global", "warn_of_replaced")

_ACTING: Final = {"fsdp2_prepare_model": "accelerate.legacy.fsdp:shard_by"}
"""Global of the original that `prepare` reads -> what makes a replaced one act here."""

_UNREAD_OWNERS: Final = frozenset(
    [
        "accel_megatron.stepwise",
        *(f"accelerate.legacy.{name}" for name in ("fsdp", "fsdp_checkpoints", "precision")),
    ]
)
"""Modules with functions that exist for programs that call them; nothing else does."""


def warn_of_global(address: str, name: str, owner: Owner | None, value: Any) -> None:
    """Warn about a replaced global of an old module if nothing here reads it, or make the new one act.

    Args:
        address: address of the old module.
        name: the global.
        owner: what defines it in this project; None if nothing does.
        value: the new object.
    """
    if owner is not None and name in _ACTING:
        module, _, function = _ACTING[name].partition(":")
        getattr(importlib.import_module(module), function)(value)
        return
    own = owner is not None and getattr(value, "__module__", None) == owner.module
    unread = owner.module in _UNREAD_OWNERS if owner is not None else name.startswith("_") or name in LIBRARIES
    if unread and not own and address not in PACKAGES:
        warn_of_replaced(
            f"{address}.{name}",
            "it is a name of the original library that nothing here reads; accel packages do what its module does",
        )


def warn_of_replaced(shown: str, instead: str) -> None:
    """Warn about a replaced name, at the line of the program.

    Args:
        shown: the name as the program writes it.
        instead: why it has no effect, and what does it here.
    """
    warnings.warn(f"{shown} was replaced: {instead}.", UserWarning, stacklevel=stack_level())
