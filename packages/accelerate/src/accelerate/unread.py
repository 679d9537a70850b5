"""Warnings about replaced names that nothing here reads, so that a program does not change the training in vain.

A method of the Accelerator is noticed, in the class or in a subclass, when the program next creates a state or an
Accelerator, or calls `prepare`; a global of an old module when it is assigned. Each is named once.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, Final

from accel_state.creation import on_creation
from accel_state.library import stack_level
from accelerate.names import LIBRARIES, PACKAGES, Owner

__all__ = ("warn_of_global", "watch")

_ACTING: Final = {"fsdp2_prepare_model": "accelerate.legacy.fsdp:shard_by"}
"""Global of the original that `prepare` reads -> what makes a replaced one act here."""

_UNREAD_OWNERS: Final = frozenset(
    [
        "accel_megatron.stepwise",
        *(f"accelerate.legacy.{name}" for name in ("fsdp", "fsdp_checkpoints", "precision")),
    ]
)
"""Modules with functions that exist for programs that call them; nothing else does."""

_OWN_CALLS: Final = ("prepare_data_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler")

_warned: Final[set[str]] = set()


def watch() -> None:
    """From now on, look for replaced methods when a state or an Accelerator is created."""
    on_creation(_warn_of_methods)


def _warn_of_methods() -> None:
    from accel_torch.accelerator import Accelerator

    classes: list[type] = [Accelerator]
    for kind in classes:
        classes += type.__subclasses__(kind)
        for name, value in list(vars(kind).items()):
            inherited = any(value is vars(base).get(name, _warned) for base in kind.__mro__[1:])
            if name.startswith("_prepare_"):
                instead = "it is a name of the original library that nothing here reads; Accelerator.prepare does this"
            elif name in _OWN_CALLS and getattr(value, "__module__", None) != Accelerator.__module__:
                instead = "Accelerator.prepare does not call it, so it serves your own calls only"
            else:
                continue
            shown = f"{kind.__module__}.{kind.__qualname__}.{name}"
            if not inherited and shown not in _warned:
                _warned.add(shown)
                _warn(f"{kind.__name__}.{name}", instead)


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
        _warn(
            f"{address}.{name}",
            "it is a name of the original library that nothing here reads; accel packages do what its module does",
        )


def _warn(shown: str, instead: str) -> None:
    warnings.warn(f"{shown} was replaced: {instead}.", UserWarning, stacklevel=stack_level())
