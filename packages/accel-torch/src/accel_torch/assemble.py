"""Putting the parts of an Accelerator together: process, precision, backend, run.

The first Accelerator makes the run; those that follow share it, and may not ask for other options than it was made
with.
"""

from __future__ import annotations

import atexit
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_plugins import resolve
from accel_plugins.context import Context
from accel_plugins.manifest import Duty, Manifest
from accel_plugins.precision.base import Precision
from accel_plugins.precision.select import choose
from accel_plugins.strategy import Strategy
from accel_state import current
from accel_state.current import Process, Run
from accel_state.errors import Conflict
from accel_state.gradient import GradientAccumulationPlugin, GradientState
from accel_state.kwargs import InitProcessGroupKwargs
from accel_state.process import PartialState
from accel_state.run_state import AcceleratorState, check_given, precision_name
from accel_torch.options import Options
from accel_torch.parallelism import parallelism_config_of

if TYPE_CHECKING:
    from accel_torch.straggler import StragglerReport

__all__ = ("Engine", "assemble")


@dataclass(eq=False)
class Engine:
    """What does the work of a run; the strategy of `accel_state.current.Run`.

    Args:
        manifest: what the backend declares about itself.
        strategy: the backend at work.
        precision: how forward, backward and steps are computed.

    Attributes:
        closed: whether the strategy gave back what it opened.
    """

    manifest: Manifest
    strategy: Strategy
    precision: Precision
    closed: bool = field(default=False, init=False)
    _training: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, init=False)

    def join(self, accelerator: object) -> None:
        """Note an Accelerator that trains with the strategy."""
        self._training.add(accelerator)

    def leave(self, accelerator: object) -> None:
        """Note that an Accelerator ended its training; the last one closes the strategy."""
        self._training.discard(accelerator)
        if not self._training:
            self.close()

    def close(self) -> None:
        """Let the strategy give back what it opened; a repeated call does nothing."""
        if not self.closed:
            self.closed = True
            self.strategy.close()

    def owns(self, duty: Duty) -> bool:
        """Whether the backend does a job by itself."""
        return duty in self.manifest.owns


def assemble(options: Options, report: StragglerReport | None = None) -> tuple[AcceleratorState, GradientState, Engine]:
    """Join the other processes, choose the backend and start the run; or share the run there is.

    Args:
        options: arguments of the Accelerator.
        report: is to time the collectives of this process.

    Raises:
        Conflict: an option differs from the one that the run was made with, or cannot differ from it.
        SettingError, Missing, NotOffered: an option has an invalid value, needs a package, or is not supported.
    """
    group = options.handler(InitProcessGroupKwargs)
    PartialState(options.cpu, **(vars(group) if group is not None else {}))
    if report is not None:
        report.watch_collectives()
    given = {
        "mixed_precision": options.mixed_precision,
        "backend": options.backend,
        "parallelism_config": options.parallelism_config,
        **options.backends,
    }
    check_given(given)
    run = current.run_or_none()
    if run is not None and isinstance(run.strategy, Engine):
        if run.strategy.closed:
            run = run._replace(strategy=_reopened(run.strategy))
            current.set_run(run)
        return AcceleratorState(), _gradient(options, run.strategy), run.strategy
    gradient = GradientState.of(options.accumulation)
    run = _run(options, current.process(), gradient, {**given, **options.plugins})
    current.set_run(run)
    return AcceleratorState(), gradient, run.strategy


def _opened(engine: Engine) -> Engine:
    """The engine, whose strategy is closed when the run or the process ends, where nobody closed it before."""
    current.on_run_end(engine.close)
    known = weakref.ref(engine)

    def close_at_exit() -> None:
        engine = known()
        if engine is not None:
            engine.close()

    atexit.register(close_at_exit)
    current.on_run_end(lambda: atexit.unregister(close_at_exit))
    return engine


def _reopened(engine: Engine) -> Engine:
    """A new strategy for a run that goes on after all its Accelerators ended their training."""
    old = engine.strategy
    strategy = resolve.build(engine.manifest, old.config, old.context)
    return _opened(Engine(engine.manifest, strategy, engine.precision))


def _gradient(options: Options, engine: Engine) -> GradientState:
    """The gradient state of another Accelerator: its own, or that of the engine which counts micro-batches by itself.

    Raises:
        Conflict: the engine accumulates differently.
    """
    if not engine.owns(Duty.ACCUMULATION):
        return GradientState.of(options.accumulation)
    shared, asked = engine.strategy.context.gradient, options.accumulation
    if asked not in (shared.plugin, GradientAccumulationPlugin(num_steps=1)):
        raise Conflict(
            f"Cannot construct an Accelerator with {asked!r}.",
            f"The backend {engine.manifest.name!r} accumulates by itself, alike for all Accelerators of a run, and the "
            f"run was made with {shared.plugin!r}.",
            "Give the same to every Accelerator, or give it to the first one only.",
        )
    current.set_gradient(shared)
    return shared.shared()


def _run(options: Options, process: Process, gradient: GradientState, given: dict[str, Any]) -> Run:
    parallelism_config = parallelism_config_of(options, process)
    manifest = resolve.choose(options.backend, options.backend_config, process, parallelism_config)
    config = resolve.settings(manifest, options.backend_config or resolve.config_among(manifest, options.handlers))
    name = precision_name(options.mixed_precision)
    if name == "no":
        name = resolve.configured_precision(config) or name
    precision = choose(name, process.family, options.handlers)
    if parallelism_config is not None:
        from accel_plugins.mesh import check_precision

        check_precision(precision.name, precision.excludes, parallelism_config)
    mesh = None if parallelism_config is None else parallelism_config.get_device_mesh(process.device.type)
    strategy = resolve.build(manifest, config, Context(process, gradient.shared(), precision, mesh, parallelism_config))
    engine = _opened(Engine(manifest, strategy, precision))
    if manifest.parameter:
        given[manifest.parameter] = strategy.config
    label = manifest.label or process.distributed_type
    given = {name: value for name, value in given.items() if value is not None}
    return Run(precision.name, label, engine, given, mesh, parallelism_config)
