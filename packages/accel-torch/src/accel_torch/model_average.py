"""`ModelAverage`: an exponential moving average of a prepared model, in shards as the model is.

A process averages the part of each parameter that it trains, so an update calls no collective. For an evaluation and in
a checkpoint the averages take the place of the weights, so every backend evaluates and writes them as it does the
model.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_plugins.checkpoint.files import average_name
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import ObjectKind
from accel_plugins.parameters import canonical_name
from accel_plugins.prepared import add_hook
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import CheckpointError, Conflict, NotOffered, NotReady, SettingError
from accel_state.settings.integers import as_int
from accel_torch.hooks import Hook
from accel_torch.start_run import open_sessions

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_torch.session import Session

__all__ = ("ModelAverage",)

_logger: Final = logging.getLogger(__name__)

_COUNTS: Final = "counts.json"

_last: Final[weakref.WeakKeyDictionary[Session, int]] = weakref.WeakKeyDictionary()
"""The index of the newest average of each session."""


class ModelAverage:
    """An exponential moving average of the weights of a prepared model.

    An update computes `average = decay * average + (1 - decay) * weight` for every parameter that trains, and copies
    the buffers; the first update copies the weights. It follows each step: once all prepared optimizers with parameters
    of the model have stepped, unless all of them skipped the step. Each process averages its own shards, without
    communication. `save_state` and `load_state` save and restore the average, also on another number of processes.

    Args:
        model: a model that `prepare` returned.
        decay: the weight of the old average, from 0 to 1.
        every: optimizer steps from one update to the next.
        start: optimizer steps before the first interval; step `start + every` makes the first update.
        device: the device of the averages; None: that of the parameters.
        automatic: False: only `update` updates the average.

    Attributes:
        decay: the weight of the old average; may be changed between steps.
        steps: the number of optimizer steps so far.
        updates: the number of updates so far.

    Raises:
        SettingError: a value is out of range.
        NotReady: the model was not prepared.
        NotOffered: the backend's engine makes the steps and has the weights.

    Example:
        >>> average = ModelAverage(model, decay=0.99)
        >>> for inputs, targets in loader:
        ...     accelerator.backward(loss_function(model(inputs), targets))
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> with average.applied():
        ...     accelerator.save_model(model, "averaged")
    """

    def __init__(
        self,
        model: Module,
        decay: float = 0.999,
        *,
        every: int = 1,
        start: int = 0,
        device: torch.device | str | None = None,
        automatic: bool = True,
    ) -> None:
        _check(decay, every, start)
        session = _session_of(model)
        if session is None:
            raise NotReady(
                f"Cannot average {type(model).__name__}.",
                "No Accelerator of this process has prepared this model.",
                "Pass the model that prepare() returned, and create the average after prepare().",
            )
        if session.backend.capabilities.own_precision:
            raise NotOffered(
                f"Cannot average a model of the backend {session.backend.name!r}.",
                "Its engine makes the steps itself, and keeps the weights that it trains apart from the model's.",
                "Use another backend, or average the weights of saved checkpoints.",
            )
        self.decay, self.steps, self.updates = decay, 0, 0
        self._every, self._start, self._automatic = every, start, automatic
        self._device = None if device is None else torch.device(device)
        self._session, self._model = weakref.ref(session), weakref.ref(strategy_model(model))
        self._averages: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._is_applied = False
        self._saved_buffers: frozenset[str] | None = None
        self._known_groups: list[tuple[int, int]] = []
        self._holders: list[weakref.ref[Optimizer]] = []
        self._stepped: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._index = _last[session] = _last.get(session, -1) + 1
        self._enter(session)

    def _enter(self, session: Session) -> None:
        """Follow the steps and saves of the session, which does not keep the average alive."""
        referred = weakref.ref(self)
        hook = _FollowSteps(self)
        session.hooks.enter(hook)

        def save(models: Any, weights: Any, folder: str) -> None:
            if (average := referred()) is not None:
                average.write_into(Path(folder))

        def load(models: Any, folder: str) -> None:
            if (average := referred()) is not None:
                average.read_from(Path(folder))

        handles = [add_hook(session.prepared.save_hooks, save), add_hook(session.prepared.load_hooks, load)]
        weakref.finalize(self, _leave, self._session, hook, handles)

    # ------------------------------------------------------------------ updates

    def update(self) -> None:
        """Count an optimizer step, and update the average if one is due; for `automatic=False`.

        Raises:
            Conflict: the average follows the steps itself.
            NotReady: the model is not in use any more, or has the averaged weights.
        """
        if self._automatic:
            raise Conflict(
                "Cannot call ModelAverage.update().",
                "The average follows the optimizer steps itself, and would count this step twice.",
                "Remove the call, or create it with automatic=False.",
            )
        self.demand_training_weights("update the average")
        self._count()

    def optimizer_stepped(self, optimizer: Optimizer, stepped: Any) -> None:
        """Update the average if all optimizers of the model have stepped; called after each step of an optimizer."""
        session, model = self._session(), self._model()
        if not self._automatic or session is None or model is None:
            return
        holders = self._holders_of(model, [inner_optimizer(one) for one in session.prepared.optimizers])
        if optimizer not in holders:
            return
        self._stepped[optimizer] = self._stepped.get(optimizer, False) or bool(stepped)
        if all(holder in self._stepped for holder in holders):
            some = any(self._stepped.values())
            self._stepped.clear()
            if some:
                self._count()

    def _holders_of(self, model: Module, optimizers: list[Optimizer]) -> list[Optimizer]:
        """The optimizers with parameters of the model; searched again when an optimizer or a group was added."""
        groups = [(id(one), len(one.param_groups)) for one in optimizers]
        if groups != self._known_groups:
            own = {id(parameter) for parameter in model.parameters()}
            self._known_groups = groups
            self._holders = [weakref.ref(one) for one in optimizers if _has_some(one, own)]
        return [one for referred in self._holders if (one := referred()) is not None]

    def demand_training_weights(self, what: str) -> None:
        """Raise while the model has the averaged weights.

        Args:
            what: what is attempted, for the error.

        Raises:
            NotReady: inside `applied`.
        """
        if self._is_applied:
            raise NotReady(
                f"Cannot {what} inside ModelAverage.applied().",
                "The model has the averaged weights there, and gets back its own at the end of the block.",
                "Do it outside of the block.",
            )

    def _count(self) -> None:
        self.steps += 1
        since = self.steps - self._start
        if since > 0 and since % self._every == 0:
            self._blend()
            self.updates += 1

    @torch.no_grad()
    def _blend(self) -> None:
        parameters, buffers = self._tensors()
        if not self.updates:
            _warn_of_short_dtypes(parameters, self.decay)
        alike: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, value in parameters.items():
            average = self._averages.get(name)
            if average is None:
                self._averages[name] = value.to(self._device, copy=True)
            elif not value.is_floating_point() and not value.is_complex():
                average.copy_(value)
            elif average.device == value.device:
                alike[0].append(average)
                alike[1].append(value)
            else:
                average.lerp_(value.to(average.device), 1 - self.decay)
        if alike[0]:
            torch._foreach_lerp_(*alike, 1 - self.decay)  # pyright: ignore[reportPrivateImportUsage]
        self._buffers = {name: value.to(self._device, copy=True) for name, value in buffers.items()}

    @torch.no_grad()
    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By name, this process's parts of the parameters that train, or once did, and the buffers that are saved."""
        session, model = self._session(), self._model()
        if session is None or model is None:
            raise NotReady(
                "Cannot use a ModelAverage.",
                "Its model or its Accelerator is not in use any more.",
                "Keep both, and create a new average after free_memory().",
            )
        session.strategy.reshard(model)
        inner = session.strategy.unwrap(model)
        parameters = {
            name: _local(parameter)
            for original, parameter in inner.named_parameters()
            if (name := canonical_name(original)) in self._averages or parameter.requires_grad
        }
        if self._saved_buffers is None:
            some = next(inner.buffers(), None) is not None
            self._saved_buffers = frozenset(inner.state_dict()) if some else frozenset()
        buffers = {canonical_name(name): one for name, one in inner.named_buffers() if name in self._saved_buffers}
        return parameters, buffers

    # ------------------------------------------------------------------ evaluation

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Block in which the model has the averaged weights, to be evaluated or exported; enter it on every process.

        At its end the model gets back its own weights, bit for bit. Before the first update the model keeps its own.
        Optimizer steps and `save_state` are errors inside the block.

        Raises:
            NotReady: the model is not in use any more.

        Example:
            >>> with average.applied():
            ...     accuracy = evaluate(model)
        """
        if self._is_applied or not self.updates:
            yield
            return
        replaced = self._exchange({**self._averages, **self._buffers})
        self._is_applied = True
        try:
            yield
        finally:
            self._exchange(replaced)
            self._is_applied = False

    @torch.no_grad()
    def _exchange(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write values into the model by name, and return those that it had."""
        parameters, buffers = self._tensors()
        replaced: dict[str, Tensor] = {}
        for name, own in {**parameters, **buffers}.items():
            if name in values:
                replaced[name] = own.detach().to(self._device, copy=True)
                own.copy_(values[name])
        return replaced

    # ------------------------------------------------------------------ checkpoints

    def write_into(self, folder: Path) -> None:
        """Write the average into a checkpoint, as the backend writes a model; called on every process."""
        self.demand_training_weights("save a checkpoint")
        session, model = self._session(), self._model()
        if session is None or model is None:
            return
        target, strategy = folder / average_name(self._index), session.strategy
        topology = session.process.topology
        writes = topology.is_local_main if session.options.project.save_on_each_node else topology.rank == 0
        target.mkdir(exist_ok=True)
        if writes:
            (target / _COUNTS).write_text(json.dumps({"steps": self.steps, "updates": self.updates}))
        if not self.updates:
            return
        index = session.prepared.for_strategy(ObjectKind.MODEL).index(model)
        with self.applied():
            state = strategy.collect(ObjectKind.MODEL, model)
            if writes or strategy.capabilities.collective_save:
                strategy.save(ObjectKind.MODEL, state, target, index)

    def read_from(self, folder: Path) -> None:
        """Read the average from a checkpoint; called on every process before the model is read."""
        self.demand_training_weights("load a checkpoint")
        session, model = self._session(), self._model()
        if session is None or model is None:
            return
        source = folder / average_name(self._index)
        try:
            counts = json.loads((source / _COUNTS).read_text())
            self.steps, self.updates = int(counts["steps"]), int(counts["updates"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"Cannot load a ModelAverage from {folder}.",
                f"It cannot be read from {source.name}: {error}",
                "Create the averages that the run had when it was saved, or create a new one after load_state().",
            ) from error
        self._stepped.clear()
        self._averages.clear()
        if not self.updates:
            return
        index = session.prepared.for_strategy(ObjectKind.MODEL).index(model)
        own = self._copies()
        session.strategy.load(ObjectKind.MODEL, model, source, index, map_location="cpu")
        loaded = self._copies()
        self._averages, self._buffers = loaded
        self._exchange({**own[0], **own[1]})

    def keep(self) -> Callable[[], None]:
        """Copy the average to host memory; the returned function puts it back."""
        counts, stepped = (self.steps, self.updates), dict(self._stepped)
        copies = [{name: value.to("cpu", copy=True) for name, value in one.items()} for one in self._own()]

        def put_back() -> None:
            self.steps, self.updates = counts
            self._stepped.clear()
            self._stepped.update(stepped)
            for own, kept in zip(self._own(), copies, strict=True):
                for name in [name for name in own if name not in kept]:
                    del own[name]
                for name, value in kept.items():
                    own[name].copy_(value)

        return put_back

    def _own(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self._averages, self._buffers

    def _copies(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the parameters and buffers of the model."""
        parameters, buffers = (
            {name: value.detach().to(self._device, copy=True) for name, value in tensors.items()}
            for tensors in self._tensors()
        )
        return parameters, buffers


class _FollowSteps(Hook):
    """Tells an average of the steps of optimizers; it does not keep the average alive."""

    def __init__(self, average: ModelAverage) -> None:
        self._average = weakref.ref(average)

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step of averaged weights."""
        if (average := self._average()) is not None:
            average.demand_training_weights("step an optimizer")

    def after_step(self, optimizer: Optimizer, stepped: Any) -> None:
        """Pass the step on."""
        if (average := self._average()) is not None:
            average.optimizer_stepped(optimizer, stepped)

    def keep_state(self) -> Callable[[], None]:
        """Keep the average in a snapshot of the run."""
        average = self._average()
        return _nothing if average is None else average.keep()


def _nothing() -> None:
    """Put nothing back."""


def _leave(session: weakref.ref[Session], hook: Hook, handles: list[Any]) -> None:
    """Call an average no more, when it is not in use any more."""
    for handle in handles:
        handle.remove()
    if (alive := session()) is not None:
        alive.hooks.leave(hook)


def _session_of(model: Module) -> Session | None:
    """The session that prepared a model, given the prepared model or the user's model inside it."""
    wanted = strategy_model(model)
    for session in open_sessions():
        unwrap = session.strategy.unwrap
        if any(one is wanted or unwrap(one) is wanted for one in session.prepared.for_strategy(ObjectKind.MODEL)):
            return session
    return None


def _local(parameter: Any) -> Tensor:
    """This process's part of a parameter, where gradients are off; writing into it changes the parameter."""
    # Detaching a DTensor first would take ten times as long.
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
    return local


def _has_some(optimizer: Optimizer, parameters: set[int]) -> bool:
    """Whether an optimizer has some of these parameters, given by id."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def _check(decay: float, every: int, start: int) -> None:
    numbers = {"every": (every, 1), "start": (start, 0)}
    wrong = [f"{name}={value!r}" for name, (value, least) in numbers.items() if (as_int(value) or 0) < least]
    if not (isinstance(decay, (int, float)) and 0 <= decay <= 1):
        wrong.append(f"decay={decay!r}")
    if wrong:
        raise SettingError(
            f"Cannot create a ModelAverage with {', '.join(wrong)}.",
            "decay must be a number from 0 to 1, every an int of at least 1, and start an int of at least 0.",
            "Give for example ModelAverage(model, decay=0.999, every=1, start=0).",
        )


def _warn_of_short_dtypes(parameters: dict[str, Tensor], decay: float) -> None:
    """Warn if the dtype of a parameter is too coarse for the share of a new weight, which is then rounded away."""
    for name, value in parameters.items():
        if value.is_floating_point() and 0 < 1 - decay < torch.finfo(value.dtype).eps:
            _logger.warning(
                "ModelAverage: %s is %s, which cannot represent most changes by a share of %g: the average hardly "
                "moves. Train weights in fp32 (mixed_precision='bf16' keeps them so), or use a smaller decay.",
                name,
                value.dtype,
                1 - decay,
            )
            return
