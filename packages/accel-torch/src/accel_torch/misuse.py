"""Detects mistakes in a training loop that raise no error but change the training, at the first optimizer steps.

Each mistake is a warning with a remedy, shown once; a mistake that prevents any training is an error. A guard observes
the first steps with hooks of the session, torch's optimizer hooks and forward hooks on prepared models. It removes them
after two steps of an optimizer, so later steps cost nothing.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import CO_OPTIMIZED
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_plugins.layers import prepared_models, strategy_model
from accel_plugins.manifest import Axis
from accel_plugins.mesh import submesh
from accel_state.errors import Conflict
from accel_state.library import is_library, stack_level
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.prepared import PreparedObjects
    from accel_plugins.strategy import Strategy
    from accel_state.gradient import GradientState
    from accel_torch.hooks import Hooks
    from accel_torch.replicas import ReplicaComparison
    from accel_torch.session import Session

__all__ = ("MisuseGuard", "MisuseWarning", "guard_first_steps")

_STEPS: Final = 2
"""Steps of an optimizer that the guard checks."""

_MOST_STEPS: Final = 100
"""Steps of all optimizers after which the guard removes itself in any case."""


_LEVELS: Final = 4
_MOST_ITEMS: Final = 100
_MOST_OBJECTS: Final = 20_000
"""Limits of a search for schedulers and wrapped models: its depth, the items of one list or dict, and all objects."""


class MisuseWarning(UserWarning):
    """A mistake in the training loop changes what is trained, or makes it slower."""


_spent: list[Any] = []
"""Hooks of finished guards, removed between steps because torch iterates over them during one."""


def _remove_spent() -> None:
    while _spent:
        _spent.pop().remove()


class MisuseGuard(Hook):
    """Checks the first optimizer steps of an Accelerator for mistakes.

    Args:
        gradient: the gradient state.
        strategy: the strategy of the run.
        prepared: the prepared objects; weakly referenced.
        hooks: the hooks of the session, which the guard leaves when it is done; weakly referenced.
        comparison: compares replicas after the second step, or None.
    """

    def __init__(
        self,
        gradient: GradientState,
        strategy: Strategy,
        prepared: PreparedObjects,
        hooks: Hooks,
        comparison: ReplicaComparison | None = None,
    ) -> None:
        self.backward_ran = False
        capabilities = strategy.capabilities
        self._gradient, self._strategy = gradient, strategy
        self._prepared, self._hooks = weakref.ref(prepared), weakref.ref(hooks)
        self._comparison = comparison
        self._several = strategy.context.process.world_size > 1
        self._scaler = None if capabilities.own_precision else strategy.context.precision.scaler
        self._counts_backward = not capabilities.own_accumulation
        self._models: list[_PreparedModel] = []
        self._replaced: dict[int, weakref.ref[Parameter]] = {}
        self._steps: dict[int, int] = {}
        self._all_steps = 0
        self._stepping: Optimizer | None = None
        self._schedulers: list[tuple[weakref.ref[Any], Any]] | None = None
        self._between = False
        self._watches_steps = False
        self._independent = not (self._several and self._counts_backward and _trains_on_different_data(strategy))
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        self._step_hooks: list[Any] = []
        self._unprepared: list[weakref.ref[Module]] = []
        self._before: list[weakref.ref[Parameter]] = []
        self.active = True

    # ------------------------------------------------------------------ called by the session

    def before_prepare(self, session: Any, bundle: Bundle) -> None:
        """Note the caller's models and their parameters."""
        self._unprepared = [weakref.ref(model) for model in bundle.models]
        self._before = [weakref.ref(parameter) for model in bundle.models for parameter in model.parameters()]

    def after_prepare(self, session: Any, bundle: Bundle) -> None:
        """Record the prepared models, and which parameters they replaced."""
        if not self.active:
            return
        now = {id(parameter) for model in bundle.models for parameter in model.parameters()}
        alive = [old for reference in self._before if (old := reference()) is not None]
        self._replaced |= {id(old): weakref.ref(old) for old in alive if id(old) not in now}
        through_own = self._strategy.capabilities.syncs_in_own_forward and self._several
        for model, own in zip(self._unprepared, bundle.models, strict=True):
            prepared = _PreparedModel(own, through_own and own is not model())
            self._models.append(prepared)
            if self._several:
                self._handles.append(own.register_forward_pre_hook(_NoteForward(self, prepared), with_kwargs=True))
        if bundle.models:
            self.watch_steps()

    def watch_steps(self) -> None:
        """Watch the steps of all optimizers; several processes may train models that were never prepared."""
        if not self._watches_steps:
            self._watches_steps = True
            mine = weakref.ref(self)
            _remove_spent()
            self._step_hooks = [
                register_optimizer_step_pre_hook(_calling(mine, MisuseGuard._before_step)),
                register_optimizer_step_post_hook(_calling(mine, MisuseGuard._after_step)),
            ]
            weakref.finalize(self, _spent.extend, self._step_hooks)

    def before_backward(self, loss: Any) -> None:
        """Note a backward pass of the Accelerator, which scales the loss."""
        self.backward_ran = True

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that a prepared optimizer steps.

        Raises:
            Conflict: the gradient scaler has never scaled a loss.
        """
        self._check_scaler(optimizer)
        self._stepping = optimizer

    def after_step(self, optimizer: Optimizer, stepped: Any) -> None:
        """Note the end of the step, and leave when the guard is done."""
        self._stepping = None
        if not self.active:
            self._leave()

    def begin_micro_batch(self, models: Sequence[Module]) -> None:
        """Detect what is not a model, and a scheduler that stepped between two micro-batches of one window."""
        if not self.active:
            self._leave()
            return
        if self._gradient.num_steps == 1:
            return
        self._check_accumulated(models)
        self.backward_ran = self.backward_ran and self._between
        if self._schedulers is None:
            self._schedulers = self._unprepared_schedulers()
        moved = False
        for index, (reference, before) in enumerate(self._schedulers):
            scheduler = reference()
            epoch = getattr(scheduler, "last_epoch", None)
            moved = moved or (scheduler is not None and epoch != before)
            self._schedulers[index] = (reference, epoch)
        if moved and self._between:
            self._warn(
                "scheduler",
                "A learning-rate scheduler steps within an accumulation window.",
                "It was not passed to prepare(), so it steps at every micro-batch instead of every optimizer step.",
                "Pass it to prepare() and step the one that prepare() returns.",
            )
        self._between = not self._gradient.sync_gradients

    def scaler_assigned(self, scaler: torch.amp.GradScaler | None) -> None:
        """Record the scaler."""
        self._scaler = scaler

    def replicas_separate(self) -> None:
        """Do not compare replicas, nor search for unsynchronised ones: they are trained independently on purpose."""
        self._comparison = None
        self._independent = True

    # ------------------------------------------------------------------ around a step

    def _before_step(self, optimizer: Optimizer) -> None:
        parameters = _parameters(optimizer)
        self._refuse_replaced(parameters)
        prepared = self._is_prepared(optimizer)
        # What a prepared optimizer steps inside may be copies of its parameters.
        if prepared or (self.backward_ran and self._stepping is None):
            self._check_membership(parameters)
        if not (prepared or self._knows(parameters)):
            return
        if not any(one is optimizer for one in _layers(self._stepping)):
            self._check_direct_step(optimizer, prepared)
        elif self._lacks_backward() and any(parameter.grad is not None for parameter in parameters):
            self._warn(
                "backward",
                "The optimizer steps with gradients that accelerator.backward() did not compute.",
                f"loss.backward() does not divide the loss by the {self._gradient.num_steps} micro-batches of an "
                "accumulation window.",
                "Call accelerator.backward(loss).",
            )
        self._check_forward(parameters)

    def _check_scaler(self, optimizer: Optimizer) -> None:
        if self._scaler is None or not self._scaler.is_enabled() or self.backward_ran:
            return
        scale = self._scaler._scale  # noqa: SLF001 - torch has no public way to ask whether a loss was scaled
        if scale is None and any(one.grad is not None for one in _parameters(optimizer)):
            raise Conflict(
                "Cannot step an optimizer with mixed_precision='fp16'.",
                "Its gradients come from loss.backward(): the loss was not scaled, so small gradients became zero.",
                "Call accelerator.backward(loss) instead of loss.backward().",
            )

    def _after_step(self, optimizer: Optimizer) -> None:
        self._all_steps += 1
        counts = self._is_prepared(optimizer) or self._knows(_parameters(optimizer))
        if counts and self._gradient.sync_gradients:
            steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
            if steps == _STEPS and self._comparison is not None:
                inputs = [digest for model in self._models for digest in model.inputs]
                self._comparison.after_step(optimizer, self._number(optimizer), inputs)
        if self._all_steps >= _MOST_STEPS or min(self._steps.values(), default=0) >= _STEPS:
            self._retire()

    def _retire(self) -> None:
        """Remove what torch calls; the session's hooks are left at the end of the step."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _spent.extend(self._step_hooks)
        self._models.clear()

    def _leave(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.leave(self)
        _remove_spent()

    # ------------------------------------------------------------------ what is looked for

    def _refuse_replaced(self, parameters: Sequence[Parameter]) -> None:
        if any(parameter.grad is not None for parameter in parameters):
            return
        for parameter in parameters:
            original = self._replaced.get(id(parameter))
            if original is not None and original() is parameter:
                raise Conflict(
                    "Cannot step an optimizer.",
                    "prepare() replaced the parameters of the model, and this optimizer still has the old ones, which "
                    "get no gradients.",
                    "Pass the optimizer to prepare() together with its model, or create it from the parameters of the "
                    "model that prepare() returned.",
                )

    def _check_accumulated(self, models: Sequence[object]) -> None:
        """Detect an argument of `accumulate` that is not a model; the original accepts it, so scripts go on."""
        others = [type(one).__name__ for one in models if not callable(one)]
        if others:
            self._warn(
                "accumulated",
                f"accelerator.accumulate() was called with {others[0]}, which is not a model.",
                "It has no effect there: gradients of the model are sent between processes at every micro-batch.",
                "Pass the models that prepare() returned: accumulate(model).",
            )

    def _check_direct_step(self, optimizer: Optimizer, prepared: bool) -> None:
        """Detect a step of an unprepared optimizer, if that matters."""
        remedy = "Step the optimizer that prepare() returned." if prepared else "Pass the optimizer to prepare()."
        what = "The optimizer that was passed to prepare()" if prepared else "An optimizer that was not prepared"
        if self._counts_backward and not self._gradient.sync_gradients:
            self._warn(
                "optimizer",
                f"{what} steps within an accumulation window.",
                "So it steps at every micro-batch, with incomplete gradients.",
                remedy,
            )
        scaler = self._scaler
        if scaler is not None and scaler.is_enabled() and self.backward_ran:
            stage = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {}).get("stage")
            if stage is None or stage.name == "READY":
                self._warn(
                    "scaled",
                    f"{what} steps with gradients that are scaled for fp16.",
                    "Only a prepared optimizer divides them by the loss scale.",
                    remedy,
                )

    def _check_forward(self, parameters: Sequence[Parameter]) -> None:
        """Detect gradients of a model whose prepared version was never called."""
        own = {id(parameter) for parameter in parameters if parameter.grad is not None}
        for prepared in self._models:
            model = prepared.model()
            if prepared.forwards or not prepared.synchronises or model is None:
                continue
            if any(id(parameter) in own for parameter in model.parameters()):
                self._warn(
                    "forward",
                    f"An optimizer steps with gradients of {type(prepared.inner(self._strategy)).__name__}, but the "
                    "model that prepare() returned was never called.",
                    "Gradients are averaged over processes only after a forward of that model.",
                    "Write `model = accelerator.prepare(model)` and call this model.",
                )

    def _check_membership(self, parameters: Sequence[Parameter]) -> None:
        """Detect gradients of parameters in no prepared model, which no process averages with the others."""
        if self._independent or "membership" in self._warned:
            return
        # An optimizer of plain tensors, such as inputs that an attack changes, trains no model.
        trained = [one for one in parameters if one.grad is not None and isinstance(one, torch.nn.Parameter)]
        if all(any(prepared.has_any([parameter]) for prepared in self._models) for parameter in trained):
            return
        # The models of other Accelerators and of an unpickled one, and parameters that were added later.
        own = self._prepared()
        models = [*prepared_models(), *([] if own is None else own.models)]
        synchronised = {id(parameter) for model in models for parameter in model.parameters()}
        # Whoever shards a parameter synchronises its gradient.
        outside = [one for one in trained if id(one) not in synchronised and not hasattr(one, "placements")]
        if outside:
            wrapped = {id(parameter) for model in _wrapped_by_script() for parameter in model.parameters()}
            outside = [one for one in outside if id(one) not in wrapped]
        if outside:
            self._comparison = None
            shape = tuple(outside[0].shape)
            self._warn(
                "membership",
                f"An optimizer steps with gradients of a model that was not prepared: {len(outside)} of {len(trained)} "
                f"parameters with gradients, the first of shape {shape}, belong to no model that prepare() returned.",
                "Unless the script averages their gradients itself, each process trains different weights.",
                "Pass the model to prepare() (evaluation_mode=True is not for training), and call the one that it "
                "returns.",
            )

    def _lacks_backward(self) -> bool:
        """Whether `Accelerator.backward`, which divides the loss, was not called in this window."""
        return self._counts_backward and not self.backward_ran and self._gradient.num_steps > 1

    def _unprepared_schedulers(self) -> list[tuple[weakref.ref[Any], Any]]:
        prepared = self._prepared()
        if prepared is None:
            return []
        prepared_ids = {id(getattr(wrapped, "scheduler", wrapped)) for wrapped in prepared.schedulers}
        followed = {id(one): one for wrapped in prepared.optimizers for one in _layers(wrapped)}
        # torch marks the optimizer of a scheduler, but it has no reference to the scheduler.
        if not any(hasattr(getattr(one, "step", None), "_wrapped_by_lr_sched") for one in followed.values()):
            return []
        return [
            (weakref.ref(scheduler), getattr(scheduler, "last_epoch", None))
            for scheduler in _in_the_script()
            if issubclass(type(scheduler), LRScheduler)
            and id(getattr(scheduler, "optimizer", None)) in followed
            and id(scheduler) not in prepared_ids
        ]

    # ------------------------------------------------------------------ small questions

    def _knows(self, parameters: Sequence[Parameter]) -> bool:
        return any(prepared.has_any(parameters) for prepared in self._models)

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        prepared = self._prepared()
        wrapped = [] if prepared is None else prepared.optimizers
        return any(one is optimizer for outer in wrapped for one in _layers(outer))

    def _number(self, optimizer: Optimizer) -> int | None:
        prepared = self._prepared()
        wrapped = [] if prepared is None else prepared.optimizers
        return next((index for index, one in enumerate(wrapped) if getattr(one, "optimizer", None) is optimizer), None)

    def reads_prepared_loader(self) -> bool:
        """Whether a loop reads a prepared loader."""
        return self._gradient.active_dataloader is not None

    def _warn(self, kind: str, what: str, why: str, remedy: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{what} {why} {remedy}", MisuseWarning, stacklevel=stack_level())


def guard_first_steps(session: Session) -> None:
    """Check the first steps for mistakes; by default also compare replicas once. A repeated call does nothing."""
    if not session.guards_first_steps:
        return
    session.guards_first_steps = False
    several = session.strategy.context.process.world_size > 1
    comparison = None
    if session.options.check_replicas_every is None and several and session.backend.capabilities.equal_replicas:
        from accel_torch.replicas import ReplicaComparison

        comparison = ReplicaComparison(session.strategy, session.prepared)
    guard = MisuseGuard(session.gradient, session.strategy, session.prepared, session.hooks, comparison)
    session.hooks.enter(guard)
    if several:
        guard.watch_steps()


class _PreparedModel:
    """A model that `prepare` returned, and the calls of it.

    Args:
        model: the model.
        synchronises: whether backward averages gradients only after a forward of this model.
    """

    __slots__ = ("_parameters", "forwards", "inputs", "model", "synchronises")

    def __init__(self, model: Module, synchronises: bool) -> None:
        self.model = weakref.ref(model)
        self.synchronises = synchronises
        self.forwards = 0
        self.inputs: list[str] = []
        self._parameters = {id(parameter) for parameter in model.parameters()}

    def has_any(self, parameters: Sequence[Parameter]) -> bool:
        return any(id(parameter) in self._parameters for parameter in parameters)

    def inner(self, strategy: Strategy) -> Any:
        model = self.model()
        return None if model is None else strategy.unwrap(strategy_model(model))


class _NoteForward:
    """Counts the forward passes of a prepared model with gradients, and stores digests of the first inputs.

    Copied or unpickled models have a hook that does nothing.
    """

    def __init__(self, guard: MisuseGuard, prepared: _PreparedModel) -> None:
        self._guard = weakref.ref(guard)
        self._prepared = prepared

    def __call__(self, module: Module, args: Any, kwargs: Any) -> None:
        guard = self._guard()
        if torch.compiler.is_compiling() or guard is None or not torch.is_grad_enabled():
            return
        # A model in evaluation mode can be trained too.
        self._prepared.forwards += 1
        if module.training and len(self._prepared.inputs) < _STEPS and not guard.reads_prepared_loader():
            from accel_torch.replicas import digest_of

            self._prepared.inputs.append(digest_of((args, kwargs)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Nothing:
    """A forward hook that does nothing."""

    def __call__(self, module: Module, args: Any, kwargs: Any) -> None:
        return None


def _calling(reference: weakref.ref[MisuseGuard], method: Callable[[MisuseGuard, Optimizer], None]) -> Any:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        guard = reference()
        if guard is not None and guard.active:
            method(guard, optimizer)

    return hook


def _trains_on_different_data(strategy: Strategy) -> bool:
    """Whether any two processes compute different gradients: without a mesh, or along an axis other than `tp`."""
    mesh = strategy.context.mesh
    neighbours = submesh(mesh, Axis.TENSOR)
    return mesh is None or mesh.size() > (1 if neighbours is None else neighbours.size())


def _parameters(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _layers(optimizer: Any) -> Iterator[Any]:
    """An optimizer and the optimizers that it wraps: engines wrap the caller's optimizer."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _in_the_script() -> Iterator[object]:
    """The variables of the functions that are running, and what is in them, a few levels deep.

    A search of the heap would take seconds; this one ends after a fixed number of objects.
    """
    seen: dict[int, object] = {}
    level: Iterable[object] = _variables()
    for _ in range(_LEVELS):
        entered = list(islice((one for one in level if id(one) not in seen), _MOST_OBJECTS - len(seen)))
        new = {id(one): one for one in entered}
        yield from new.values()
        seen |= new
        level = chain.from_iterable(map(_contents, new.values()))


def _wrapped_by_script() -> list[Module]:
    """Models that the script itself has wrapped in torch's classes for training on several processes."""
    return [
        one
        for one in _in_the_script()
        if isinstance(one, torch.nn.Module)
        and type(one).__module__.startswith(("torch.nn.parallel.", "torch.distributed."))
    ]


def _variables() -> Iterator[object]:
    frame = sys._getframe(1)
    modules: set[int] = set()
    while frame.f_back is not None:
        frame = frame.f_back
        if is_library(frame.f_globals.get("__name__", "")):
            continue
        variables = frame.f_locals
        yield from list(variables.values())
        if frame.f_code.co_flags & CO_OPTIMIZED and isinstance(variables, dict):
            # Up to Python 3.12 the frame of a function keeps this copy, with all objects in it, until it returns.
            variables.clear()
        if id(frame.f_globals) not in modules:
            modules.add(id(frame.f_globals))
            yield from list(frame.f_globals.values())


def _contents(one: Any) -> list[object]:
    """The items of a list, tuple or dict, or the attributes of an object, but of no module or class.

    It runs no code of these objects, and copies before another thread can change them.
    """
    kind = type(one)
    if issubclass(kind, list):
        return list(islice(list.__iter__(one), _MOST_ITEMS))
    if issubclass(kind, tuple):
        return list(islice(tuple.__iter__(one), _MOST_ITEMS))
    if not issubclass(kind, dict):
        try:
            one = {} if issubclass(kind, (ModuleType, type)) else object.__getattribute__(one, "__dict__")
        except AttributeError:
            return []
    return list(islice(dict.values(one), _MOST_ITEMS))
