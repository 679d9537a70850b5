"""What a run logs and where, its profiles, and the end of its training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from accel_torch.members import AcceleratorMembers

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel_torch.profile import ProfileKwargs

__all__ = ("TrackingMixin",)


class TrackingMixin(AcceleratorMembers):
    """Experiment trackers."""

    @property
    def log_with(self) -> list[Any]:
        """The trackers of `log_with=`."""
        return list(self._options.log_with)

    @log_with.setter
    def log_with(self, trackers: Any) -> None:
        given = [] if trackers is None else trackers if isinstance(trackers, (list, tuple)) else [trackers]
        self._options = self._options._replace(log_with=tuple(given))

    @property
    def trackers(self) -> list[Any]:
        """Trackers that were started; empty before `init_trackers` and on processes that do not log."""
        return self._tracking.trackers if self._tracking is not None else []

    @trackers.setter
    def trackers(self, trackers: Iterable[Any]) -> None:
        from accel_tracking.group import TrackerGroup

        self._tracking = TrackerGroup(trackers)

    @property
    def project_dir(self) -> str | None:
        """Folder of checkpoints."""
        return self._options.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder of logs."""
        return self._options.project.logging_dir

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """Start the trackers of `log_with=`.

        Args:
            project_name: name of the project or run, as each tracker understands it.
            config: what the run was configured with; stored by every tracker.
            init_kwargs: arguments for single trackers, by their name.
            strict: let errors of trackers end the run; otherwise they are warned about and counted.

        Example:
            >>> accelerator.init_trackers("digits", config={"learning_rate": 0.1})
            >>> accelerator.log({"loss": loss}, step=0)
        """
        from accel_tracking.group import TrackerGroup

        self._tracking = TrackerGroup.of(self.log_with, project_name, self.logging_dir, init_kwargs, strict)
        self._tracking.start(config)

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
            values: by name; numbers, texts or nested dicts of those.
            step: where on the x-axis they belong.
            log_kwargs: arguments for single trackers, by their name.
            reduce: "mean", "sum", "min" or "max" logs one number for all processes instead of that of the main process.
                Every process then calls it with the same names, at the cost of one collective.

        Raises:
            SettingError: an unknown reduction; on every process, a value that is not a number.
            ShapeMismatch: on every process, when they log different names.

        Example:
            >>> accelerator.log({"loss": loss, "accuracy": accuracy}, step=step, reduce="mean")
        """
        if reduce is not None:
            from accel_torch.logged_values import reduced

            values = reduced(values, reduce)
        if self._tracking is not None:
            self._tracking.log(values, step, log_kwargs)
            self._log_sample_counts(step)

    def _log_sample_counts(self, step: int | None) -> None:
        if self._tracking is not None and self._tracking.trackers and self._prepared.loaders:
            from accel_torch.logged_values import log_sample_counts

            log_sample_counts(self._tracking, self._prepared.loaders, step)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, or what it wraps; one that keeps nothing where none was started.

        Raises:
            SettingError: others were started, and none of that name.

        Example:
            >>> accelerator.init_trackers("digits")
            >>> tracker = accelerator.get_tracker("jsonl")
        """
        if self._tracking is None or not self._tracking.trackers:
            from accel_tracking.base import GeneralTracker

            return GeneralTracker(_blank=True)
        return self._tracking.get(name, unwrap)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """A block that is profiled on every process; gives torch's profiler.

        Args:
            profile_handler: replaces the one of the Accelerator; see `ProfileKwargs`.

        Example:
            >>> with accelerator.profile(ProfileKwargs(output_trace_dir="traces")) as profiler:
            ...     for batch in loader:
            ...         train(batch)
            ...         profiler.step()
        """
        from accel_torch.profile import ProfileKwargs, profiled

        handler = profile_handler or self._options.handler(ProfileKwargs) or ProfileKwargs()
        return profiled(self.state._process, handler)

    def end_training(self) -> None:
        """Finish all trackers and the checkpoint that is being saved or copied; called once, when the training ends.

        The backend gives back what it opened, once every Accelerator of the run has ended its training. Models can
        still be read and saved.

        Example:
            >>> accelerator.end_training()
        """
        if self._report is not None:
            self._report.tell(self.log, self.state.is_main_process)
        self._log_sample_counts(None)
        if self._tracking is not None:
            self._tracking.finish()
        self.state.wait_for_everyone()
        if self._continuous is not None:
            self._continuous.leave()
        if self._saver is not None:
            self._saver.wait()
        if self._uploader is not None:
            self._uploader.close()
        self._backend.leave(self)
