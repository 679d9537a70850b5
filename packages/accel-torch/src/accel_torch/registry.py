"""What went through `prepare`, and what was registered for checkpoints; the one place that remembers it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from accel_plugins.bundle import Bundle
from accel_plugins.layers import strategy_model
from accel_state.errors import UnknownKind
from accel_state.labels import PREPARED

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = ("Registry",)


class Registry:
    """Prepared objects by kind, in the order in which they were prepared.

    Attributes:
        models, optimizers, schedulers, loaders: what went through `prepare`.
        custom: objects registered for checkpoints.
        engine: engine of a backend, where somebody assigned one.
        save_hooks, load_hooks: called before a checkpoint is written or read.
    """

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.loaders: list[Any] = []
        self.custom: list[Any] = []
        self.engine: Any = None
        # RemovableHandle keeps a weak reference, which a plain dict does not allow.
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def remember(self, bundle: Bundle) -> None:
        """Keep what a `prepare` call made."""
        for known, made in self._pairs(bundle):
            for item in made:
                _mark(item)
                known.append(item)

    def _pairs(self, bundle: Bundle) -> tuple[tuple[list[Any], list[Any]], ...]:
        return (
            (self.models, bundle.models),
            (self.optimizers, bundle.optimizers),
            (self.schedulers, bundle.schedulers),
            (self.loaders, bundle.loaders),
        )

    def register(self, objects: Iterable[Any]) -> None:
        """Keep objects whose state goes into every checkpoint.

        Raises:
            UnknownKind: one of them has no `state_dict` and `load_state_dict`.
        """
        given = list(objects)
        for index, item in enumerate(given):
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict")):
                raise UnknownKind(
                    f"register_for_checkpointing() was given {item!r} as argument {index + 1}.",
                    "It lacks the methods state_dict() and load_state_dict(state).",
                    "Add them, or save it by yourself.",
                )
        self.custom.extend(given)

    def only_model(self) -> Module | None:
        """The model that its strategy made, where exactly one was prepared."""
        return strategy_model(self.models[0]) if len(self.models) == 1 else None

    def owner_of(self, optimizer: Optimizer) -> Module | None:
        """The model, as its strategy made it, that all parameters of an optimizer belong to, or None."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in map(strategy_model, self.models):
            if held and held <= {id(parameter) for parameter in model.parameters()}:
                return model
        return None

    def parameter_name(self, tensor: Any) -> str | None:
        """Name of a parameter in the prepared model that has it, or None."""
        named = (pair for model in self.models for pair in model.named_parameters())
        return next((str(name) for name, parameter in named if parameter is tensor), None)

    def clear(self) -> None:
        """Forget everything, so that its memory can be given back."""
        for kept in (self.models, self.optimizers, self.schedulers, self.loaders, self.custom):
            kept.clear()
        self.engine = None


def add_hook(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> Any:
    """Keep a hook; the handle that comes back removes it."""
    from torch.utils.hooks import RemovableHandle

    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _mark(item: Any) -> None:
    if hasattr(item, "__dict__"):
        setattr(item, PREPARED, True)
