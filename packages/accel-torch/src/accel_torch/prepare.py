"""`prepare`: prepares loaders, models, optimizers and schedulers, in this order."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from accel_bigmodel.trainable import check_trainable
from accel_data import prepare_data_loader
from accel_plugins import order
from accel_plugins.bundle import Bundle
from accel_plugins.manifest import ObjectKind
from accel_plugins.wrapped.optimizer import AcceleratedOptimizer
from accel_plugins.wrapped.scheduler import AcceleratedScheduler
from accel_state.creation import run_creation_hooks
from accel_state.errors import Conflict, SettingError
from accel_state.library import stack_level
from accel_torch.between_batches import call_between_batches
from accel_torch.misuse import guard_first_steps

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_plugins.shards import Shards
    from accel_torch.session import Session

__all__ = ("prepare", "prepare_for_evaluation", "prepare_loader")

_logger: Final = logging.getLogger(__name__)


def prepare(
    session: Session,
    objects: Sequence[Any],
    device_placement: Sequence[bool] | None = None,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
) -> Any:
    """Prepare objects for this run, and return them in the order given; see `Accelerator.prepare`.

    Args:
        session: the session.
        objects: models, optimizers, schedulers and loaders; objects of other types are returned unchanged.
        device_placement: for each object, whether to move it to the device. None uses the Accelerator's setting.
        slice_fn_for_dispatch: takes a process's shard from a global batch that the main process has read.

    Raises:
        SettingError: `device_placement` has another length than `objects`.
        AccelError: the backend does not support these objects; none of them was changed.
    """
    run_creation_hooks()
    placed = _placement(session, objects, device_placement)
    bundle = Bundle.of(objects)
    guard_first_steps(session)
    for before_prepare in session.hooks.before_prepare:
        before_prepare(session, bundle)
    _check_together(session, bundle)
    for model in bundle.models:
        check_trainable(model)
    if session.options.loader.exact_epochs:
        from accel_torch.exact_epochs import check_models

        check_models(session, bundle.models)
    before = session.strategy.shards()
    order.check_bundle(session.backend, session.strategy, session.transforms, bundle)
    _check_loaders_before(session, before)
    bundle.loaders[:] = [
        prepare_loader(session, loader, placed.get(id(loader)), slice_fn_for_dispatch) for loader in bundle.loaders
    ]
    bundle = _run_steps(session, bundle, placed)
    _wrap_optimizers(session, bundle)
    _wrap_schedulers(session, bundle)
    session.prepared.remember(bundle)
    if session.prepared.steps_in_backward:
        session.accumulation.forbid_plain_backward()
    if session.options.loader.exact_epochs:
        from accel_torch.exact_epochs import watch_first_forwards

        watch_first_forwards(session, bundle.models)
    for after_prepare in session.hooks.after_prepare:
        after_prepare(session, bundle)
    prepared = bundle.in_given_order()
    return prepared[0] if len(prepared) == 1 else prepared


def prepare_for_evaluation(session: Session, model: Module, device_placement: bool) -> Module:
    """Prepare a model that is not trained: moved, transformed and autocast, but not wrapped."""
    bundle = Bundle.of([model])
    if not bundle.models:
        # It was prepared for training.
        return model
    changed: Module = _run_steps(session, bundle, {id(model): device_placement}, trains=False).models[0]
    session.prepared.remember_evaluated(changed)
    return changed


def _run_steps(session: Session, bundle: Bundle, placed: dict[int, bool], trains: bool = True) -> Bundle:
    planned = order.steps(
        session.backend, session.strategy, session.transforms, lambda model: placed.get(id(model), True), trains
    )
    if bundle.models or bundle.optimizers:
        _logger.debug("Preparing: %s.", order.numbered(planned))
        for step in planned:
            bundle = step.run(bundle)
    return bundle


def _placement(session: Session, objects: Sequence[Any], moves: Sequence[bool] | None) -> dict[int, bool]:
    """Whether to move each object to the device, by id."""
    if moves is None:
        moves = [session.options.device_placement] * len(objects)
    if len(moves) != len(objects):
        raise SettingError(
            f"Cannot prepare with device_placement={list(moves)!r}.",
            f"It has {len(moves)} entries for {len(objects)} objects.",
            "Give one entry for each object, or remove device_placement.",
        )
    return {id(item): move for item, move in zip(objects, moves, strict=True)}


def _check_together(session: Session, bundle: Bundle) -> None:
    """Check that objects which the backend needs in one call are all in this call."""
    together = session.backend.together
    present = {part for part in together if bundle.of_kind(part)}
    missing = together - present
    if present and missing:
        raise Conflict(
            f"Cannot prepare {_named(present)} separately.",
            f"The backend {session.backend.name!r} needs {_named(together)} in one call.",
            f"Add {_named(missing)} to this call.",
        )


def _check_loaders_before(session: Session, before: Shards) -> None:
    """Check that models which arrive distributed do not change who reads which samples of earlier loaders."""
    shards = session.strategy.shards()
    if shards != before and session.prepared.loaders:
        raise Conflict(
            "Cannot prepare a model that arrives distributed after a loader.",
            f"By the meshes of the model the data has {shards.count} shards instead of {before.count}, and a prepared "
            "loader reads the others already.",
            "Prepare the model in the same call as the loader, or before.",
        )


def _named(kinds: set[ObjectKind] | frozenset[ObjectKind]) -> str:
    return " and ".join(sorted(kind.value for kind in kinds))


def _wrap_optimizers(session: Session, bundle: Bundle) -> None:
    bundle.optimizers[:] = [
        optimizer if isinstance(optimizer, AcceleratedOptimizer) else _wrapped_optimizer(session, optimizer)
        for optimizer in bundle.optimizers
    ]


def _wrapped_optimizer(session: Session, optimizer: Any) -> AcceleratedOptimizer:
    return AcceleratedOptimizer(
        optimizer,
        device_placement=session.options.device_placement,
        gradient=session.gradient,
        strategy=session.strategy,
        precision=session.precision,
        step_hooks=session.hooks,
    )


def _wrap_schedulers(session: Session, bundle: Bundle) -> None:
    bundle.schedulers[:] = [
        scheduler if isinstance(scheduler, AcceleratedScheduler) else _wrapped_scheduler(session, bundle, scheduler)
        for scheduler in bundle.schedulers
    ]


def _wrapped_scheduler(session: Session, bundle: Bundle, scheduler: Any) -> AcceleratedScheduler:
    """A scheduler that follows its optimizer, or all prepared optimizers if it has no attribute `optimizer`."""
    candidates = [*session.prepared.optimizers, *bundle.optimizers]
    inner = getattr(scheduler, "optimizer", None)
    own = [optimizer for optimizer in candidates if optimizer is inner or optimizer.optimizer is inner]
    return AcceleratedScheduler(
        scheduler,
        own or candidates,
        step_with_optimizer=session.options.step_scheduler_with_optimizer,
        split_batches=session.options.loader.split_batches,
        gradient=session.gradient,
        processes=session.strategy.batches_per_step(),
    )


def _warn_of_split(loader: Any, processes: int) -> None:
    """Name the batch of each process: the original ignores the argument, so scripts may rely on a larger one."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if size:
        warnings.warn(
            f"Accelerator(split_batches=True) has an effect here: each of the {processes} processes gets "
            f"{size // processes} of the {size} samples of a batch. Accelerate 1.15.0 ignores the argument, and gives "
            f"each process a batch of {size}. Remove the argument to train as there.",
            FutureWarning,
            stacklevel=stack_level(),
        )


def prepare_loader(
    session: Session,
    loader: Any,
    device_placement: bool | None = None,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
) -> Any:
    """Prepare one loader, which yields this process's shard of the data."""
    options, strategy = session.options, session.strategy
    if getattr(type(loader), "placeholder_for", None) is ObjectKind.LOADER:
        # The backend creates the loader, with this process's shard of the data.
        return strategy.wrap_loader(loader)
    strategy.check_loader(loader)
    shards = strategy.shards()
    configuration = options.loader
    if options.splits_by_argument and shards.count > 1:
        _warn_of_split(loader, shards.count)
    move = options.device_placement if device_placement is None else device_placement
    sharded = prepare_data_loader(
        loader,
        device=session.state.device,
        num_processes=shards.count,
        process_index=shards.index,
        split_batches=configuration.split_batches,
        put_on_device=move,
        rng_types=list(options.rng_types),
        dispatch_batches=configuration.dispatch_batches,
        even_batches=configuration.even_batches,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        use_seedable_sampler=configuration.use_seedable_sampler and not configuration.use_configured_sampler,
        data_seed=configuration.data_seed,
        non_blocking=configuration.non_blocking,
        use_stateful_dataloader=configuration.use_stateful_dataloader,
        torch_device_mesh=strategy.context.mesh,
        gradient=session.gradient,
        sharding=configuration.sharding,
        restore_position=configuration.restore_position,
        seed_samples=configuration.seed_samples,
        order="global" if strategy.capabilities.elastic else configuration.order,
        exact_epochs=configuration.exact_epochs,
    )
    if configuration.exact_epochs:
        from accel_torch.exact_epochs import keep_exact

        keep_exact(session, sharded)
    _check_equal_steps(session, sharded)
    call_between_batches(session, sharded)
    for loader_prepared in session.hooks.loader_prepared:
        loader_prepared(session, sharded)
    return strategy.wrap_loader(sharded)


def _check_equal_steps(session: Session, loader: Any) -> None:
    """Check that the processes take equally many steps, if they wait for each other in every step.

    Raises:
        Conflict: the lengths of the data show that they do not.
    """
    uneven = None if session.backend.capabilities.join else loader.source.uneven_steps()
    if uneven is not None:
        count = session.strategy.shards().count
        raise Conflict(
            "Cannot prepare a loader with even_batches=False.",
            f"Process 0 of {count} would have {uneven[0]} batches, and process {count - 1} {uneven[1]}; with the "
            f"backend {session.backend.name!r} they wait for each other in every step.",
            "Use even_batches=True (the default), exact_epochs=True or drop_last=True.",
        )
