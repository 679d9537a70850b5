"""`deepspeed_required`: a decorator for functions that need DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

from accel_state.settings.requirement import Requirement

__all__ = ("deepspeed_required",)

F = TypeVar("F", bound=Callable[..., Any])

_DEEPSPEED: Final = Requirement("deepspeed")


def deepspeed_required(func: F) -> F:
    """Let the decorated function run only where DeepSpeed is installed.

    Raises:
        Missing: by the decorated function, where it is not.
    """

    @functools.wraps(func)
    def with_deepspeed(*args: Any, **kwargs: Any) -> Any:
        _DEEPSPEED.demand(f"{func.__name__}() was called.")
        return func(*args, **kwargs)

    wrapped: Any = with_deepspeed
    return wrapped  # type: ignore[no-any-return]
