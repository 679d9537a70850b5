"""The libraries that train in 8 bits, by name."""

from __future__ import annotations

from enum import Enum

from accel_state.labels import EnumWithContains

__all__ = ("FP8BackendType",)


class FP8BackendType(str, Enum, metaclass=EnumWithContains):
    """Libraries that train in 8 bits."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return self.value
