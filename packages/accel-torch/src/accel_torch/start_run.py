"""Start of a run: process group, device mesh, precision, backend, and the transforms of models.

The first Accelerator of a process starts the run. Later ones share it, and must have the same options.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from accel_plugins import resolve
from accel_plugins.context import Context
from accel_plugins.manifest import Manifest
from accel_plugins.precision.select import choose, settings_classes
from accel_plugins.strategy import Strategy
from accel_state import current
from accel_state.current import Process, Run
from accel_state.data_shards import parallelism_config_from_environment
from accel_state.errors import Conflict, NotOffered
from accel_state.gradient import GradientAccumulationPlugin, GradientState
from accel_state.kwargs import InitProcessGroupKwargs, KwargsHandler
from accel_state.process import PartialState
from accel_state.run_state import (
    AcceleratorState,
    check_options,
    precision_name,
)
from accel_state.settings.environ import REPEATED_RUN
from accel_state.watch.record import STATUS_FOLDER, STATUS_RECORD
from accel_torch.accumulation import StepsOfShares
from accel_torch.hooks import PROCESS_HOOKS, Hook
from accel_torch.options import Options
from accel_torch.session import Session
from accel_torch.step_guard.config import StepGuard

if TYPE_CHECKING:
    from accel_plugins.transform import Transform
    from accel_plugins.transforms.config import TorchTensorParallelPlugin
    from accel_state.mesh import ParallelismConfig

__all__ = ("leave", "open_sessions", "start_run", "start_session", "transforms_of")


def start_session(options: Options) -> Session:
    """The session of a new Accelerator, which has joined the run of this process or started it.

    Raises:
        Conflict: an option differs from that of the active run.
        SettingError, Missing, NotOffered: an option has an invalid value, needs a package, or is not supported.
    """
    if os.environ.get(REPEATED_RUN):
        from accel_torch.repeated_run import follow_request

        follow_request()
    for hook in PROCESS_HOOKS:
        options = hook.configure(options)
    _begin_records(options)
    hooks = list(PROCESS_HOOKS)
    session = Session(options, *start_run(options, hooks))
    _users[session.strategy].add(session)
    session.transforms = transforms_of(options, session.state.parallelism_config)
    if session.strategy.capabilities.elastic:
        session.hooks.enter(StepsOfShares(session.strategy, session.gradient))
    for hook in hooks:
        session.hooks.enter(hook)
    _enter_requested_hooks(session, options)
    for hook in hooks:
        hook.start(session)
    if session.process.rank == 0 and options.records_run:
        from accel_torch.run_recorder import record_run

        record_run(session)
    if session.state.num_processes > 1:
        # One process has no mistakes to find before `prepare`, and is spared the import.
        from accel_torch.misuse import guard_first_steps

        guard_first_steps(session)
    return session


def _enter_requested_hooks(session: Session, options: Options) -> None:
    """Enter the hooks that the options ask for; the imports of the others are spared."""
    if options.straggler_report:
        from accel_torch.straggler import StragglerReport

        session.report = StragglerReport()
    if options.check_replicas_every:
        from accel_torch.replicas import ReplicaChecker

        session.hooks.enter(ReplicaChecker(options.check_replicas_every, session.prepared, session.strategy))
    if options.handler(StepGuard) is not None:
        from accel_torch.step_guard.judge import guard_steps

        guard_steps(session)


def _begin_records(options: Options) -> None:
    """Begin what the options record of this process."""
    folder = options.project.project_dir or options.project.logging_dir
    if folder is not None:
        STATUS_RECORD.writes_to(folder)
    if os.environ.get(STATUS_FOLDER):
        from accel_torch.samples_at_hand import record_samples

        record_samples()
    if options.goodput or options.straggler_report:
        from accel_torch.time_recorder import record_time

        record_time(options)


_users: Final[weakref.WeakKeyDictionary[Strategy, weakref.WeakSet[Session]]] = weakref.WeakKeyDictionary()
"""The sessions that train with each open strategy; a closed one is not here."""


def leave(session: Session) -> None:
    """Note that a session ended its training; the last one of a run closes the strategy."""
    sessions = _users.get(session.strategy)
    if sessions is not None:
        sessions.discard(session)
        if not sessions:
            _close(session.strategy)


def open_sessions() -> list[Session]:
    """The sessions of this process that have not ended their training."""
    return [session for sessions in _users.values() for session in sessions]


def _close(strategy: Strategy) -> None:
    """Release the strategy's resources; a repeated call does nothing."""
    if _users.pop(strategy, None) is not None:
        strategy.close()


def start_run(options: Options, hooks: Sequence[Hook] = ()) -> tuple[AcceleratorState, GradientState, Strategy]:
    """Join the other processes, choose the backend and start the run; or return the run that is already active.

    Args:
        options: arguments of the Accelerator.
        hooks: the hooks that the session will enter.

    Raises:
        Conflict: an option differs from that of the active run.
        SettingError, Missing, NotOffered: an option has an invalid value, needs a package, or is not supported.
    """
    group = options.handler(InitProcessGroupKwargs)
    PartialState(options.cpu, **(vars(group) if group is not None else {}))
    for hook in hooks:
        hook.start_process()
    arguments = {
        "mixed_precision": options.mixed_precision,
        "backend": options.backend,
        "parallelism_config": options.parallelism_config,
        **options.backends,
    }
    check_options(arguments)
    run = current.run_or_none()
    if run is not None and isinstance(run.strategy, Strategy):
        _check_handlers(options, run)
        if run.strategy not in _users:
            run = run._replace(strategy=_reopened(run.strategy))
            current.set_run(run)
        return AcceleratorState(), _gradient(options, run.strategy), run.strategy
    gradient = GradientState.of(options.accumulation)
    run = _run(options, current.process(), gradient, {**arguments, **options.plugins, _HANDLERS: options.handlers})
    current.set_run(run)
    if run.parallelism_config is not None:
        from accel_ops.rng import seed_again

        seed_again()
    return AcceleratorState(), gradient, run.strategy


_HANDLERS: Final = "kwargs_handlers"


def _check_handlers(options: Options, run: Run) -> None:
    """Raise for settings objects that the active run would not use: those of its backend and of its precision.

    Raises:
        Conflict: one differs from that of the run.
    """
    if not options.handlers:
        return
    of_backend = resolve.config_among(_manifest_of(run.strategy), options.handlers)
    for handler in options.handlers:
        if handler is of_backend:
            before = run.strategy.config
        elif isinstance(handler, settings_classes(run.mixed_precision)):
            before = next(
                (one for one in run.options.get(_HANDLERS, ()) if type(one) is type(handler)), type(handler)()
            )
        else:
            continue
        if handler != before:
            raise Conflict(
                f"Cannot use {_shown(handler)} in this run.",
                f"The run was created with {_shown(before)}, and all Accelerators of a process share one run.",
                "Pass the same object to every Accelerator, or only to the first one.",
            )


def _shown(handler: KwargsHandler) -> str:
    """A settings object as users write it, without the defaults."""
    return f"{type(handler).__name__}({', '.join(f'{name}={value!r}' for name, value in handler.to_kwargs().items())})"


def _open(manifest: Manifest, config: Any, context: Context) -> Strategy:
    """A new strategy; it is closed at the end of the run or process, unless it was closed before."""
    strategy = resolve.build(manifest, config, context)
    _users[strategy] = weakref.WeakSet()
    current.on_run_end(lambda: _close(strategy))
    alive = weakref.ref(strategy)

    def close_at_exit() -> None:
        strategy = alive()
        if strategy is not None:
            _close(strategy)

    atexit.register(close_at_exit)
    current.on_run_end(lambda: atexit.unregister(close_at_exit))
    return strategy


def _reopened(old: Strategy) -> Strategy:
    """A new strategy for a run that continues after all its Accelerators have ended their training."""
    return _open(_manifest_of(old), old.config, old.context)


def _manifest_of(strategy: Strategy) -> Manifest:
    """The manifest of a run's strategy, which `resolve.build` has put into its context."""
    manifest = strategy.context.manifest
    assert manifest is not None
    return manifest


def _gradient(options: Options, strategy: Strategy) -> GradientState:
    """The gradient state of a further Accelerator: a new one, or the shared one of a backend that accumulates itself.

    Raises:
        Conflict: the backend accumulates with other settings.
    """
    if not strategy.capabilities.own_accumulation:
        return GradientState.of(options.accumulation)
    shared, accumulation = strategy.context.gradient, options.accumulation
    if accumulation not in (shared.plugin, GradientAccumulationPlugin(num_steps=1)):
        raise Conflict(
            f"Cannot construct an Accelerator with {accumulation!r}.",
            f"The backend {_manifest_of(strategy).name!r} accumulates gradients itself, so all Accelerators of a run "
            f"share {shared.plugin!r}.",
            "Give the same to every Accelerator, or give it to the first one only.",
        )
    current.set_gradient(shared)
    return shared.shared()


def _run(options: Options, process: Process, gradient: GradientState, arguments: dict[str, Any]) -> Run:
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
    strategy = _open(manifest, config, Context(process, gradient.shared(), precision, mesh, parallelism_config))
    if manifest.parameter:
        arguments[manifest.parameter] = strategy.config
    label = manifest.label or process.distributed_type
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return Run(precision.name, label, strategy, arguments, mesh, parallelism_config)


def parallelism_config_of(options: Options, process: Process) -> ParallelismConfig | None:
    """The `ParallelismConfig` given by argument, by variables, or as the size in a `TorchTensorParallelPlugin`.

    Raises:
        Conflict: two of them contradict each other, or the sizes do not match the world size.
    """
    parallelism_config = options.parallelism_config or parallelism_config_from_environment()
    plugin: TorchTensorParallelPlugin | None = options.plugins.get("torch_tp_plugin")
    tp_size = 1 if plugin is None else _size(plugin)
    if tp_size > 1 and parallelism_config is None:
        from accel_state.mesh import ParallelismConfig

        # Parameters are sharded over the remaining factor of the world size.
        parallelism_config = ParallelismConfig(tp_size=tp_size, dp_shard_size=max(process.world_size // tp_size, 1))
    if parallelism_config is None:
        return None
    if tp_size not in (1, parallelism_config.tp_size):
        raise Conflict(
            f"Cannot combine TorchTensorParallelPlugin(tp_size={tp_size}) with "
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
    transforms = list(options.transforms)
    if parallelism_config is not None and parallelism_config.tp_enabled:
        transforms.append(_tensor_parallel(options, parallelism_config))
    if options.plugins.get("dynamo_plugin") is not None:
        from accel_plugins.transforms.compile import Compile, CompileBlocks

        transforms += [kind(options.plugins["dynamo_plugin"]) for kind in (CompileBlocks, Compile)]
    return tuple(transforms)


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
