"""Reduces the batch size until a batch fits into the device's memory, on all ranks together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from accel_ops.agreement import StoreBarrier
from accel_state import current
from accel_state.errors import OutOfMemory, SettingError, UnknownKind
from accel_state.memory import clear_device_cache, should_reduce_batch_size

if TYPE_CHECKING:
    from accel_state.identity import Process

__all__ = ("all_fit", "find_executable_batch_size")

_SHRINK_FACTOR: Final = 0.9
"""Factor by which the batch size is reduced after a batch that did not fit."""


def all_fit(outcomes: Sequence[str]) -> str:
    """Combine the answers of the ranks: "yes" if the batch fitted on all of them."""
    return "yes" if all(outcome == "yes" for outcome in outcomes) else "no"


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: call a function with a batch size, and again with smaller ones while the device runs out of memory.

    The next call starts with the size that fitted. In a run of several processes, all processes must call the function.
    If one runs out of memory, all continue with the smaller size once they have returned. If one raises another error,
    all processes raise.

    Args:
        function: takes the batch size as its first argument; the caller leaves it out.
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: returns the next size; by default nine tenths of the previous one.

    Raises:
        UnknownKind: the function takes no batch size, or the caller passed one.
        OutOfMemory: not even one sample fitted.
        SettingError: `reduce_batch_size_fn` returned a size that is not smaller.
        CollectiveError: another process failed, or did not return in time.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size):
        ...     return batch_size
        >>> train()
        64
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    return _Retrying(function, starting_batch_size, reduce_batch_size_fn).decorated()


class _Retrying:
    """A function and the batch size to try next."""

    def __init__(self, function: Callable[..., Any], size: int, reduce: Callable[[], int] | None) -> None:
        self.function = function
        self.size = size
        self.reduce = reduce or self._shrink
        self.signature = inspect.signature(function)

    def decorated(self) -> Callable[..., Any]:
        @functools.wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check(args, kwargs)
        clear_device_cache(garbage_collection=True)
        error: Exception | None = None
        while self.size >= 1:
            fitted, result, error = self._try(args, kwargs)
            if fitted:
                return result
            # The traceback refers to the frames, and thereby to the tensors that did not fit.
            error = error.with_traceback(None) if error else None
            clear_device_cache(garbage_collection=True)
            self.size = self._smaller()
        raise OutOfMemory(
            "No executable batch size found, reached zero.",
            f"The device ran out of memory in {self.function.__qualname__}() with a single sample.",
            "Use a smaller model, shorter samples, or a device with more memory.",
        ) from error

    def _try(self, args: Any, kwargs: Any) -> tuple[bool, Any, Exception | None]:
        """Whether the size fitted on all ranks, the function's result here, and its out-of-memory error here."""
        try:
            result, error = self._run(args, kwargs)
        except Exception as failure:
            if (process := _several()) is not None:
                self._barrier(process).fail(failure)
            raise
        # The function may have started the run: some scripts create their Accelerator in it.
        process = _several()
        if process is None:
            return error is None, result, error
        outcome = self._barrier(process).wait("outcome", "no" if error else "yes", all_fit, last=True)
        return outcome == "yes", result, error

    def _run(self, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
        """The function's result, or its out-of-memory error."""
        try:
            return self.function(self.size, *args, **kwargs), None
        except Exception as error:
            if not should_reduce_batch_size(error):
                raise
            return None, error

    def _barrier(self, process: Process) -> StoreBarrier:
        return StoreBarrier(
            process, "batch size", f"Cannot run {self.function.__qualname__}() with {self.size} samples."
        )

    def _shrink(self) -> int:
        return int(self.size * _SHRINK_FACTOR)

    def _smaller(self) -> int:
        size = self.reduce()
        if size >= self.size:
            raise SettingError(
                f"Cannot try a batch of {size} after one of {self.size} did not fit (reduce_batch_size_fn).",
                "The size must decrease, or the search would never end.",
                "Make reduce_batch_size_fn return a smaller size each time.",
            )
        return size

    def _check(self, args: Any, kwargs: Any) -> None:
        try:
            self.signature.bind(self.size, *args, **kwargs)
        except TypeError as error:
            name = self.function.__name__
            names = list(self.signature.parameters)[1:]
            shorter = ", ".join(f"{parameter}={value}" for parameter, value in zip(names, args[1:], strict=False))
            failed = f"Cannot call {name}() with a batch size of find_executable_batch_size."
            if len(args) >= len(self.signature.parameters):
                failed = (
                    f"Batch size was passed into `{name}` as the first argument when called: `{name}({shorter})` does."
                )
            raise UnknownKind(
                failed,
                f"It receives the batch size as its first argument, before those of the caller: {error}.",
                "Make the batch size its first parameter, and omit it in the call.",
            ) from None


def _several() -> Process | None:
    """This process if the run has several processes, else None."""
    process = current.process_or_none()
    return None if process is None or process.world_size == 1 else process
