"""DVCLive: metrics as files that DVC versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import as_number, flatten_keys, plain, scalars_as_numbers

__all__ = ("DVCLiveTracker",)


class DVCLiveTracker(LibraryTracker):
    """Stores a run in the folder of a `dvclive.Live`.

    Args:
        run_name: unused, because DVCLive names runs itself.
        live: your own `Live`; if None, one is constructed from `kwargs`.
        kwargs: arguments for `dvclive.Live`, such as `dir`.
    """

    name = "dvclive"
    requirement = Requirement("dvclive")

    live = LibraryTracker.tracker

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self.live = live

    def open(self) -> Any:
        """Construct the `Live`, unless the constructor received one."""
        from dvclive import Live

        return self.live or Live(**self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters as `params.yaml`."""
        self.live.log_params(plain(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text as metrics of a step, and advance to the next step."""
        if step is not None:
            self.live.step = step
        for name, value in flatten_keys(scalars_as_numbers(values)).items():
            number = as_number(value)
            self.live.log_metric(name, str(plain(value)) if number is None else number, **kwargs)
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        """Write the summary."""
        self.live.end()
