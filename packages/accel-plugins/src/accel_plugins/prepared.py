"""The registry of prepared objects and of the other objects in a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch.nn import Module

from accel_plugins.bundle import Bundle, ObjectsByKind
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import ObjectKind
from accel_state.errors import SettingError
from accel_state.labels import PREPARED

__all__ = ("PreparedObjects", "Stateful", "add_hook", "as_set_up")


class Stateful(Protocol):
    """An object with a state that can be saved: a precision, or any object that a script registers."""

    def state_dict(self) -> dict[str, Any]:
        """Return a state that `load_state_dict` of an equal object accepts."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what `state_dict` returned."""


class PreparedObjects(ObjectsByKind):
    """Prepared objects by kind, in the order of preparation, and the other objects of a checkpoint.

    Args:
        models, optimizers, schedulers: the objects that `prepare` returned.
        loaders: the data loaders; a checkpoint contains their positions.
        scaler: the object that has the loss scale, such as the precision; a checkpoint omits it when its state is
            empty.
        custom: objects registered for checkpoints.

    Attributes:
        engine: the backend's engine, if one was assigned.
        guard: the guard of steps, whose history is in a checkpoint; None without one.
        steps_in_backward: whether one of the optimizers updates parameters during backward, as LOMO does.
        save_hooks, load_hooks: called before a checkpoint is written or read.
    """

    def __init__(
        self,
        models: Iterable[Any] = (),
        optimizers: Iterable[Any] = (),
        schedulers: Iterable[Any] = (),
        loaders: Iterable[Any] = (),
        scaler: Stateful | None = None,
        custom: Iterable[Any] = (),
    ) -> None:
        super().__init__()
        self.models += models
        self.optimizers += optimizers
        self.schedulers += schedulers
        self.loaders += loaders
        self.scaler = scaler
        self.custom = list(custom)
        self.engine: Any = None
        self.guard: Stateful | None = None
        self.steps_in_backward = False
        self._evaluated: list[tuple[int, Any]] = []
        # RemovableHandle needs a weak reference, which a plain dict does not support.
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def remember(self, bundle: Bundle) -> None:
        """Add the objects of a `prepare` call."""
        for kind in (ObjectKind.MODEL, ObjectKind.OPTIMIZER, ObjectKind.SCHEDULER, ObjectKind.LOADER):
            for item in bundle.of_kind(kind):
                if hasattr(item, "__dict__"):
                    setattr(item, PREPARED, True)
                self.of_kind(kind).append(item)
        trained = {id(parameter) for model in bundle.models for parameter in model.parameters()}
        self._evaluated = [
            (place, model)
            for place, model in self._evaluated
            if not any(id(parameter) in trained for parameter in model.parameters())
        ]
        self.steps_in_backward = any(getattr(one, "steps_in_backward", False) for one in self.optimizers)

    def remember_evaluated(self, model: Any) -> None:
        """Add a model that is only evaluated; one with parameters of a known model is the same one."""
        identities = {id(parameter) for one in self.all_models for parameter in one.parameters()}
        if not any(id(parameter) in identities for parameter in model.parameters()):
            self._evaluated.append((len(self.models), model))

    @property
    def all_models(self) -> list[Any]:
        """The models of a checkpoint: trained ones and those that are only evaluated, in the order of preparation."""
        merged = list(self.models)
        for added, (place, model) in enumerate(self._evaluated):
            merged.insert(place + added, model)
        return merged

    def is_evaluated(self, model: Any) -> bool:
        """Whether a model is only evaluated, so that the strategy does not know it."""
        return any(one is model for _, one in self._evaluated)

    def for_strategy(self, kind: ObjectKind) -> list[Any]:
        """The objects of one kind as a strategy's methods receive them: those that its `setup` returned."""
        return [as_set_up(item) for item in self.of_kind(kind)]

    def unwrapped_models(self, unwrap: Callable[[Module], Module]) -> list[Module]:
        """The user's models, with the user's parameter names; `unwrap` is the strategy's method."""
        return [unwrap(strategy_model(model)) for model in self.models]

    def register(self, objects: Iterable[Any]) -> None:
        """Register objects; every checkpoint contains their state.

        Raises:
            SettingError: some of them have no `state_dict` and `load_state_dict`.
        """
        listed = list(objects)
        without = [
            f"Item at index {index} is a {type(item).__name__}."
            for index, item in enumerate(listed)
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))
        ]
        if without:
            raise SettingError(
                "Cannot register objects without the methods `state_dict()` and `load_state_dict(state)`.",
                " ".join(without),
                "Add these methods, or save the objects yourself.",
            )
        self.custom.extend(listed)

    def only_model(self) -> Module | None:
        """The strategy's model, if exactly one was prepared; otherwise None."""
        return strategy_model(self.models[0]) if len(self.models) == 1 else None

    def parameter_name(self, tensor: Any) -> str | None:
        """The name of a parameter in its prepared model, or None."""
        named = (pair for model in self.models for pair in model.named_parameters())
        return next((str(name) for name, parameter in named if parameter is tensor), None)

    def clear(self) -> None:
        """Remove all objects, so that their memory can be freed."""
        for kept in (self.models, self.optimizers, self.schedulers, self.loaders, self.custom):
            kept.clear()
        self._evaluated.clear()
        self.engine, self.steps_in_backward = None, False


def as_set_up(item: Any) -> Any:
    """What the strategy's `setup` returned for an object that `prepare` returned; methods of a strategy receive this.

    Transforms add layers around a model, and `prepare` wraps optimizers and schedulers that the strategy left as they
    were. Wrappers of an engine are subclasses, and were returned by its strategy.
    """
    if isinstance(item, Module):
        return strategy_model(item)
    return getattr(item, "as_set_up", item)


def add_hook(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> Any:
    """Add a hook; the returned handle removes it."""
    from torch.utils.hooks import RemovableHandle

    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
