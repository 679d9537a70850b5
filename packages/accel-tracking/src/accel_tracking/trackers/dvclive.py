"""DVCLive: metrics as files that DVC versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import GeneralTracker, on_main_process
from accel_tracking.values import flat, is_number, plain, scalars_as_numbers

__all__ = ("DVCLiveTracker",)


class DVCLiveTracker(GeneralTracker):
    """Keeps a run in the folder of a `dvclive.Live`.

    Args:
        run_name: not used by DVCLive, which names runs itself; here because every tracker takes it.
        live: a `Live` of your own; made from `kwargs` when None.
        kwargs: for `dvclive.Live`, such as `dir`.
    """

    name = "dvclive"
    requires_logging_directory = False
    requirement = Requirement("dvclive", extra="accel-tracking[dvclive]")

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.live = live
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The `Live`."""
        return self.live

    @on_main_process
    def start(self) -> None:
        """Make the `Live`, unless one was given."""
        self.requirement.demand("The tracker 'dvclive' was started.")
        from dvclive import Live

        self.live = self.live or Live(**self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the hyperparameters as `params.yaml`."""
        self.live.log_params(plain(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text as metrics of a step, and go on to the next step."""
        if step is not None:
            self.live.step = step
        for name, value in flat(scalars_as_numbers(values)).items():
            self.live.log_metric(name, value if is_number(value) else str(plain(value)), **kwargs)
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        """Write the summary."""
        self.live.end()
