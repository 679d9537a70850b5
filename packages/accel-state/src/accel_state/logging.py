"""Logging in several processes: a record is logged once, by every process, or by every process in turn."""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from accel_state import current
from accel_state.errors import NotReady
from accel_state.settings.environ import read_setting
from accel_state.settings.run import OutputSettings
from accel_state.settings.schema import settings_of

__all__ = ("MultiProcessAdapter", "get_logger")

_LEVEL_SETTING = settings_of(OutputSettings)["log_level"]

# Stack level of the caller; 1 is this module's `log`.
_STACK_LEVEL = 2


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger that logs on the main process only, unless a call selects others; each message begins with the rank.

    Each call takes two more keywords: `main_process_only` (True by default), and `in_order`, which makes the processes
    log one after the other. `stacklevel` counts from the method of this class: 2 is its caller, 3 the caller's caller.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log on the processes that the keywords select.

        Raises:
            NotReady: there is no state yet, so the rank of this process is not known.
        """
        process = current.process_or_none()
        if process is None:
            raise NotReady(
                f"Cannot log a message through the logger {self.logger.name!r}.",
                "There is no state yet, so the rank of this process is not known.",
                "Create a PartialState() or an Accelerator() before logging.",
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", _STACK_LEVEL)
        if not self.isEnabledFor(level):
            return
        if in_order:
            self._log_in_order(level, msg, args, kwargs)
        elif not main_process_only or process.rank == 0:
            self._emit(level, msg, args, kwargs)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """The message with "[RANK 0] " in front, and the keywords; called for each record."""
        text, kwargs = super().process(msg, kwargs)
        return f"[RANK {current.process().rank}] {text}", kwargs

    def _emit(self, level: int, msg: object, args: tuple[object, ...], kwargs: MutableMapping[str, Any]) -> None:
        text, kwargs = self.process(msg, kwargs)
        self.logger.log(level, text, *args, **{**kwargs, "stacklevel": kwargs["stacklevel"] + 1})

    def _log_in_order(
        self, level: int, msg: object, args: tuple[object, ...], kwargs: MutableMapping[str, Any]
    ) -> None:
        from accel_state.protocol.call import barrier

        process = current.process()
        for rank in range(process.world_size):
            if rank == process.rank:
                self._emit(level, msg, args, {**kwargs, "stacklevel": kwargs["stacklevel"] + 1})
            barrier(process.transport, "log")

    @functools.cache  # noqa: B019 - loggers live as long as the process
    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Warn at the first call with these arguments."""
        self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", _STACK_LEVEL) + 1})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for several processes.

    Args:
        name: usually `__name__`.
        log_level: a level such as "INFO"; by default that of the variable ACCELERATE_LOG_LEVEL.

    Raises:
        SettingError: there is no such level.

    Example:
        >>> logger = get_logger(__name__)
        >>> logger.info("once")
        >>> logger.info("by every process", main_process_only=False)
    """
    configured = read_setting(_LEVEL_SETTING)
    level = (
        _LEVEL_SETTING.parse(log_level, "argument")
        if log_level is not None
        else (configured.value if configured else None)
    )
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level)
        logger.root.setLevel(level)
    return MultiProcessAdapter(logger, {})
