"""Experiment trackers, profiles, and the end of training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from accel_state.library import stack_level
from accel_torch.accelerator.facade import Facade
from accel_torch.start_run import leave

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel_torch.profile import ProfileKwargs

__all__ = ("TrackingMixin",)


class TrackingMixin(Facade):
    """Experiment trackers."""

    @property
    def log_with(self) -> list[Any]:
        """The trackers given as `log_with`, not yet started."""
        return list(self.session.options.log_with)

    @log_with.setter
    def log_with(self, trackers: Any) -> None:
        listed = [] if trackers is None else trackers if isinstance(trackers, (list, tuple)) else [trackers]
        self.session.options = self.session.options._replace(log_with=tuple(listed))

    @property
    def trackers(self) -> list[Any]:
        """The running trackers; empty before `init_trackers` and on processes that do not log."""
        return self.session.tracking.trackers if self.session.tracking is not None else []

    @trackers.setter
    def trackers(self, trackers: Iterable[Any]) -> None:
        from accel_tracking.group import TrackerGroup

        self.session.tracking = TrackerGroup(trackers)

    @property
    def project_dir(self) -> str | None:
        """The folder for checkpoints."""
        return self.session.options.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder for logs."""
        return self.session.options.project.logging_dir

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """Start the trackers given as `log_with`.

        Args:
            project_name: the name of the project or run; its meaning depends on the tracker.
            config: the run's configuration, such as hyperparameters, which every tracker stores.
            init_kwargs: further arguments for each tracker, by tracker name.
            strict: raise errors of trackers. Otherwise they are warnings, and are counted.

        Example:
            >>> accelerator.init_trackers("digits", config={"learning_rate": 0.1})
            >>> accelerator.log({"loss": loss}, step=0)
        """
        from accel_tracking.group import TrackerGroup

        self.session.tracking = TrackerGroup.of(self.log_with, project_name, self.logging_dir, init_kwargs, strict)
        self.session.tracking.start(config)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        reduce: str | None = None,
    ) -> None:
        """Log values with every tracker.

        Args:
            values: numbers, texts or nested dicts of them, by name.
            step: the position on the x-axis.
            log_kwargs: further arguments for each tracker, by tracker name.
            reduce: "mean", "sum", "min" or "max" over all processes, instead of the main process's values. Every
                process must then call `log` with the same names, which costs one collective.

        Raises:
            SettingError: `reduce` is unknown, or a value to reduce is not a number; raised on every process.
            ShapeMismatch: the processes log different names; raised on every process.

        Example:
            >>> accelerator.log({"loss": loss, "accuracy": accuracy}, step=step, reduce="mean")
        """
        if reduce is not None:
            from accel_torch.logged_values import reduced

            values = reduced(values, reduce)
        if self.session.tracking is not None:
            self.session.tracking.log(values, step, log_kwargs)
            self._log_sample_counts(step)
        elif self.state.is_main_process:
            warnings.warn(
                "Accelerator.log() logs nothing: no tracker runs. Name one in Accelerator(log_with=...), and call "
                "init_trackers() first.",
                UserWarning,
                stacklevel=stack_level(),
            )

    def _log_sample_counts(self, step: int | None) -> None:
        if self.session.tracking is not None and self.session.tracking.trackers and self.session.prepared.loaders:
            from accel_torch.logged_values import log_sample_counts

            log_sample_counts(self.session.tracking, self.session.prepared.loaders, step)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The running tracker of a name. If no tracker runs, one that ignores all calls.

        Args:
            name: the tracker's name, such as "jsonl".
            unwrap: return the object of the tracker's library instead, for example a wandb run.

        Raises:
            SettingError: trackers run, but none has that name.

        Example:
            >>> accelerator.init_trackers("digits")
            >>> tracker = accelerator.get_tracker("jsonl")
        """
        if self.session.tracking is None or not self.session.tracking.trackers:
            from accel_tracking.base import GeneralTracker

            return GeneralTracker(_blank=True)
        return self.session.tracking.get(name, unwrap)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Context manager that profiles its block on every process, and returns torch's profiler.

        Args:
            profile_handler: replaces the Accelerator's `ProfileKwargs`.

        Example:
            >>> with accelerator.profile(ProfileKwargs(output_trace_dir="traces")) as profiler:
            ...     for batch in loader:
            ...         train(batch)
            ...         profiler.step()
        """
        from accel_torch.profile import ProfileKwargs, profiled

        handler = profile_handler or self.session.options.handler(ProfileKwargs) or ProfileKwargs()
        return profiled(self.session.process, handler)

    def end_training(self) -> None:
        """Finish all trackers and a checkpoint in the background; call it on every process when training ends.

        When every Accelerator of the run has ended its training, the backend releases its resources. Models can still
        be read and saved.

        Example:
            >>> accelerator.end_training()
        """
        if self.session.report is not None:
            log = None if self.session.tracking is None else self.log
            self.session.report.tell(log, self.state.is_main_process)
        self._log_sample_counts(None)
        if self.session.tracking is not None:
            self.session.tracking.finish()
        self.state.wait_for_everyone()
        if self.session.continuous is not None:
            self.session.continuous.leave()
        if self.session.saver is not None:
            self.session.saver.wait()
        if self.session.uploader is not None:
            self.session.uploader.close()
        leave(self.session)
