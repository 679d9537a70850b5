"""The arguments of one `prepare` call, sorted by kind; they are returned in the caller's order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_plugins.manifest import ObjectKind
from accel_state.labels import PREPARED

__all__ = ("Bundle", "ObjectsByKind", "part_kind")

_logger: Final = logging.getLogger(__name__)


def part_kind(item: object) -> ObjectKind | None:
    """The kind of an object, or None when `prepare` does not handle it.

    An object that is not a torch scheduler is treated as one if it has the methods `step` and `load_state_dict`. A
    placeholder for an object that an engine creates has that object's kind in the class attribute `placeholder_for`.
    """
    placeholder_for: ObjectKind | None = getattr(type(item), "placeholder_for", None)
    if isinstance(placeholder_for, ObjectKind):
        return placeholder_for
    if isinstance(item, Module):
        return ObjectKind.MODEL
    if isinstance(item, Optimizer):
        return ObjectKind.OPTIMIZER
    if isinstance(item, DataLoader):
        return ObjectKind.LOADER
    if isinstance(item, LRScheduler):
        return ObjectKind.SCHEDULER
    looks_like_a_scheduler = all(callable(getattr(item, name, None)) for name in ("step", "load_state_dict"))
    return ObjectKind.SCHEDULER if looks_like_a_scheduler and not isinstance(item, type) else None


class ObjectsByKind:
    """Lists of models, optimizers, schedulers and loaders."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.loaders: list[Any] = []

    def of_kind(self, kind: ObjectKind) -> list[Any]:
        """The list of one kind."""
        lists = {
            ObjectKind.MODEL: self.models,
            ObjectKind.OPTIMIZER: self.optimizers,
            ObjectKind.SCHEDULER: self.schedulers,
            ObjectKind.LOADER: self.loaders,
        }
        return lists[kind]


class Bundle(ObjectsByKind):
    """The objects of one `prepare` call by kind; a strategy replaces the items of the lists by wrapped ones.

    Attributes:
        models, optimizers, schedulers, loaders: the objects to prepare, in the caller's order.
        unchanged: objects that are returned unchanged: prepared earlier, or of another kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unchanged: list[Any] = []
        self._places: list[tuple[ObjectKind | None, int]] = []

    @classmethod
    def of(cls, objects: Iterable[Any]) -> Bundle:
        """Sort objects by kind.

        Objects of other kinds remain unchanged; a warning names them, except None.
        """
        bundle = cls()
        for index, item in enumerate(objects):
            kind = bundle._kind(item, index)
            items = bundle._list_of(kind)
            bundle._places.append((kind, len(items)))
            items.append(item)
        return bundle

    @staticmethod
    def _kind(item: Any, index: int) -> ObjectKind | None:
        if item is None or vars_of(item).get(PREPARED, False):
            return None
        kind = part_kind(item)
        if kind is None:
            _logger.warning(
                "prepare() returns argument %d unchanged (%s %s): it is not a model, an optimizer, a learning-rate "
                "scheduler or a DataLoader. Such objects inside it are not prepared.",
                index + 1,
                type(item).__name__,
                _short(item),
            )
        return kind

    def in_given_order(self) -> tuple[Any, ...]:
        """The current items of the lists, in the caller's order."""
        return tuple(self._list_of(kind)[position] for kind, position in self._places)

    def _list_of(self, kind: ObjectKind | None) -> list[Any]:
        return self.unchanged if kind is None else self.of_kind(kind)

    def parameter_names(self) -> dict[Parameter, str]:
        """The name of each parameter of the models: "<index of the model>.<name in the user's model>".

        Two such tables, from before and after a strategy replaced parameters, map old parameters to new ones.
        """
        from accel_plugins.parameters import parameter_names

        return {
            parameter: f"{index}.{name}"
            for index, model in enumerate(self.models)
            for parameter, name in parameter_names(model).items()
        }

    def rebind(self, mapping: Mapping[Parameter, Parameter]) -> None:
        """Replace old parameters by new ones in the optimizers; the optimizer state moves to the new ones."""
        from accel_plugins.parameters import rebind

        rebind(self.optimizers, mapping)

    def rebind_by_name(self, before: Mapping[Parameter, str]) -> None:
        """Call `rebind` for the parameters that now have the names in `before`, a result of `parameter_names`."""
        now = {name: parameter for parameter, name in self.parameter_names().items()}
        self.rebind({old: now[name] for old, name in before.items() if name in now and now[name] is not old})


def vars_of(item: object) -> Mapping[str, Any]:
    """Instance attributes of an object; empty for one without `__dict__`."""
    return getattr(item, "__dict__", {})


def _short(item: object) -> str:
    text = repr(item)
    return text if len(text) <= 60 else text[:57] + "..."
