"""Changes of the model that go with any strategy."""

from __future__ import annotations

from typing import Final

__all__ = ("DYNAMO_VARIABLE",)

DYNAMO_VARIABLE: Final = "ACCELERATE_DYNAMO_BACKEND"
"""The variable that asks for `torch.compile`, by which a process knows whether to load its settings."""
