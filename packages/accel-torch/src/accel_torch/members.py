"""The attributes of an Accelerator, and how it joins the run of its process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accel_plugins.prepared import PreparedObjects
from accel_state.hang_report.progress import PROGRESS, STATUS_FOLDER
from accel_torch.accumulation import Accumulation
from accel_torch.assemble import assemble, transforms_of
from accel_torch.observers import RUN_OBSERVERS, guarding, reporting, watching

if TYPE_CHECKING:
    from torch import Tensor

    from accel_plugins.checkpoint.background import BackgroundSaver
    from accel_plugins.checkpoint.boundaries import ContinuousSaver, Preemption
    from accel_plugins.checkpoint.remote import Uploader
    from accel_plugins.transform import Transform
    from accel_state.gradient import GradientState
    from accel_state.run_state import AcceleratorState
    from accel_torch.assemble import ActiveBackend
    from accel_torch.goodput import GoodputRecorder
    from accel_torch.options import Options
    from accel_torch.replicas import ReplicaChecker
    from accel_torch.straggler import StragglerReport
    from accel_tracking.group import TrackerGroup

__all__ = ("AcceleratorMembers", "Pauses")


class Pauses:
    """Whether anything happens between the batches of an Accelerator; see `accel_data.hooks.BatchPauses`.

    Attributes:
        used: whether it saves, or ends the run if it is asked to.
    """

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = False


class AcceleratorMembers:
    """The attributes of an Accelerator, which its mixins and the functions of this package use.

    Attributes:
        state: the process and its run.
        gradient_state: the position in the window of micro-batches.
        flag_tensor: the flag of `set_trigger`, on the device: 1 if this process has set it; None before the first use.
    """

    state: AcceleratorState
    gradient_state: GradientState
    flag_tensor: Tensor | None = None
    _options: Options
    _backend: ActiveBackend
    _accumulation: Accumulation
    _prepared: PreparedObjects
    _replica_checker: ReplicaChecker | None
    _report: StragglerReport | None
    _transforms: tuple[Transform, ...]
    _tracking: TrackerGroup | None = None
    _saver: BackgroundSaver | None = None
    _pauses: Pauses
    _preemption: Preemption | None = None
    _uploader: Uploader | None = None
    _continuous: ContinuousSaver | None = None
    _guards_first_steps: bool = True

    def _begin(self, options: Options) -> None:
        """Join the run of this process."""
        for observer in RUN_OBSERVERS:
            options = observer.configures(options)
        self._options = options
        folder = options.project.project_dir or options.project.logging_dir
        if folder is not None:
            PROGRESS.writes_to(folder)
        self._report = reporting(self._options)
        account = _account_of(self._options)
        self.state, self.gradient_state, self._backend = assemble(self._options, (self._report, account))
        self._backend.join(self)
        owned = self._backend.capabilities.own_accumulation
        self._accumulation = Accumulation(
            self.gradient_state, self._backend.strategy, owned, self._backend.plain_backward
        )
        self._prepared = PreparedObjects(
            scaler=None if self._backend.capabilities.own_precision else self._backend.precision
        )
        self._pauses = Pauses()
        self._replica_checker = watching(self._options, self._prepared, self._backend.strategy)
        self._transforms = transforms_of(self._options, self.state.parallelism_config)
        if self.state.num_processes > 1:
            self._guard_first_steps()
        if self._report is not None:
            self._report.watch_methods(self)
        for observer in RUN_OBSERVERS:
            observer.begins(self)

    def _guard_first_steps(self) -> None:
        """Check the first steps for mistakes. One process has none before `prepare`, which spares it the import."""
        if self._guards_first_steps:
            self._guards_first_steps = False
            guard = guarding(self._options, self.gradient_state, self._backend, self._prepared)
            self._accumulation.watch_by(guard)

    def __copy__(self) -> AcceleratorMembers:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> Any:
        # An unpickled Accelerator joins the run of the process that unpickles it.
        remembered = {name: value for name, value in vars(self._prepared).items() if name != "scaler"}
        options = self._options._replace(backends=dict(self._options.backends), plugins=dict(self._options.plugins))
        return _taking_part, (type(self), options, remembered)


def _account_of(options: Options) -> GoodputRecorder | None:
    """The recorder of this process's time, or None. In a launched run, also start recording the ids of samples."""
    if os.environ.get(STATUS_FOLDER):
        from accel_torch.samples_at_hand import record_samples

        record_samples()
    if not options.goodput:
        return None
    from accel_torch.goodput import recorder_of

    return recorder_of(options)


def _taking_part(kind: type[AcceleratorMembers], options: Options, remembered: dict[str, Any]) -> AcceleratorMembers:
    accelerator = kind.__new__(kind)
    accelerator._begin(options)
    prepared = accelerator._prepared
    vars(prepared).update(remembered)
    for one in (*prepared.optimizers, *prepared.schedulers, *prepared.loaders):
        one.gradient_state = accelerator.gradient_state
    return accelerator
