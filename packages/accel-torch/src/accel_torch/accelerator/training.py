"""Training: preparation, gradient accumulation, backward passes, clipping.

Methods import what not every script needs at their first call, so that constructing an Accelerator stays cheap.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, overload

from accel_plugins.layers import strategy_model
from accel_state.errors import NotOffered, UnknownKind
from accel_state.labels import DEVICE_MAP
from accel_state.library import stack_level
from accel_state.watch.record import STATUS_RECORD
from accel_torch.accelerator.facade import Facade
from accel_torch.accumulation import MicroBatch, no_sync_all
from accel_torch.options import generator_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from accel_plugins.model_part import ModelPart
    from accel_plugins.precision.config import AutocastKwargs
    from accel_plugins.strategy import Strategy
    from accel_state.labels import RNGType
    from accel_torch.session import Session
    from accel_torch.step_guard.judge import StepJudge

__all__ = ("PREPARING", "TrainingMixin")

PREPARING: Final[ContextVar[Facade]] = ContextVar("accel_torch_preparing")
"""The Accelerator whose `prepare` is running, for functions of programs that it calls."""

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")


class TrainingMixin(Facade):
    """The training loop."""

    @overload
    def prepare(self, a: A, /, *, device_placement: list[bool] | None = None) -> A: ...
    @overload
    def prepare(self, a: A, b: B, /, *, device_placement: list[bool] | None = None) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /, *, device_placement: list[bool] | None = None) -> tuple[A, B, C]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, /, *, device_placement: list[bool] | None = None
    ) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, /, *, device_placement: list[bool] | None = None
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, f: F, /, *, device_placement: list[bool] | None = None
    ) -> tuple[A, B, C, D, E, F]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, f: F, g: G, /, *, device_placement: list[bool] | None = None
    ) -> tuple[A, B, C, D, E, F, G]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, f: F, g: G, h: H, /, *, device_placement: list[bool] | None = None
    ) -> tuple[A, B, C, D, E, F, G, H]: ...
    @overload
    def prepare(
        self,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
        e: Any,
        f: Any,
        g: Any,
        h: Any,
        i: Any,
        /,
        *args: Any,
        device_placement: list[bool] | None = None,
    ) -> Any: ...
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and DataLoaders for this run, and return them in the order given.

        Args:
            args: the objects, in any order. Objects of other types are returned unchanged. For a single argument, the
                result is that object instead of a tuple.
            device_placement: for each object, whether to move it to the device. None uses the Accelerator's setting for
                all.

        Raises:
            NoState: the process state was reset after this Accelerator was constructed.
            AccelError: the backend does not support these objects; none of them was changed.

        Example:
            >>> model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        return self._prepare(args, device_placement)

    def prepare_model(
        self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Module:
        """Prepare one model for this run.

        Args:
            model: the model.
            device_placement: whether to move the model to the device. None uses the Accelerator's setting.
            evaluation_mode: the model is only evaluated. It is moved, transformed and autocast, but not wrapped for
                training.

        Example:
            >>> teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        """
        if evaluation_mode:
            from accel_torch.prepare import prepare_for_evaluation

            return prepare_for_evaluation(self.session, model, self._placed(device_placement)[0])
        prepared: Module = self._prepare([model], self._placed(device_placement))
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer for this run.

        Example:
            >>> optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters()))
        """
        return self._prepare([optimizer], self._placed(device_placement))

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare one learning-rate scheduler for this run.

        Example:
            >>> scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 10))
        """
        return self._prepare([scheduler])

    def _prepare(self, objects: Sequence[Any], device_placement: list[bool] | None = None) -> Any:
        from accel_torch.arriving import session_for
        from accel_torch.prepare import prepare

        # After a reset of the state, this raises before any object is changed.
        _ = self.session.state.distributed_type
        self.session = session_for(self.session, objects)
        token = PREPARING.set(self)
        try:
            return prepare(self.session, objects, device_placement)
        finally:
            PREPARING.reset(token)

    def _placed(self, device_placement: bool | None) -> list[bool]:
        return [self.session.options.device_placement if device_placement is None else device_placement]

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[ModelPart]:
        """Context manager in which a model is built directly on its device, as the shards that the backend trains.

        On one device, parameters are created on that device. With FSDP2, each process stores only its shard of a
        parameter as soon as the parameter's module is built. The initial values equal those of one process with the
        same seed. Enter the block on every process, and pass the model to `prepare` afterwards.

        The block returns the part of the model that this process builds. With a backend that divides the layers over
        processes, a model that creates each layer in `part.layer(number, layers)` needs memory on a process only for
        the layers that this process trains. With other backends, `part` is the whole model.

        Args:
            empty_init: skip initialisation, because weights are loaded later. None and False initialise.

        Example:
            >>> with accelerator.init_module():
            ...     model = Transformer(config)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        """
        return self.session.strategy.init_module(empty_init)

    def accumulate(
        self, *models: Module, weight: float | Tensor | None = None, loss_reduction: Literal["mean", "sum"] = "mean"
    ) -> AbstractContextManager[None]:
        """Context manager for one micro-batch: the optimizer steps only at the last micro-batch of each window.

        A window has `gradient_accumulation_steps` micro-batches (fewer at the end of a DataLoader), which count equally
        without weights. With weights, the gradient is that of the mean over all tokens of the step, however the tokens
        are distributed over micro-batches and processes. This costs one small collective per step. Weighted gradients
        are unnormalised until `clip_grad_norm_`, `unscale_gradients` or the step.

        Args:
            models: prepared models; their gradients are synchronised only at the last micro-batch of a window.
            weight: the number of tokens (or samples) in the loss of this micro-batch. Give it for every micro-batch of
                a window or for none.
            loss_reduction: whether that loss is the mean or the sum over its tokens. A mean over no tokens is NaN, so
                use "sum" if a micro-batch may have no tokens.

        Raises:
            Conflict: some micro-batches of a window have a weight and others have none.
            NotOffered: `weight` was given, and the backend divides or weights the loss itself.
            SettingError: a weight is negative or not finite; raised at the step, on every process.

        Example:
            >>> for inputs, targets in loader:
            ...     with accelerator.accumulate(model, weight=(targets != -100).sum()):
            ...         loss = cross_entropy(model(inputs), targets, ignore_index=-100)
            ...         accelerator.backward(loss)
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        accumulation = self.session.accumulation
        if accumulation.only_counts and weight is None and not accumulation.hooks.begin_micro_batch:
            return accumulation
        block = MicroBatch()
        block.accumulation, block.models = accumulation, models
        if weight is not None:
            block.weight, block.loss_reduction = weight, loss_reduction
        return block

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """Compute gradients; call it instead of `loss.backward()`.

        With a weight, the gradient is that of the mean over all tokens (or samples) of the step, on all processes. A
        micro-batch may have several losses with weights of different kinds: call this once for each, in the same order
        on all processes. Their gradients are computed at the end of the micro-batch: when its `accumulate` block ends,
        or when gradients are clipped or the optimizer steps. That is one backward pass for all losses. In a window of
        several micro-batches, the earlier ones have one for each loss, and their gradients are kept apart.

        Args:
            loss: a tensor with one element. It is divided by the number of micro-batches, or multiplied by this
                micro-batch's weight, before the backward pass.
            weight: the number of tokens (or samples) of which the loss is the mean. Give it for all losses of a window
                or for none; it replaces the weight of `accumulate`. A stand-in of an exact epoch counts as 0.
            kwargs: passed to `loss.backward`, except `learning_rate`, which is for optimizers that step during backward
                (see `lomo_backward`).

        Raises:
            Conflict: losses with and without a weight are mixed, or their number differs between processes.
            NotOffered: the backend divides the loss itself; or a window of several micro-batches has losses with
                several weights, and the backend reduces gradients in each backward pass.
            UnknownKind: the loss is not a tensor.

        Example:
            >>> loss = loss_function(model(inputs), targets)
            >>> accelerator.backward(loss)
            >>> outputs = model(inputs)
            >>> accelerator.backward(loss_function(outputs, targets), weight=len(targets))
            >>> accelerator.backward(outputs.square().mean(), weight=outputs.numel())
        """
        session = self.session
        accumulation, hooks = session.accumulation, session.hooks
        if session.gradient.sync_gradients:
            STATUS_RECORD.backwards += 1
        if weight is not None:

            def backward(total: Tensor, **options: Any) -> None:
                self._backward_with_hooks(total, {**kwargs, **options})

            accumulation.add_loss(loss, weight, backward, session.prepared.optimizers)
            return
        try:
            if accumulation.plain and not (kwargs or hooks.before_backward):
                # What the other branch comes to, without its calls.
                steps = accumulation.gradient.plugin.num_steps or 1
                try:
                    (loss if steps == 1 else loss / steps).backward()  # type: ignore[no-untyped-call]
                finally:
                    for after_backward in hooks.after_backward:
                        after_backward(loss)
            else:
                self._backward_with_hooks(loss, kwargs)
        except RuntimeError as error:
            from accel_state.uncaught import explain_backend_error

            explain_backend_error(error)
            raise
        except (AttributeError, TypeError):
            if hasattr(loss, "backward"):
                raise
            raise UnknownKind(
                f"Cannot compute the gradients of a {type(loss).__name__}.",
                "backward() takes the loss as a tensor.",
                "Pass what the loss function returned: not loss.item(), and not all that the model returned.",
            ) from None

    def _backward_with_hooks(self, loss: Tensor, kwargs: dict[str, Any]) -> None:
        session = self.session
        for before_backward in session.hooks.before_backward:
            before_backward(loss)
        try:
            if session.prepared.steps_in_backward or "learning_rate" in kwargs:
                self.lomo_backward(loss, kwargs.pop("learning_rate", None))
            else:
                scaled = session.accumulation.scale_loss(loss)
                model = session.prepared.only_model() if session.backward_reads_model else None
                session.strategy.backward(scaled, model, **kwargs)
        finally:
            for after_backward in session.hooks.after_backward:
                after_backward(loss)

    def lomo_backward(self, loss: Tensor, learning_rate: float | None) -> None:
        """Compute gradients and update each parameter as soon as its gradient exists, with a prepared LOMO optimizer.

        Args:
            loss: the loss of the whole batch.
            learning_rate: the learning rate of this step. Read it from the scheduler, which cannot set it here.

        Raises:
            SettingError: `learning_rate` is None, or no LOMO optimizer was prepared.
            NotOffered: the run has several processes or accumulates gradients.

        Example:
            >>> model, optimizer = accelerator.prepare(model, Lomo(model, lr=1e-3))
            >>> accelerator.lomo_backward(loss_function(model(inputs), targets), learning_rate=1e-3)
        """
        from accel_torch.step import fused_backward

        fused_backward(self.session, loss, learning_rate)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a prepared optimizer steps during backward, as LOMO does."""
        return self.session.prepared.steps_in_backward

    @staticmethod
    def trigger_sync_in_backward(model: Module) -> AbstractContextManager[None]:
        """Context manager whose backward pass synchronises gradients although the forward pass ran under `no_sync`.

        Args:
            model: a prepared model.

        Example:
            >>> with accelerator.no_sync(model):
            ...     first = loss_function(model(one_batch), targets)
            ...     second = loss_function(model(another_batch), targets)
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(first)
            >>> with accelerator.trigger_sync_in_backward(model):
            ...     accelerator.backward(second)
            >>> optimizer.step()
        """
        from accel_state import current

        strategy: Strategy = current.require_run().strategy
        return strategy.sync_in_next_backward(strategy_model(model))

    def no_sync(self, *models: Module, model: Module | None = None) -> AbstractContextManager[object]:
        """Context manager in which gradients are not synchronised between processes.

        Args:
            models: prepared models; all of them if none is given.
            model: one more model, by keyword.

        Example:
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(loss_function(model(one_batch), targets))
            >>> accelerator.backward(loss_function(model(another_batch), targets))
            >>> optimizer.step()
        """
        chosen = models if model is None else (*models, model)
        return no_sync_all(self.session.strategy, chosen or tuple(self.session.prepared.models))

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Context manager for training in which processes have different numbers of batches.

        Args:
            joinables: prepared models whose gradients are averaged. Other objects are ignored.
            even_batches: replaces the `even_batches` of prepared DataLoaders inside the block. None changes nothing.

        Raises:
            NotOffered: every step of the backend needs all processes.

        Example:
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     for inputs, targets in loader:
            ...         loss = loss_function(model(inputs), targets)
            ...         accelerator.backward(loss)
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        return _join_uneven_inputs(self.session, joinables, even_batches)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        """Scale gradients so that their total norm is at most `max_norm`, and return the norm before.

        The norm is a tensor (a float with DeepSpeed), or None if the backend does not compute it.

        Args:
            parameters: the parameters whose gradients are clipped.
            max_norm: the largest norm allowed.
            norm_type: the p of the p-norm; `math.inf` for the largest absolute value.

        Example:
            >>> if accelerator.sync_gradients:
            ...     accelerator.clip_grad_norm_(model.parameters(), 1.0)
        """
        from accel_torch.step import clip_grad_norm

        return clip_grad_norm(self.session, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every element of the gradients to `[-clip_value, clip_value]`.

        Example:
            >>> accelerator.backward(loss_function(model(inputs), targets))
            >>> if accelerator.sync_gradients:
            ...     accelerator.clip_grad_value_(model.parameters(), 0.5)
        """
        from accel_torch.step import clip_grad_value

        clip_grad_value(self.session, parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16 gradients by the loss scale.

        Args:
            optimizer: one prepared optimizer or a list of them. None unscales the gradients of all prepared optimizers.

        Example:
            >>> accelerator.backward(loss_function(model(inputs), targets))
            >>> accelerator.unscale_gradients()
            >>> largest = max(parameter.grad.abs().max() for parameter in model.parameters())
        """
        from accel_torch.step import unscale_gradients

        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        unscale_gradients(self.session, None if optimizer is None else optimizers)

    def autocast(
        self, autocast_handler: AutocastKwargs | bool | None = None, cache_enabled: bool | None = None
    ) -> AbstractContextManager[None]:
        """Context manager in which operations outside a prepared model compute in the run's mixed precision.

        Args:
            autocast_handler: replaces the Accelerator's `AutocastKwargs`. A bool sets `cache_enabled`.
            cache_enabled: cache cast weights until the end of the block.

        Example:
            >>> with accelerator.autocast():
            ...     loss = loss_function(model(inputs), targets)
        """
        if isinstance(autocast_handler, bool):
            autocast_handler, cache_enabled = None, autocast_handler
        if cache_enabled is not None:
            from accel_plugins.precision.config import AutocastKwargs

            settings = autocast_handler or self.session.options.handler(AutocastKwargs) or AutocastKwargs()
            autocast_handler = AutocastKwargs(settings.enabled, cache_enabled)
        return self.session.precision.autocast(autocast_handler)

    def unwrap_model(self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Module:
        """The model without the wrappers that `prepare` added.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: keep the wrapper that runs `forward` in mixed precision and returns fp32.
            keep_torch_compile: keep the model compiled.

        Raises:
            NotOffered: the backend divides the layers of a model over the processes.

        Example:
            >>> network = accelerator.unwrap_model(model)
        """
        from accel_plugins.layers import extract_model_from_parallel

        self.session.backend.demand("whole_model")
        unwrapped: Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return unwrapped

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop the references to all prepared objects, and release unused device memory.

        Args:
            objects: the script's variables for these objects; assign the result to them, so that they are freed too.

        Returns:
            One None for each argument.

        Example:
            >>> model, optimizer = accelerator.free_memory(model, optimizer)
        """
        import gc

        from accel_plugins.manifest import ObjectKind

        if self.session.saver is not None:
            self.session.saver.release()
        prepared = self.session.prepared
        self.session.strategy.release(
            prepared.for_strategy(ObjectKind.MODEL), prepared.for_strategy(ObjectKind.OPTIMIZER)
        )
        prepared.clear()
        self.session.accumulation.step = 0
        count = len(objects)
        del objects
        gc.collect()
        self.session.process.family.empty_cache()
        return [None] * count

    def clear(self, *objects: Any) -> list[None]:
        """An alias of `free_memory`.

        Example:
            >>> model, optimizer = accelerator.clear(model, optimizer)
        """
        return self.free_memory(*objects)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its window: gradients are synchronised and the optimizer steps."""
        return self.session.gradient.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.session.gradient.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.session.gradient.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        import dataclasses

        self.session.gradient.plugin = dataclasses.replace(self.session.gradient.plugin, num_steps=steps)

    @property
    def step(self) -> int:
        """The number of micro-batches of the current window so far."""
        return self.session.accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self.session.accumulation.step = step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.session.prepared.optimizers)

    @property
    def guard(self) -> StepJudge | None:
        """The guard that judges each step, with its `events`; None without a `StepGuard` in `kwargs_handlers`."""
        return cast("StepJudge | None", self.session.guard)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of an fp16 run, otherwise None."""
        return self.session.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.session.precision.scale_by(scaler)
        # The scaler of processes that skip together is another object.
        used = None if scaler is None else self.session.precision.scaler
        for optimizer in self.session.prepared.optimizers:
            optimizer.scaler = used
        for scaler_assigned in self.session.hooks.scaler_assigned:
            scaler_assigned(used)

    @property
    def device_placement(self) -> bool:
        """Whether `prepare` moves models, and DataLoaders move batches, to the device."""
        return self.session.options.device_placement

    @device_placement.setter
    def device_placement(self, move: bool) -> None:
        self.session.options = self.session.options._replace(device_placement=move)

    @property
    def rng_types(self) -> list[str]:
        """The random-number generators that DataLoaders synchronise at the start of each epoch."""
        return list(self.session.options.rng_types)

    @rng_types.setter
    def rng_types(self, rng_types: Sequence[str | RNGType] | None) -> None:
        self.session.options = self.session.options._replace(rng_types=generator_names(rng_types))

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether a scheduler steps only when its optimizer steps."""
        return self.session.options.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, follow: bool) -> None:
        self.session.options = self.session.options._replace(step_scheduler_with_optimizer=follow)

    def verify_device_map(self, model: Module) -> bool:
        """Whether a device map distributes a model over several devices, so that it cannot train on several processes.

        Example:
            >>> if accelerator.verify_device_map(model):
            ...     raise ValueError("Train the model on one device in each process.")
        """
        return any(len(getattr(module, DEVICE_MAP, None) or {}) > 1 for module in model.modules())


@contextmanager
def _join_uneven_inputs(session: Session, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
    """A block in which a process without batches joins the collectives of processes that still have batches.

    Args:
        session: the session.
        joinables: prepared models.
        even_batches: replaces the `even_batches` of prepared loaders inside the block. None changes nothing.

    Raises:
        NotOffered: every step of the backend needs all processes.
    """
    from torch.nn import Module

    if session.state.use_distributed:
        session.backend.demand("join")
        if session.guard is not None:
            raise NotOffered(
                "Cannot enter join_uneven_inputs in a run with a StepGuard.",
                "All processes judge each step together, and one without batches would be missed.",
                "Use even_batches=True, or remove the StepGuard.",
            )
    samplers = [] if even_batches is None else _adjustable(session)
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = even_batches
    try:
        models = [strategy_model(item) for item in joinables if isinstance(item, Module)]
        with session.strategy.join(models, even_batches):
            yield
    finally:
        for sampler, even in zip(samplers, before, strict=True):
            sampler.even_batches = even


def _adjustable(session: Session) -> list[Any]:
    """The batch samplers of prepared loaders that have `even_batches`."""
    samplers = [getattr(loader, "batch_sampler", None) for loader in session.prepared.loaders]
    adjustable = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
    if len(adjustable) < len(samplers):
        warnings.warn(
            "join_uneven_inputs(even_batches=...) is only supported for map-style datasets: it does not reach loaders "
            "over streams, nor those that the main process reads for the others.",
            UserWarning,
            stacklevel=stack_level(),
        )
    return adjustable
