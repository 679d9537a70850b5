"""The interface of a backend: what a model, an optimizer and a checkpoint are while training.

Exactly one strategy owns a run. Every method has the answer of a single process as its default, so a backend overrides
only the questions it answers differently. Nobody asks a strategy for its type or name.

Models that a strategy is given are those that its `setup` returned, without the layers that transforms put around them
later; whoever calls it sees to that by `layers.strategy_model`.

Each docstring says who calls the method and when, what it may assume, and what it must leave behind. "The Accelerator"
means whoever drives the strategy; the conformance kit drives it by a short loop of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from accel_plugins.manifest import Part, Traits

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context
    from accel_plugins.precision.base import Closure
    from accel_plugins.shards import Shards, StepShards
    from accel_plugins.transform import Transform

__all__ = ("Strategy",)

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class Strategy:
    """How one process trains; the base of every backend.

    Args:
        context: the context of the run; read-only, and complete before the strategy is made.
        config: an instance of the settings class that the backend's manifest names, or None when it names none.
    """

    on_gradients: Callable[[Module], None] | None = None
    """Set by whoever looks at gradients, where the engine of a strategy steps within `backward`.

    Such a strategy calls it on every process before a step, with the model whose `gradients` it gives at that moment.
    """

    def __init__(self, context: Context, config: Any = None) -> None:
        self.context = context
        self.config = config

    @property
    def traits(self) -> Traits:
        """How this backend synchronises and saves, as its manifest declares it."""
        return Traits() if self.context.manifest is None else self.context.manifest.traits

    # ------------------------------------------------------------------ preparing

    def transforms(self) -> Iterable[Transform]:
        """Changes of the model that the settings of this backend ask for, such as activation checkpointing.

        Called by `prepare`; they are sorted among the others and applied with them.
        """
        return ()

    def check(self, bundle: Bundle) -> None:
        """Refuse what cannot work, with the reason and the way out.

        Called by `prepare` first of all. May assume nothing. Must change nothing: a refused bundle is as it was.
        """

    def place(self, model: Module) -> Module:
        """Bring a model to where it trains.

        Called by `prepare` for each model whose placement was left to us, before any transform. The optimizers hold the
        model's parameters already; where one is replaced it keeps its name, and the caller rebinds the optimizers.
        """
        from accel_plugins.parameters import preserved_ties

        # `Module.to` makes a new parameter for each name on devices such as XLA's, also for each name of a tied one.
        with preserved_ties(model):
            return model.to(self.context.process.device)

    def setup(self, bundle: Bundle) -> Bundle:
        """Wrap what has to be wrapped.

        Called by `prepare` once, after the transforms that come before. Models are placed, and autocast where the
        manifest says so. Sees everything of one `prepare` call and replaces items of the bundle's lists; every
        optimizer must hold the parameters that now train. Optimizers and schedulers that come back unwrapped are
        wrapped by the caller.
        """
        return bundle

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """A context in which users build a model whose parameters go where this strategy wants them.

        Entered by every process. `prepare` gets the model afterwards; its values are those that one process would give
        it. With `empty_init`, nothing is initialised, because values are loaded later; None lets the strategy decide.
        """
        return _build_on_device(self.context.process.device, empty=bool(empty_init))

    def unwrap(self, model: Module) -> Module:
        """What `setup` wrapped. Called whenever somebody wants the user's model; the wrapped one goes on working."""
        return model

    def wrap_loader(self, loader: Any) -> Iterable[Any]:
        """A loader as this strategy feeds it. Called by `prepare` for each loader, after it was sharded."""
        loaded: Iterable[Any] = loader
        return loaded

    def shards(self) -> Shards:
        """The slice of each batch that is this process's.

        Called by `prepare` and by whoever counts samples. Processes that must see the same samples, those of one tensor
        axis for example, give the same index. Constant during a run; with `Traits.elastic` it is that of loaders which
        do not train, and `begin_step` that of those which do.
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

    def begin_step(self) -> StepShards:
        """Agree on who makes the next optimizer step.

        Called with `Traits.elastic` alone: by a loader that trains, before it draws the indices of the step's first
        batch, and once more after the last step of an epoch. The loss of each batch is then multiplied by the share of
        the step's samples that it has, so that the mean of the gradients over the `count` processes is the gradient of
        the step. A step that did not count, because a member was lost in it, is begun again with the same number;
        `step` returned False for it. It may be called twice before a step.
        """
        raise NotImplementedError(f"{type(self).__name__} declares Traits(elastic=True) and has no begin_step().")

    def batches_per_step(self) -> int:
        """Batches of one process that an optimizer step of the whole run has.

        Called by `prepare` for each scheduler: a schedule is written for the batches of a run of one process, and each
        step moves it on by that many.
        """
        return self.shards().count

    def shard_key(self) -> Hashable:
        """Which shard of the parameters this process has, where their tensors do not say so themselves.

        Called by whoever compares replicas: processes with the same answer must hold equal tensors.
        """
        return None

    # ------------------------------------------------------------------ one step

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        """A context in which backward leaves each process its own gradients.

        Called around forward and backward of the micro-batches before the last. Leaving it must not reduce anything.
        """
        return _NOTHING

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        """A context in which backward reduces all gradients gathered so far, though forward ran under `no_sync`.

        Called around one backward.
        """
        return _NOTHING

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        """Compute gradients.

        Called once per micro-batch with the loss divided by the number of micro-batches, unless the manifest owns
        ACCUMULATION. `model` is the one that the loss belongs to, or None where the caller does not know; further
        arguments go to `Tensor.backward`. Gradients must add up to those of the mean loss over all processes' samples.
        """
        self.context.precision.backward_scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        """Make an optimizer's gradients complete.

        Called before they are unscaled, clipped or stepped with; may be called again for the same step. Afterwards
        every gradient of the optimizer is what it would be in one process, still scaled.
        """

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale gradients so that their total norm over the whole model is at most `max_norm`; return the norm before.

        Called at complete, unscaled gradients. None when the engine clips by itself and does not tell.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_value(self, parameters: Iterable[Tensor], value: float) -> None:
        """Cut every element of the gradients to `[-value, value]`. Called at complete, unscaled gradients."""
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        # torch refuses none at all.
        if with_gradients:
            torch.nn.utils.clip_grad_value_(with_gradients, value)

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step the user's optimizer; False when the step was skipped.

        Called by the wrapped optimizer when gradients are synchronised. Parameters must be the same on all processes
        that hold them afterwards.
        """
        return self.context.precision.step(optimizer, closure)

    def after_step(self, model: Module | None, optimizer: Optimizer) -> None:
        """Do what belongs after an optimizer step, such as averaging parameters every few steps.

        Called after each step that was made, not after one that was skipped. `model` is the one whose parameters the
        user's optimizer holds, or None where they are those of several or of none.
        """

    def global_weights(self, model: Module) -> AbstractContextManager[None]:
        """A context in which a model has the weights of the whole run, to be evaluated or saved for others.

        Called around `save_model`, and by users around an evaluation; on every process. What trains has its own weights
        again afterwards. By default these are the same.
        """
        return _NOTHING

    def average_parameters(self, model: Module) -> None:
        """Give every process the mean of all processes' parameters. Called by LocalSGD every few steps."""

    def join(self, models: Sequence[Module], even_batches: bool | None = None) -> AbstractContextManager[None]:
        """A context in which processes may run out of batches at different times.

        Called around a training loop. Loaders use `even_batches` inside of it; None changes nothing.
        """
        if self.context.process.world_size > 1:
            warnings.warn(
                "Joining uneven inputs is only supported for multi-GPU and multi-CPU runs of DistributedDataParallel "
                "models. Nothing is joined: a process that runs out of batches leaves the others waiting.",
                UserWarning,
                stacklevel=4,
            )
        return _NOTHING

    # ------------------------------------------------------------------ checkpoints

    def collect(self, part: Part, item: Any) -> Any:
        """The state of one object for a checkpoint; its tensors may be the living ones.

        Called on every process before anything is written, in the order of `Traits.save_order`.
        """
        return self.state_dict(item) if part is Part.MODEL else item.state_dict()

    def save(self, part: Part, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        """Write what `collect` returned under the file names of `checkpoint.files`.

        Called in the order of `Traits.save_order`, on the processes that write files, or on every one with
        `Traits.collective_save`. The folder exists and is not the checkpoint yet; the caller makes it durable. `index`
        counts within the part.
        """
        from accel_plugins.checkpoint import parts

        parts.write_part(part, state, folder, index, safe_serialization=safe_serialization)

    def load(self, part: Part, item: Any, folder: Path, index: int, **options: Any) -> None:
        """Read into an object what `save` wrote for it. Called on every process, in the order of `Traits.load_order`.

        `options` for models go to `Module.load_state_dict`; `map_location` says for all where tensors are read to.
        """
        from accel_plugins.checkpoint import parts

        target = self.unwrap(item) if part is Part.MODEL else item
        parts.read_part(part, target, folder, index, **options)

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        """All weights of a model under the names of the user's model. Called on every process."""
        from accel_plugins.checkpoint import parts

        return parts.plain_state_dict(self.unwrap(model))

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        """Put weights under the names of the user's model into a prepared one. Called on every process."""
        self.unwrap(model).load_state_dict(weights, strict=strict)

    def extra_state(self) -> Mapping[str, Any]:
        """What a resumed run needs beside models, optimizers and schedulers: this process's own state, by name.

        Called on every process when a checkpoint is saved. All processes give the same names; values are tensors,
        numbers, texts, and lists and dicts of these.
        """
        return {}

    @property
    def keeps_extra_state(self) -> bool:
        """Whether this strategy has an `extra_state` of its own."""
        return type(self).extra_state is not Strategy.extra_state

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `extra_state` gave on this process.

        Called on every process after models, optimizers and schedulers are loaded, unless the state was empty.
        """

    def writes_weights(self) -> bool:
        """Whether `state_dict` gives this process complete weights to write."""
        return True

    def gradients(self, model: Module) -> dict[str, Tensor]:
        """Complete gradients of a model under the names of the user's model, of those parameters that have one.

        Called on every process, by whoever looks at gradients; never on the way of training. None has one outside of
        `on_gradients` where an engine steps within `backward`.
        """
        from accel_plugins.parameters import canonical_name

        return {
            canonical_name(name): _complete(parameter.grad)
            for name, parameter in self.unwrap(model).named_parameters()
            if parameter.grad is not None
        }

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        """Keep nothing of models and optimizers that `setup` returned, so that their memory can be given back.

        Called by `free_memory` with what one Accelerator prepared; nothing is asked about these objects afterwards.
        Others are still used, and further ones may be prepared.
        """

    def close(self) -> None:
        """Give back what the strategy opened.

        Called once: by `end_training` of the last Accelerator of the run, or else when the run or the process ends.
        Nothing is trained afterwards. Models may still be read, by `unwrap`, `state_dict` and `save`.
        """


def _complete(tensor: Tensor) -> Tensor:
    """A tensor that may be spread over processes, put together."""
    complete: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return complete.detach()


@contextmanager
def _build_on_device(device: torch.device, *, empty: bool = False) -> Iterator[None]:
    """Models made inside, by this thread, have their parameters on the device.

    Args:
        device: where parameters go as they are registered.
        empty: initialise nothing: functions of `torch.nn.init` do nothing, and parameters have arbitrary values.
    """
    from accel_bigmodel.meta import init_on_device

    with init_on_device(device), _WithoutInitialisation() if empty else nullcontext():
        yield


class _WithoutInitialisation(TorchFunctionMode):
    """Lets functions of `torch.nn.init` return their tensor unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
