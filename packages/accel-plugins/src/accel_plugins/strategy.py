"""The interface of a backend: how it wraps models, makes optimizer steps and writes checkpoints.

A run has exactly one strategy. The default of every method is the behaviour of a single process, so a backend overrides
only the methods in which it differs. No code checks the type or the name of a strategy.

Each docstring states who calls the method and when, its preconditions and its postconditions. The caller is the
Accelerator, a training loop of the test kit, or for the methods around a step the prepared optimizer
(`wrapped.optimizer`), which every loop uses.

All models, optimizers and schedulers that the methods receive are those that `setup` returned. They lack the layers
that transforms added later, and what `prepare` wraps around an optimizer or a scheduler that `setup` left as it was:
callers pass `prepared.as_set_up(item)`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accel_plugins.manifest import Capabilities, ObjectKind
from accel_state.library import stack_level

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context
    from accel_plugins.model_part import ModelPart
    from accel_plugins.precision.base import Closure
    from accel_plugins.shards import BatchShare, Shards
    from accel_plugins.transform import Transform

__all__ = ("Strategy", "clip_to_norm")

_NULL_CONTEXT: Final[AbstractContextManager[None]] = nullcontext()


class Strategy:
    """How one process trains; the base of every backend.

    Args:
        context: the context of the run; read-only, and complete before the strategy is created.
        config: an instance of the settings class in the backend's manifest, or None when the manifest has none.
    """

    on_gradients: Callable[[Module], None] | None = None
    """Callback for code that inspects gradients, needed where a strategy's engine steps within `backward`.

    Such a strategy calls it on every process before each step, with the model; `gradients(model)` works during the
    call.
    """

    save_options: ClassVar[frozenset[str]] = frozenset()
    """Names of further arguments that `save` accepts for models; `save_state` accepts the same names."""

    def __init__(self, context: Context, config: Any = None) -> None:
        self.context = context
        self.config = config

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do, declared in its manifest."""
        return Capabilities() if self.context.manifest is None else self.context.manifest.capabilities

    def overrides(self, method: str) -> bool:
        """Whether the class of this strategy overrides a method, given by name.

        Callers ask once and spare the calls of a method that does nothing.
        """
        return getattr(type(self), method) is not getattr(Strategy, method)

    # ------------------------------------------------------------------ preparing

    def transforms(self) -> Iterable[Transform]:
        """Changes of the model that this backend's settings switch on, such as activation checkpointing.

        Called by `prepare`, which sorts them among the other transforms and applies all.
        """
        return ()

    def check(self, bundle: Bundle) -> None:
        """Raise an error, with reason and remedy, for objects or settings that this backend cannot train with.

        Called by `prepare` before all other methods. Must not change the bundle.
        """

    def place(self, model: Module) -> Module:
        """Move a model to its device.

        Called by `prepare` for each model, unless the user disabled device placement, before any transform. The
        optimizers already contain the model's parameters. A replaced parameter must keep its name; the caller then
        updates the optimizers.
        """
        from accel_plugins.parameters import preserved_ties

        # On devices such as XLA's, `Module.to` creates a new parameter for each name, which separates tied parameters.
        with preserved_ties(model):
            return model.to(self.context.process.device)

    def setup(self, bundle: Bundle) -> Bundle:
        """Wrap the models, and the optimizers and schedulers where needed.

        Called once by each `prepare` call, after the transforms before it. The models are on their device, and
        autocast if the manifest declares so. The bundle has all objects of the call; replace items of its lists.
        Afterwards every optimizer must contain the parameters that train. The caller wraps optimizers and schedulers
        that are still unwrapped.
        """
        return bundle

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[ModelPart]:
        """A context in which users build a model with its parameters on the right device, and sharded if the strategy
        shards.

        Entered by every process, before `prepare`. The model must have the values that it would have on one process.
        With `empty_init`, parameters are not initialised, because the user loads values later; None lets the strategy
        decide. Entering returns the part of the model that this process builds: by default, all layers. A strategy
        whose processes train other layers each returns its stages, inside of `model_part.random_numbers_of_first()`.
        Models then have parameters on the meta device for the layers of other processes, which it must expect.
        """
        return _build_on_device(self.context.process.device, empty=bool(empty_init))

    def unwrap(self, model: Module) -> Module:
        """The model that `setup` wrapped; the wrapped model must still work.

        Called by `unwrap_model`, which gives it to users, and by code that needs the user's names. Its weights must be
        those that train, or shards of them. A backend whose processes have other layers each cannot promise this. It
        lacks `whole_model`, and then `unwrap_model` is refused, and this method returns a model whose names are right.
        """
        return model

    def check_loader(self, loader: Any) -> None:
        """Raise an error, with reason and remedy, for a loader that this backend cannot train with.

        Called by `prepare` for each loader of the script, before it is sharded. Must not change the loader.
        """

    def wrap_loader(self, loader: Any) -> Iterable[Any]:
        """Wrap a data loader. Called by `prepare` for each loader, after it was sharded."""
        loaded: Iterable[Any] = loader
        return loaded

    def shards(self) -> Shards:
        """The shard of each batch that this process trains on.

        Called by `prepare` and by code that counts samples. Processes that must read the same samples, such as those of
        one tensor-parallel group, return the same index. Constant during a run. With the capability `elastic`, the
        batches of training may be distributed differently in each step; see `share_of_batch`.
        """
        from accel_plugins.shards import Shards

        mesh = self.context.mesh
        if mesh is None:
            return Shards(self.context.process.world_size, self.context.process.rank)
        from accel_plugins.mesh import DATA_AXES, present_axes

        count, index = 1, 0
        for axis in present_axes(mesh, DATA_AXES):
            count, index = count * mesh[axis].size(), index * mesh[axis].size() + mesh.get_local_rank(axis)
        return Shards(count, index)

    def share_of_batch(self, loader: Any) -> BatchShare | None:
        """The share of a loader's newest batch in the optimizer step.

        Called only with the capability `elastic`, for the loader that is being iterated: in `accumulate`, `backward`
        and the optimizer's `step`. The Accelerator multiplies the loss by the share's `factor`, so the mean of the
        gradients over the processes that share the step is the gradient of the step, and completes the gradients at
        its last batch. None means that the loader does not train, and is an error in these calls.
        """
        raise NotImplementedError(
            f"{type(self).__name__} declares Capabilities(elastic=True) but does not override share_of_batch()."
        )

    def batches_per_step(self) -> int:
        """The number of single-process batches in one optimizer step of the whole run.

        Called by `prepare` for each scheduler. Users write schedules for a run of one process, so each step advances
        the schedule by this number.
        """
        return self.shards().count

    def shard_key(self, tensor: Tensor) -> Hashable:
        """A key for this process's shard of a parameter, for strategies whose shards are not DTensors.

        Called by code that compares replicas: processes with the same key must have equal values in the tensor. None
        for a tensor that all processes have in full.
        """
        return None

    # ------------------------------------------------------------------ one step

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        """A context in which backward does not reduce gradients over processes.

        Entered around forward and backward of each micro-batch except the last. Its exit must not reduce gradients
        either.
        """
        return _NULL_CONTEXT

    def passes_are_local(self, model: Module) -> bool:
        """Whether forward and backward of a model under `no_sync` call no collectives.

        One process may then stop in the middle. By default, the capability `local_passes`; a strategy in which it
        depends on the model or its settings overrides this.
        """
        return self.capabilities.local_passes

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        """A context in which backward reduces all accumulated gradients, although forward ran under `no_sync`.

        Entered around one backward.
        """
        return _NULL_CONTEXT

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        """Compute gradients.

        Called once per micro-batch with the loss divided by the number of micro-batches, unless the backend has
        `own_accumulation`. `model` computed the loss; it is None when the caller does not know the model. Further
        arguments go to `Tensor.backward`. The accumulated gradients must equal those of the mean loss over the samples
        of all processes.
        """
        self.context.precision.backward_scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        """Complete an optimizer's gradients, for example by a late all-reduce.

        Called before gradients are unscaled or clipped, by the prepared optimizer before each step, and in a step with
        a closure after each call of the closure. Afterwards every gradient of the optimizer must equal the one that a
        single process would compute, still multiplied by the loss scale, unless the backend lacks `exact_gradients`.

        It may be called again with the same gradients, for example by clipping and by the step, and must then leave
        them as they are. The mean of equal gradients is the same again, so a plain all-reduce needs nothing for this.
        What changes gradients must note which ones are complete, and forget it when backward adds to them; a script may
        call `loss.backward()` itself, so `Tensor.register_post_accumulate_grad_hook` notes it best.
        """

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale gradients to a total norm over the whole model of at most `max_norm`; return the norm before scaling.

        Called after gradients are complete and unscaled. Returns None when the engine clips and does not return the
        norm.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def norm_with_sums(
        self, parameters: Sequence[Tensor], sums: Tensor | None, max_norm: float | None = None, norm_type: float = 2.0
    ) -> Tensor | None:
        """The total norm of gradients as `clip_norm` returns it, and sums of a few numbers over all processes.

        Called for each step of a run with a guard of steps, after gradients are complete and unscaled. `sums` has
        numbers of this process, on its device; they are replaced by their sums over all processes. The last one is a
        place for the norm: it becomes the sum of the norms that the processes have. It is None in a run of one process.
        Gradients are clipped to `max_norm`, or not at all if it is None; where their norm is not finite they may stay
        as they are.

        By default this makes one reduction. A strategy whose norm is reduced over all processes anyway overrides it to
        send both in one message.
        """
        norm: Any
        if type(self).clip_norm is not Strategy.clip_norm:
            norm = self.clip_norm(parameters, float("inf") if max_norm is None else max_norm, norm_type)
        else:
            gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
            if any(map(_IS_SPARSE, gradients)):
                # They have the norm of their values.
                gradients = [one.coalesce().values() if one.is_sparse else one for one in gradients]
            norm = torch.nn.utils.get_total_norm(gradients, norm_type)
            if max_norm is not None:
                clip_to_norm(parameters, max_norm, norm)
            if type(norm) is not Tensor and hasattr(norm, "full_tensor"):
                norm = norm.full_tensor()
        if sums is not None:
            if norm is not None:
                sums[-1] = norm
            self.context.process.transport.all_reduce(sums).wait()
        return norm if norm is None or isinstance(norm, torch.Tensor) else torch.tensor(norm)

    def clip_value(self, parameters: Iterable[Tensor], value: float) -> None:
        """Clamp every element of the gradients to `[-value, value]`. Called after gradients are complete and
        unscaled."""
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        # torch raises for an empty list.
        if with_gradients:
            torch.nn.utils.clip_grad_value_(with_gradients, value)

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step the user's optimizer; return False when the step was skipped.

        Called by the prepared optimizer when gradients are synchronised, with complete gradients. With a closure they
        are complete whenever the closure returns. Afterwards replicas of a parameter must be equal on all processes,
        unless the backend lacks `equal_replicas`. Pass the result of the precision on as it is: reading it may wait
        for the device.
        """
        return self.context.precision.step(optimizer, closure)

    def leave_out(self, optimizer: Optimizer) -> None:
        """Clear an optimizer's gradients and forget what was noted about them, because a step is left out.

        Called by the prepared optimizer instead of `step`, on every process. Weights, optimizer and loss scale must
        stay as they are, and the next step must be that of a run which has never computed these gradients.
        """
        self.context.precision.leave_out(optimizer)
        optimizer.zero_grad(set_to_none=True)

    def after_step(self, model: Module | None, optimizer: Optimizer) -> None:
        """Work that follows an optimizer step, such as averaging parameters every few steps.

        Called by the prepared optimizer after each step that was not skipped. `model` is the model of the optimizer's
        parameters, or None when they belong to several prepared models or to none.
        """

    def global_weights(self, model: Module) -> AbstractContextManager[None]:
        """A context in which a model has the weights of the whole run, for evaluation and for `save_model`.

        Entered on every process, by `save_model` and by users around an evaluation. On exit the model has its training
        weights again. The default does nothing, because both are the same.
        """
        return _NULL_CONTEXT

    def reshard(self, model: Module) -> None:
        """Free what forward has gathered, so that the model's parameters are those that the optimizer steps.

        Called on every process before code reads or writes parameters in place between two steps. Afterwards a forward
        must use what was written. The default does nothing, because nothing is gathered.
        """

    def average_parameters(self, model: Module) -> None:
        """Replace parameters by their mean over all processes. Called by LocalSGD every few steps."""

    def share_buffers(self, model: Module, source: int) -> None:
        """Give all processes the buffers of one process, if forward takes them from the first one.

        Called on all processes after a step of an exact epoch in which the first process had no data.

        Args:
            model: the model.
            source: the process, as an index among those that read different data.
        """

    def join(self, models: Sequence[Module], even_batches: bool | None = None) -> AbstractContextManager[None]:
        """A context in which processes may run out of batches at different times.

        Entered around a training loop, with the models of a script that `setup` returned; other objects that the script
        passed are left out. Inside, loaders use `even_batches`; None leaves their setting unchanged.
        """
        if self.context.process.world_size > 1:
            warnings.warn(
                "Joining uneven inputs is only supported for multi-GPU and multi-CPU runs of DistributedDataParallel "
                "models. Nothing is joined: a process that runs out of batches leaves the others waiting.",
                UserWarning,
                stacklevel=stack_level(),
            )
        return _NULL_CONTEXT

    # ------------------------------------------------------------------ checkpoints

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        """The state of one object for a checkpoint. Its tensors may share memory with the object's.

        Called on every process before anything is written, in the order of `SAVED_KINDS`, and only with objects that
        `setup` returned. Where an engine collects and writes in one call, return the object itself: `save` receives it.
        """
        return self.state_dict(item) if kind is ObjectKind.MODEL else item.state_dict()

    def save(self, kind: ObjectKind, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        """Write the state that `collect` returned for an object, under the file names of `checkpoint.files`.

        Called in the order of `SAVED_KINDS`, on the processes that write files, or on all with the capability
        `collective_save`. The folder exists and is temporary: the caller syncs its files to disk and renames it.
        `index` counts the objects of the same kind, from 0.
        """
        from accel_plugins.checkpoint import parts

        parts.write_part(kind, state, folder, index, safe_serialization=safe_serialization)

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        """Load the state that `save` wrote into an object that `setup` returned.

        Called on every process, in the order of `SAVED_KINDS`; `folder` and `index` are those of `save`.
        `options` for models go to `Module.load_state_dict`; `map_location`, valid for all objects, is the device to
        which tensors are read; `models`, for optimizers, are the user's models, for states that list parameters by
        name.
        """
        from accel_plugins.checkpoint import parts

        target = self.unwrap(item) if kind is ObjectKind.MODEL else item
        parts.read_part(kind, target, folder, index, **options)

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        """All weights of a model under the names of the user's model. Called on every process."""
        from accel_plugins.checkpoint import parts

        return parts.plain_state_dict(self.unwrap(model))

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load weights, by their names in the user's model, into a prepared model. Called on every process."""
        self.unwrap(model).load_state_dict(weights, strict=strict)

    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        """This process's further state that a resumed run needs beside models, optimizers and schedulers, by name.

        Called on every process when a checkpoint is saved, with its models and optimizers in the order of their files.
        A strategy lives as long as the run, which may have several Accelerators, so it may know other objects too;
        those are not in this checkpoint. All processes return the same names; values are tensors, numbers, strings,
        and lists and dicts of these.
        """
        return {}

    def load_extra_state(self, state: Mapping[str, Any], models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        """Restore the state that `extra_state` returned on this process, for the objects in the same order.

        Called on every process after models, optimizers and schedulers are loaded, unless the saved state was empty.
        """

    def writes_weights(self) -> bool:
        """Whether `state_dict` returns complete weights on this process, so that it can write them."""
        return True

    def gradients(self, model: Module) -> dict[str, Tensor]:
        """Full gradients of a model, by parameter name in the user's model; parameters without a gradient are left out.

        Called on every process, by code that inspects gradients; training itself never calls it. If the engine steps
        within `backward`, gradients exist only during `on_gradients`.
        """
        from accel_plugins.parameters import canonical_name

        return {
            canonical_name(name): _complete(parameter.grad)
            for name, parameter in self.unwrap(model).named_parameters()
            if parameter.grad is not None
        }

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        """Drop all references to models and optimizers that `setup` returned, so that their memory can be freed.

        Called by `free_memory` with all objects of one Accelerator, the same that `setup` returned; no method is called
        with them afterwards. Objects of other Accelerators remain in use, and further ones may be prepared.
        """

    def close(self) -> None:
        """Release the resources that the strategy opened.

        Called once: by `end_training` of the last Accelerator of the run, or else when the run or the process ends.
        Training has finished; `unwrap`, `state_dict` and `save` may still be called.
        """


def clip_to_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients with a total norm down to a norm; where it is not finite, they stay as they are."""
    if type(norm) is not Tensor or not norm.is_cpu:
        # A norm of 0 scales nothing. On the device nobody waits for the answer.
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.nan_to_num(nan=0.0, posinf=0.0))
    elif _SURELY_BELOW * max_norm - _TORCHS_MARGIN <= norm.item() < math.inf:
        # The host knows the norm, so gradients are not multiplied by 1.
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


_TORCHS_MARGIN: Final = 1e-6
"""What torch adds to a norm before it divides by it."""

_SURELY_BELOW: Final = 0.999
"""A norm below this fraction of the limit has a factor of 1, however it is rounded."""

_IS_SPARSE: Final = attrgetter("is_sparse")


def _complete(tensor: Tensor) -> Tensor:
    """The full tensor of one that may be sharded over processes."""
    complete: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return complete.detach()


@contextmanager
def _build_on_device(device: torch.device, *, empty: bool = False) -> Iterator[ModelPart]:
    """Models that this thread creates inside have their parameters on the device.

    Args:
        device: the device to which parameters move when they are registered.
        empty: skip initialisation: functions of `torch.nn.init` do nothing, and parameters have arbitrary values.
    """
    from accel_bigmodel.meta import init_on_device
    from accel_plugins.model_part import ModelPart

    with init_on_device(device), _WithoutInitialisation() if empty else nullcontext():
        yield ModelPart()


class _WithoutInitialisation(TorchFunctionMode):
    """Makes functions of `torch.nn.init` return their tensor unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
