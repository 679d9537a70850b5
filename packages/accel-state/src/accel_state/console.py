"""Output to the terminal: progress bars that one process of a node draws, and coloured tracebacks."""

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
        args: as `tqdm.auto.tqdm` takes them.
        main_process_only: False draws a bar on every process.
        kwargs: as `tqdm.auto.tqdm` takes them.

    Raises:
        Missing: tqdm is not installed.
        SettingError: the first argument is a bool, as an older form of this function took it.
    """
    _TQDM.demand("Cannot draw a progress bar.")
    if args and isinstance(args[0], bool):
        raise SettingError(
            f"Cannot iterate over {args[0]} in tqdm().",
            "The first argument must be an iterable.",
            f"Write tqdm(..., main_process_only={args[0]}).",
        )
    from tqdm.auto import tqdm as bar

    # A bar needs the local rank alone: it must not make this process join the others.
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
