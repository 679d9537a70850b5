"""Training: preparing, accumulating, going backward, clipping.

What a script may not need is imported when it is first asked for, so that making an Accelerator stays cheap.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from accel_plugins.layers import strategy_model
from accel_plugins.manifest import Ability
from accel_state.labels import DEVICE_MAP
from accel_torch.accumulation import MicroBatch, no_sync_all
from accel_torch.members import AcceleratorMembers
from accel_torch.options import generator_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from accel_plugins.precision.config import AutocastKwargs
    from accel_state.labels import RNGType
    from accel_torch.assemble import ActiveBackend

__all__ = ("TrainingMixin",)

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")


class TrainingMixin(AcceleratorMembers):
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
        """Models, optimizers, schedulers and loaders, ready for this run, in the order given.

        Args:
            args: what is to be prepared, in any order; a single one comes back by itself. What is of another kind
                comes back as it is.
            device_placement: for each object, whether it is moved to the device; that of the Accelerator when None.

        Raises:
            NoState: the state was reset after this Accelerator was made.
            AccelError: the backend refuses; nothing was changed then.

        Example:
            >>> model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        """
        return self._prepare(args, device_placement)

    def prepare_model(
        self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Module:
        """A model, ready for this run.

        Args:
            model: the model.
            device_placement: whether it is moved to the device.
            evaluation_mode: it is only evaluated, so it is placed, changed and autocast, but not wrapped for training.

        Example:
            >>> teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
        """
        if evaluation_mode:
            from accel_torch.prepare import prepare_for_evaluation

            return prepare_for_evaluation(self, model, self._placed(device_placement)[0])
        prepared: Module = self._prepare([model], self._placed(device_placement))
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """An optimizer, ready for this run.

        Example:
            >>> optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters()))
        """
        return self._prepare([optimizer], self._placed(device_placement))

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A learning-rate scheduler, ready for this run.

        Example:
            >>> scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 10))
        """
        return self._prepare([scheduler])

    def _prepare(self, objects: Sequence[Any], device_placement: list[bool] | None = None) -> Any:
        from accel_torch.prepare import prepare

        # After a reset, this raises before anything is changed.
        _ = self.state.distributed_type
        return prepare(self, objects, device_placement)

    def _placed(self, device_placement: bool | None) -> list[bool]:
        return [self._options.device_placement if device_placement is None else device_placement]

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """A block in which a model is built where the backend trains it, without memory for more than that.

        On one device, parameters are made there. With FSDP2 each process keeps its shard of each parameter as soon as
        the module that has it is built; `prepare` takes such a model. The values are those that one process gives the
        model for the same seed. Enter the block on every process, before `prepare`.

        Args:
            empty_init: initialise nothing, because weights are loaded later; None and False initialise.

        Example:
            >>> with accelerator.init_module():
            ...     model = Transformer(config)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        """
        return self._backend.strategy.init_module(empty_init)

    def accumulate(
        self, *models: Module, weight: float | Tensor | None = None, loss_reduction: Literal["mean", "sum"] = "mean"
    ) -> AbstractContextManager[None]:
        """The block of one micro-batch: gradients add up, and every so many blocks the optimizer really steps.

        Without weights every micro-batch counts the same. With weights they count by them: the gradient is that of the
        mean over all tokens of the step, however these are spread over micro-batches and processes. One number per step
        is exchanged for it. Gradients have their true size from `clip_grad_norm_`, `unscale_gradients` or the step on.

        Args:
            models: those whose gradients are not to be synchronised before the last micro-batch of a window.
            weight: how many tokens (or samples) the loss is over; for every micro-batch of a window or for none.
            loss_reduction: whether that loss is the mean over its tokens or their sum. A mean over no tokens is not a
                number, so give sums where a micro-batch may have none.

        Raises:
            Conflict: some micro-batches of a window have a weight and others have none.
            NotOffered: the backend accumulates by itself.
            SettingError: at the step, on every process: a weight was negative or not finite.

        Example:
            >>> for inputs, targets in loader:
            ...     with accelerator.accumulate(model, weight=(targets != -100).sum()):
            ...         loss = cross_entropy(model(inputs), targets, ignore_index=-100)
            ...         accelerator.backward(loss)
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        block = MicroBatch()
        block.accumulation, block.models = self._accumulation, models
        if weight is not None:
            block.weight, block.loss_reduction = weight, loss_reduction
        return block

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients; call it instead of `loss.backward()`.

        Args:
            loss: divided by the number of micro-batches first, or multiplied by the weight of this one.
            kwargs: go to `loss.backward`; `learning_rate` is for optimizers that step in backward, see `lomo_backward`.

        Example:
            >>> loss = loss_function(model(inputs), targets)
            >>> accelerator.backward(loss)
        """
        if self._prepared.steps_in_backward or "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs.pop("learning_rate", None))
            return
        try:
            backend, share = self._backend, self._accumulation.share(loss)
            if backend.plain_backward:
                share.backward(**kwargs)  # type: ignore[no-untyped-call]
            else:
                model = self._prepared.only_model() if backend.backward_reads_model else None
                backend.strategy.backward(share, model, **kwargs)
        except RuntimeError as error:
            from accel_state.uncaught import explain_backend_error

            explain_backend_error(error)
            raise

    def lomo_backward(self, loss: Tensor, learning_rate: float | None) -> None:
        """Compute gradients and let prepared LOMO optimizers step with each of them at once, which saves their memory.

        Args:
            loss: of the whole batch.
            learning_rate: of this step; schedulers of such an optimizer are read by the caller.

        Raises:
            SettingError: no learning rate was given, or no such optimizer was prepared.
            NotOffered: gradients would have to be gathered first, over processes or micro-batches.

        Example:
            >>> model, optimizer = accelerator.prepare(model, Lomo(model, lr=1e-3))
            >>> accelerator.lomo_backward(loss_function(model(inputs), targets), learning_rate=1e-3)
        """
        from accel_torch.step import fused_backward

        fused_backward(self, loss, learning_rate)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a prepared optimizer steps in backward, as LOMO does."""
        return self._prepared.steps_in_backward

    @staticmethod
    def trigger_sync_in_backward(model: Module) -> AbstractContextManager[None]:
        """A block whose backward synchronises all gradients gathered so far, though forward ran under `no_sync`.

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

        backend: ActiveBackend = current.require_run().backend
        return backend.strategy.sync_in_next_backward(strategy_model(model))

    def no_sync(self, *models: Module, model: Module | None = None) -> AbstractContextManager[object]:
        """A block in which gradients are not synchronised between the processes.

        Args:
            models: whose gradients; those of all prepared models when none is given.
            model: the same for a single one, by keyword.

        Example:
            >>> with accelerator.no_sync(model):
            ...     accelerator.backward(loss_function(model(one_batch), targets))
            >>> accelerator.backward(loss_function(model(another_batch), targets))
            >>> optimizer.step()
        """
        given = models if model is None else (*models, model)
        return no_sync_all(self._backend.strategy, given or tuple(self._prepared.models))

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """A block in which processes may run out of batches at different times; those that have none help the others.

        Args:
            joinables: prepared models whose gradients are averaged. Others are left as they are.
            even_batches: whether prepared loaders fill up their last step inside of the block; as before when None.

        Example:
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     for inputs, targets in loader:
            ...         loss = loss_function(model(inputs), targets)
            ...         accelerator.backward(loss)
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        return _join_uneven_inputs(self, joinables, even_batches)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        """Scale gradients so that their total norm is at most `max_norm`; returns the norm they had.

        It is a tensor, with DeepSpeed a plain number, and None where the backend does not know it.

        Args:
            parameters: whose gradients.
            max_norm: the largest norm allowed.
            norm_type: the p of the norm; `math.inf` for the largest element.

        Example:
            >>> if accelerator.sync_gradients:
            ...     accelerator.clip_grad_norm_(model.parameters(), 1.0)
        """
        from accel_torch.step import clip_grad_norm

        return clip_grad_norm(self, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Cut every element of the gradients to `[-clip_value, clip_value]`.

        Example:
            >>> accelerator.backward(loss_function(model(inputs), targets))
            >>> if accelerator.sync_gradients:
            ...     accelerator.clip_grad_value_(model.parameters(), 0.5)
        """
        from accel_torch.step import clip_grad_value

        clip_grad_value(self, parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring fp16 gradients to their true size; those of all prepared optimizers when none is given.

        Example:
            >>> accelerator.backward(loss_function(model(inputs), targets))
            >>> accelerator.unscale_gradients()
            >>> largest = max(parameter.grad.abs().max() for parameter in model.parameters())
        """
        from accel_torch.step import unscale_gradients

        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        unscale_gradients(self, None if optimizer is None else given)

    def autocast(
        self, autocast_handler: AutocastKwargs | bool | None = None, cache_enabled: bool | None = None
    ) -> AbstractContextManager[None]:
        """A block in which operations outside of a prepared model compute in the precision of the run.

        Args:
            autocast_handler: replaces the one of the Accelerator; a bool sets `cache_enabled`.
            cache_enabled: keep cast weights until the block is left.

        Example:
            >>> with accelerator.autocast():
            ...     loss = loss_function(model(inputs), targets)
        """
        if isinstance(autocast_handler, bool):
            autocast_handler, cache_enabled = None, autocast_handler
        if cache_enabled is not None:
            from accel_plugins.precision.config import AutocastKwargs

            known = autocast_handler or self._options.handler(AutocastKwargs) or AutocastKwargs()
            autocast_handler = AutocastKwargs(known.enabled, cache_enabled)
        return self._backend.precision.autocast(autocast_handler)

    def unwrap_model(self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Module:
        """The model as it was before `prepare`.

        Args:
            model: a prepared model.
            keep_fp32_wrapper: leave its forward in the precision of the run.
            keep_torch_compile: leave it compiled.

        Example:
            >>> network = accelerator.unwrap_model(model)
        """
        from accel_plugins.layers import extract_model_from_parallel

        unwrapped: Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return unwrapped

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and give unused memory back; returns one None for each argument.

        Example:
            >>> model, optimizer = accelerator.free_memory(model, optimizer)
        """
        import gc

        from accel_plugins.layers import strategy_model

        if self._saver is not None:
            self._saver.release()
        models = [strategy_model(model) for model in self._prepared.models]
        self._backend.strategy.release(models, self._prepared.optimizers)
        del models
        self._prepared.clear()
        self._accumulation.step = 0
        count = len(objects)
        del objects
        gc.collect()
        self.state._process.family.empty_cache()
        return [None] * count

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`.

        Example:
            >>> model, optimizer = accelerator.clear(model, optimizer)
        """
        return self.free_memory(*objects)

    @property
    def sync_gradients(self) -> bool:
        """Whether the gradients of this micro-batch are synchronised, so that the optimizer steps."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        import dataclasses

        self.gradient_state.plugin = dataclasses.replace(self.gradient_state.plugin, num_steps=steps)

    @property
    def step(self) -> int:
        """Micro-batches of the current window so far."""
        return self._accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._accumulation.step = step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of an fp16 run, or None."""
        return self._backend.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._backend.precision.scale_by(scaler)
        for optimizer in self._prepared.optimizers:
            optimizer.scaler = scaler
        if self._accumulation.guard is not None:
            self._accumulation.guard.watch_scaler(scaler)

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to the device."""
        return self._options.device_placement

    @device_placement.setter
    def device_placement(self, move: bool) -> None:
        self._options = self._options._replace(device_placement=move)

    @property
    def rng_types(self) -> list[str]:
        """Generators that loaders synchronise at the start of an iteration."""
        return list(self._options.rng_types)

    @rng_types.setter
    def rng_types(self, rng_types: Sequence[str | RNGType] | None) -> None:
        self._options = self._options._replace(rng_types=generator_names(rng_types))

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers follow their optimizers."""
        return self._options.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, follow: bool) -> None:
        self._options = self._options._replace(step_scheduler_with_optimizer=follow)

    def verify_device_map(self, model: Module) -> bool:
        """Whether a device map spreads a model over several devices, so that it cannot train on several processes.

        Example:
            >>> if accelerator.verify_device_map(model):
            ...     raise ValueError("Train the model on one device in each process.")
        """
        return any(len(getattr(module, DEVICE_MAP, None) or {}) > 1 for module in model.modules())


@contextmanager
def _join_uneven_inputs(
    accelerator: AcceleratorMembers, joinables: Sequence[Any], even_batches: bool | None = None
) -> Iterator[None]:
    """A block in which a process without batches answers the collectives of those that still have some.

    Args:
        accelerator: the Accelerator.
        joinables: prepared models.
        even_batches: what prepared loaders fill up inside of the block; as before when None.

    Raises:
        NotOffered: every step of the backend needs all processes.
    """
    if accelerator.state.use_distributed:
        accelerator._backend.manifest.demand(Ability.JOIN)
    samplers = [] if even_batches is None else _adjustable(accelerator)
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = even_batches
    try:
        with accelerator._backend.strategy.join([strategy_model(model) for model in joinables], even_batches):
            yield
    finally:
        for sampler, even in zip(samplers, before, strict=True):
            sampler.even_batches = even


def _adjustable(accelerator: AcceleratorMembers) -> list[Any]:
    """The samplers of prepared loaders that decide about even batches."""
    samplers = [getattr(loader, "batch_sampler", None) for loader in accelerator._prepared.loaders]
    found = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
    if len(found) < len(samplers):
        warnings.warn(
            "join_uneven_inputs(even_batches=...) is only supported for map-style datasets: it does not reach loaders "
            "over streams, nor those that the main process reads for the others.",
            UserWarning,
            stacklevel=4,
        )
    return found
