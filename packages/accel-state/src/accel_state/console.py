"""What goes to the terminal: progress bars that only one process of a node draws."""

from __future__ import annotations

from typing import Any

from accel_state import current
from accel_state.settings.requirement import Requirement

__all__ = ("tqdm",)

_TQDM = Requirement("tqdm", extra="accel-state[console]")


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar of the library tqdm, drawn by the first process of each node only.

    Args:
        args: as `tqdm.auto.tqdm` takes them.
        main_process_only: False draws a bar on every process.

    Raises:
        Missing: tqdm is not installed.
    """
    _TQDM.demand("A progress bar was asked for.")
    from tqdm.auto import tqdm as bar

    if main_process_only and not current.process_or_start().topology.is_local_main:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
