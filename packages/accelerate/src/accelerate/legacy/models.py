"""A question about models that our own packages do not ask."""

from __future__ import annotations

import importlib
from typing import Any

from accel_plugins.wrapped.unwrap import extract_model_from_parallel
from accel_state.availability import is_peft_available

__all__ = ("is_peft_model",)


def is_peft_model(model: Any) -> bool:
    """Whether a model, also one inside of a wrapper, is one of the library peft."""
    if not is_peft_available():
        return False
    library: Any = importlib.import_module("peft")
    return isinstance(extract_model_from_parallel(model), library.PeftModel)
