"""Marks a model that a failed load has partly written: calling, saving or copying it raises, until a load succeeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from torch import nn

from accel_state.errors import CheckpointError

__all__ = ("LoadGuard", "load_guard")

_MARK: Final = "_accel_failed_load"


class LoadGuard:
    """Shared state of a load under `load_guard`: whether it has changed the model.

    Attributes:
        writes: set to True before the first weight is written.
    """

    def __init__(self) -> None:
        self.writes = False


@contextmanager
def load_guard(model: nn.Module, checkpoint: object) -> Iterator[LoadGuard]:
    """Run a load; if it fails after the first write, the model is marked as unusable.

    A marked model raises CheckpointError with the name of the checkpoint and the first error when it, or a module in
    it, is called, and when its weights are saved or copied. A load that succeeds removes the mark, and so does
    `model.load_state_dict` with all names.

    Args:
        checkpoint: name of the checkpoint, for the error.
    """
    earlier: _FailedLoad | None = vars(model).get(_MARK)
    if earlier is not None:
        earlier.remove()
    guard = LoadGuard()
    try:
        yield guard
    except BaseException as error:
        if guard.writes:
            _FailedLoad(model, checkpoint, error).add()
        elif earlier is not None:
            earlier.add()
        raise


class _FailedLoad:
    """The hooks of a marked model."""

    def __init__(self, model: nn.Module, checkpoint: object, error: BaseException) -> None:
        self._model = model
        self._checkpoint = str(checkpoint)
        self._error = f"{type(error).__name__}: {error}".replace("\n ", "")
        self._handles: list[Any] = []

    def add(self) -> None:
        """Mark the model."""
        module: Any
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._refuse, prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(self._refuse))
        whole: Any = self._model
        self._handles.append(whole.register_load_state_dict_post_hook(self._loaded))
        setattr(self._model, _MARK, self)

    def remove(self) -> None:
        """Remove the mark."""
        while self._handles:
            self._handles.pop().remove()
        delattr(self._model, _MARK)

    def _refuse(self, *_: object) -> NoReturn:
        raise CheckpointError(
            f"Cannot use {type(self._model).__name__}: its weights are partly loaded.",
            f"The load from {self._checkpoint!r} failed: {self._error}",
            "Load it again, or load another checkpoint.",
        )

    def _loaded(self, _: nn.Module, incompatible: Any) -> None:
        if not incompatible.missing_keys:
            self.remove()

    def __reduce__(self) -> NoReturn:
        # Copying and pickling the model call this.
        self._refuse()
