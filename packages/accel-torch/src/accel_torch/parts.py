"""What the pages of the Accelerator share: the objects they delegate to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_plugins.checkpoint.background import BackgroundSaver
    from accel_plugins.checkpoint.boundaries import ContinuousSaver, Preemption
    from accel_plugins.checkpoint.remote import Uploader
    from accel_plugins.transform import Transform
    from accel_state.gradient import GradientState
    from accel_state.run_state import AcceleratorState
    from accel_torch.accumulation import Accumulation
    from accel_torch.assemble import Engine
    from accel_torch.options import Options
    from accel_torch.registry import Registry
    from accel_torch.sentinel import Sentinel
    from accel_torch.straggler import StragglerReport
    from accel_torch.trigger import Trigger
    from accel_tracking.group import TrackerGroup

__all__ = ("Parts",)


class Parts:
    """The parts of an Accelerator; its pages read them and hold nothing themselves."""

    state: AcceleratorState
    gradient_state: GradientState
    _options: Options
    _engine: Engine
    _accumulation: Accumulation
    _registry: Registry
    _trigger: Trigger
    _sentinel: Sentinel | None
    _report: StragglerReport | None
    _transforms: tuple[Transform, ...]
    _tracking: TrackerGroup | None
    _saver: BackgroundSaver | None
    _preemption: Preemption | None = None
    _uploader: Uploader | None = None
    _continuous: ContinuousSaver | None = None
