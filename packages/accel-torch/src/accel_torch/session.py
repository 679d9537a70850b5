"""The session: everything that one Accelerator works with, which the functions of this package receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from accel_data.hooks import BatchPauses
from accel_plugins.prepared import PreparedObjects
from accel_plugins.strategy import Strategy
from accel_state import current
from accel_state.watch.record import STATUS_RECORD
from accel_torch.accumulation import Accumulation
from accel_torch.hooks import Folder, Hooks

if TYPE_CHECKING:
    from torch import Tensor

    from accel_plugins.checkpoint.background import BackgroundSaver
    from accel_plugins.checkpoint.boundaries import ContinuousSaver, Preemption
    from accel_plugins.checkpoint.uploads import Uploader
    from accel_plugins.manifest import Manifest
    from accel_plugins.precision.base import Precision
    from accel_plugins.transform import Transform
    from accel_state.current import Process
    from accel_state.gradient import GradientState
    from accel_state.run_state import AcceleratorState
    from accel_torch.options import Options
    from accel_torch.straggler import StragglerReport
    from accel_tracking.group import TrackerGroup

__all__ = ("Guard", "Session")


class Guard(Protocol):
    """What is used of an `accel_torch.step_guard.judge.StepJudge`, which is above this module."""

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Clip complete gradients, and note their norm."""

    def measure(self) -> None:
        """Compute the norms of all optimizers, before gradients are changed."""


class Session:
    """What one Accelerator works with. The Accelerator is a facade over it.

    `start_run.start_session` creates it. The sessions of a process share the run: its backend, strategy and precision.
    All attributes are public: the functions that prepare, step, save and load receive a session and nothing else. No
    object that a session has refers back to it except weakly, so that it is freed with its Accelerator.

    Args:
        options: the arguments of the Accelerator.
        state: the process and its run.
        gradient: the gradient state: the position in the window of micro-batches.
        strategy: the strategy of the run.

    Attributes:
        options: the arguments of the Accelerator; replaced when a script assigns one of its attributes.
        backend: the manifest of the backend: its name, what it can do, and what it does itself.
        precision: how forward, backward and steps are computed.
        guard: judges each step before it is made; None without a `StepGuard`.
        prepared: the prepared objects, and the other objects of a checkpoint.
        accumulation: counts the micro-batches of a window.
        hooks: what is called when the session prepares, steps and saves.
        transforms: the changes that `prepare` applies to every model.
        backward_reads_model: whether the strategy's `backward` needs the model of the loss, which takes time to find.
        guards_first_steps: whether the first steps are still to be checked for mistakes.
        saves: whether anything is saved, and found; a check whose tensors have no values sets it to False.
        report: tells at the end how this process spent its time, or None.
        tracking: the running trackers; None before `init_trackers`.
        saver: writes checkpoints while training continues; None before the first.
        pauses: whether anything happens between two batches.
        preemption: saves and ends the run after a signal; None if it is not asked to.
        continuous: saves between steps without being called; None if it is not asked to.
        uploader: uploads checkpoints to a store; None without a store.
    """

    def __init__(self, options: Options, state: AcceleratorState, gradient: GradientState, strategy: Strategy) -> None:
        manifest = strategy.context.manifest
        assert manifest is not None
        self.options, self.state, self.gradient, self.strategy = options, state, gradient, strategy
        self.backend: Manifest = manifest
        self.precision: Precision = strategy.context.precision
        self.backward_reads_model = strategy.overrides("backward")
        self.hooks = Hooks()
        self.accumulation = Accumulation(gradient, strategy, self.hooks)
        self.prepared = PreparedObjects(scaler=None if manifest.capabilities.own_precision else self.precision)
        self.guard: Guard | None = None
        self.transforms: tuple[Transform, ...] = ()
        self.guards_first_steps = self.saves = True
        self.report: StragglerReport | None = None
        self.tracking: TrackerGroup | None = None
        self.saver: BackgroundSaver | None = None
        self.pauses = BatchPauses()
        self.preemption: Preemption | None = None
        self.continuous: ContinuousSaver | None = None
        self.uploader: Uploader | None = None

    @property
    def process(self) -> Process:
        """This process: its rank, device and transport.

        Raises:
            NoState: the state was reset.
        """
        return current.process()

    def place_to_save(self, path: Folder | None) -> Any:
        """The file or folder to write instead of one that the script gives."""
        for folder_to_save in self.hooks.folder_to_save:
            path = folder_to_save(self, path)
        return path

    def place_to_load(self, path: Folder | None, missing_ok: bool = False) -> Any:
        """The file or folder to read instead of one that the script gives.

        Args:
            path: the path.
            missing_ok: whether there may be nothing.
        """
        for folder_to_load in self.hooks.folder_to_load:
            path = folder_to_load(self, path, missing_ok)
        return path

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Block in which this process saves; it is reported to the hang report and to the hooks."""
        with STATUS_RECORD.during("saving"):
            for before_save in self.hooks.before_save:
                before_save()
            try:
                yield
            finally:
                for after_save in self.hooks.after_save:
                    after_save()

    def restore(self, remembered: dict[str, Any]) -> None:
        """Take over the prepared objects of a pickled session, which then count with this one's gradient state."""
        vars(self.prepared).update(remembered)
        for one in (*self.prepared.optimizers, *self.prepared.schedulers, *self.prepared.loaders):
            one.gradient_state = self.gradient
