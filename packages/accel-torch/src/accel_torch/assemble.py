"""Start of a run: process group, device mesh, precision, backend, and the transforms of models.

The first Accelerator of a process starts the run. Later ones share it, and must have the same options.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from accel_plugins import resolve
from accel_plugins.context import Context
from accel_plugins.manifest import Capabilities, Manifest
from accel_plugins.precision.base import Precision
from accel_plugins.precision.select import choose
from accel_plugins.strategy import Strategy
from accel_state import current
from accel_state.current import Process, Run
from accel_state.data_shards import parallelism_config_from_environment
from accel_state.errors import Conflict, NotOffered
from accel_state.gradient import GradientAccumulationPlugin, GradientState
from accel_state.kwargs import InitProcessGroupKwargs
from accel_state.process import PartialState
from accel_state.run_state import (
    AcceleratorState,
    check_given,
    precision_name,
)
from accel_torch.options import Options

if TYPE_CHECKING:
    from accel_plugins.transform import Transform
    from accel_plugins.transforms.config import TorchTensorParallelPlugin
    from accel_state.mesh import ParallelismConfig

__all__ = ("ActiveBackend", "WatchesCollectives", "assemble", "transforms_of")


class ActiveBackend:
    """The backend of a run, available as `accel_state.current.Run.backend`.

    Args:
        manifest: the backend's manifest.
        strategy: the backend's strategy.
        precision: how forward, backward and steps are computed.

    Attributes:
        backward_reads_model: whether the strategy's `backward` needs the model of the loss, which takes time to find.
        plain_backward: whether `loss.backward()` is all that a backward pass does.
        closed: whether the strategy has released its resources.
    """

    def __init__(self, manifest: Manifest, strategy: Strategy, precision: Precision) -> None:
        self.manifest, self.strategy, self.precision = manifest, strategy, precision
        self.backward_reads_model = type(strategy).backward is not Strategy.backward
        scales = type(precision).backward_scale is not Precision.backward_scale
        self.plain_backward = not self.backward_reads_model and not scales
        self.closed = False
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()

    def join(self, accelerator: object) -> None:
        """Register an Accelerator that uses the strategy."""
        self._training.add(accelerator)

    def leave(self, accelerator: object) -> None:
        """Note that an Accelerator ended its training; the last one closes the strategy."""
        self._training.discard(accelerator)
        if not self._training:
            self.close()

    def close(self) -> None:
        """Release the strategy's resources; a repeated call does nothing."""
        if not self.closed:
            self.closed = True
            self.strategy.close()

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do, and what it does itself."""
        return self.manifest.capabilities


class WatchesCollectives(Protocol):
    """Measures the time of collectives."""

    def watch_collectives(self) -> None:
        """Measure the collectives of this process from now on; called before other objects refer to the process."""


def assemble(
    options: Options, watchers: Sequence[WatchesCollectives | None] = ()
) -> tuple[AcceleratorState, GradientState, ActiveBackend]:
    """Join the other processes, choose the backend and start the run; or return the run that is already active.

    Args:
        options: arguments of the Accelerator.
        watchers: objects that measure the collectives of this process.

    Raises:
        Conflict: an option differs from that of the active run.
        SettingError, Missing, NotOffered: an option has an invalid value, needs a package, or is not supported.
    """
    group = options.handler(InitProcessGroupKwargs)
    PartialState(options.cpu, **(vars(group) if group is not None else {}))
    for watcher in watchers:
        if watcher is not None:
            watcher.watch_collectives()
    given = {
        "mixed_precision": options.mixed_precision,
        "backend": options.backend,
        "parallelism_config": options.parallelism_config,
        **options.backends,
    }
    check_given(given)
    run = current.run_or_none()
    if run is not None and isinstance(run.backend, ActiveBackend):
        if run.backend.closed:
            run = run._replace(backend=_reopened(run.backend))
            current.set_run(run)
        return AcceleratorState(), _gradient(options, run.backend), run.backend
    gradient = GradientState.of(options.accumulation)
    run = _run(options, current.process(), gradient, {**given, **options.plugins})
    current.set_run(run)
    if run.parallelism_config is not None:
        from accel_ops.rng import seed_again

        seed_again()
    return AcceleratorState(), gradient, run.backend


def _opened(backend: ActiveBackend) -> ActiveBackend:
    """The backend; its strategy is closed at the end of the run or process, unless it was closed before."""
    current.on_run_end(backend.close)
    known = weakref.ref(backend)

    def close_at_exit() -> None:
        backend = known()
        if backend is not None:
            backend.close()

    atexit.register(close_at_exit)
    current.on_run_end(lambda: atexit.unregister(close_at_exit))
    return backend


def _reopened(backend: ActiveBackend) -> ActiveBackend:
    """A new strategy for a run that continues after all its Accelerators have ended their training."""
    old = backend.strategy
    strategy = resolve.build(backend.manifest, old.config, old.context)
    return _opened(ActiveBackend(backend.manifest, strategy, backend.precision))


def _gradient(options: Options, backend: ActiveBackend) -> GradientState:
    """The gradient state of a further Accelerator: a new one, or the shared one of a backend that accumulates itself.

    Raises:
        Conflict: the backend accumulates with other settings.
    """
    if not backend.capabilities.own_accumulation:
        return GradientState.of(options.accumulation)
    shared, asked = backend.strategy.context.gradient, options.accumulation
    if asked not in (shared.plugin, GradientAccumulationPlugin(num_steps=1)):
        raise Conflict(
            f"Cannot construct an Accelerator with {asked!r}.",
            f"The backend {backend.manifest.name!r} accumulates gradients itself, so all Accelerators of a run share "
            f"{shared.plugin!r}.",
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
    backend = _opened(ActiveBackend(manifest, strategy, precision))
    if manifest.parameter:
        given[manifest.parameter] = strategy.config
    label = manifest.label or process.distributed_type
    given = {name: value for name, value in given.items() if value is not None}
    return Run(precision.name, label, backend, given, mesh, parallelism_config)


def parallelism_config_of(options: Options, process: Process) -> ParallelismConfig | None:
    """The `ParallelismConfig` given by argument, by variables, or as the size in a `TorchTensorParallelPlugin`.

    Raises:
        Conflict: two of them contradict each other, or the sizes do not match the world size.
    """
    parallelism_config = options.parallelism_config or parallelism_config_from_environment()
    plugin: TorchTensorParallelPlugin | None = options.plugins.get("torch_tp_plugin")
    asked = 1 if plugin is None else _size(plugin)
    if asked > 1 and parallelism_config is None:
        from accel_state.mesh import ParallelismConfig

        # Parameters are sharded over the remaining factor of the world size.
        parallelism_config = ParallelismConfig(tp_size=asked, dp_shard_size=max(process.world_size // asked, 1))
    if parallelism_config is None:
        return None
    if asked not in (1, parallelism_config.tp_size):
        raise Conflict(
            f"Cannot combine TorchTensorParallelPlugin(tp_size={asked}) with "
            f"ParallelismConfig(tp_size={parallelism_config.tp_size}).",
            "Both set the size of tensor parallelism.",
            "Give the size in the ParallelismConfig only.",
        )
    parallelism_config.check_world(process.world_size)
    return parallelism_config


def _size(plugin: TorchTensorParallelPlugin) -> int:
    mesh = plugin.torch_device_mesh
    if plugin.tp_size > 1 or mesh is None:
        return plugin.tp_size
    return int(mesh.size() if mesh.ndim == 1 else mesh["tp"].size())


def transforms_of(options: Options, parallelism_config: ParallelismConfig | None) -> tuple[Transform, ...]:
    """The transforms that an Accelerator applies to every model.

    Raises:
        NotOffered: a transform is not supported.
    """
    made = list(options.transforms)
    if parallelism_config is not None and parallelism_config.tp_enabled:
        made.append(_tensor_parallel(options, parallelism_config))
    if options.plugins.get("dynamo_plugin") is not None:
        from accel_plugins.transforms.compile import Compile, CompileBlocks

        made += [kind(options.plugins["dynamo_plugin"]) for kind in (CompileBlocks, Compile)]
    return tuple(made)


def _tensor_parallel(options: Options, parallelism_config: ParallelismConfig) -> Transform:
    from accel_plugins.transforms.tensor_parallel import TensorParallel

    if parallelism_config.tp_handler is not None and parallelism_config.tp_handler.enable_async_tp:
        raise NotOffered(
            "Cannot use TorchTensorParallelConfig(enable_async_tp=True).",
            "It needs symmetric memory between the GPUs and a compiler pass of torch that is not stable.",
            "Leave it out.",
        )
    plugin: TorchTensorParallelPlugin | None = options.plugins.get("torch_tp_plugin")
    return TensorParallel(plugin.parallelize_plan, plugin.torch_device_mesh) if plugin else TensorParallel()
