"""Terminal output: progress bars that only one process of a node draws, and coloured tracebacks."""

from __future__ import annotations

from typing import Any

from accel_state import current
from accel_state.errors import SettingError
from accel_state.settings.environ import from_environment
from accel_state.settings.installed import Requirement
from accel_state.settings.run import OutputSettings
from accel_state.topology import read_topology

__all__ = ("install_tracebacks", "tqdm")

_TQDM = Requirement("tqdm")
_RICH = Requirement("rich")


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A progress bar of the library tqdm; only the local main process draws it.

    Args:
        args: arguments of `tqdm.auto.tqdm`.
        main_process_only: False draws a bar on every process.
        kwargs: keyword arguments of `tqdm.auto.tqdm`.

    Raises:
        Missing: tqdm is not installed.
        SettingError: the first argument is a bool, which an older form of this function accepted.
    """
    _TQDM.demand("Cannot draw a progress bar.")
    if args and isinstance(args[0], bool):
        raise SettingError(
            f"Cannot iterate over {args[0]} in tqdm().",
            "The first argument must be an iterable.",
            f"Write tqdm(..., main_process_only={args[0]}).",
        )
    from tqdm.auto import tqdm as bar

    # A bar needs only the local rank. It must not connect this process to the others.
    process = current.process_or_none()
    topology = read_topology() if process is None else process.topology
    if main_process_only and not topology.is_local_main:
        kwargs["disable"] = True
    return bar(*args, **kwargs)


def install_tracebacks() -> None:
    """Show tracebacks in colours if ACCELERATE_ENABLE_RICH is set.

    Raises:
        Missing: rich is not installed.
    """
    if from_environment(OutputSettings).enable_rich:
        _RICH.demand("Cannot show tracebacks in colours, which ACCELERATE_ENABLE_RICH enables.")
        from rich.traceback import install

        install(show_locals=False)
