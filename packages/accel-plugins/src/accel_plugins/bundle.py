"""What `prepare` was given, sorted by kind, with the order of the caller remembered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel_plugins.manifest import Part
from accel_state.labels import PREPARED

__all__ = ("Bundle", "ObjectsByKind", "part_kind")

_logger: Final = logging.getLogger(__name__)


def part_kind(given: object) -> Part | None:
    """The kind of an object, or None when it is none that `prepare` handles.

    A scheduler that is not torch's own counts as one when it can step and has a state. A placeholder for an
    object that an engine makes has the kind of that object in its class attribute `placeholder_for`.
    """
    placeholder_for: Part | None = getattr(type(given), "placeholder_for", None)
    if isinstance(placeholder_for, Part):
        return placeholder_for
    if isinstance(given, Module):
        return Part.MODEL
    if isinstance(given, Optimizer):
        return Part.OPTIMIZER
    if isinstance(given, DataLoader):
        return Part.LOADER
    if isinstance(given, LRScheduler):
        return Part.SCHEDULER
    looks_like_a_scheduler = all(callable(getattr(given, name, None)) for name in ("step", "load_state_dict"))
    return Part.SCHEDULER if looks_like_a_scheduler and not isinstance(given, type) else None


class ObjectsByKind:
    """Lists of models, optimizers, schedulers and loaders."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.loaders: list[Any] = []

    def of_kind(self, part: Part) -> list[Any]:
        """The list of one kind."""
        lists = {
            Part.MODEL: self.models,
            Part.OPTIMIZER: self.optimizers,
            Part.SCHEDULER: self.schedulers,
            Part.LOADER: self.loaders,
        }
        return lists[part]


class Bundle(ObjectsByKind):
    """Objects of one `prepare` call by kind; a strategy replaces the items of the lists by what it makes of them.

    Attributes:
        models, optimizers, schedulers, loaders: what has to be prepared, each in the order given.
        unchanged: objects that went through `prepare` before, or are of no kind; they come back as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unchanged: list[Any] = []
        self._places: list[tuple[Part | None, int]] = []

    @classmethod
    def of(cls, objects: Iterable[Any]) -> Bundle:
        """Sort objects by kind.

        What is neither model, optimizer, scheduler nor loader is kept as it is, with a warning unless it is None.
        """
        bundle = cls()
        for index, given in enumerate(objects):
            kind = bundle._kind(given, index)
            items = bundle._list_of(kind)
            bundle._places.append((kind, len(items)))
            items.append(given)
        return bundle

    @staticmethod
    def _kind(given: Any, index: int) -> Part | None:
        if given is None or vars_of(given).get(PREPARED, False):
            return None
        kind = part_kind(given)
        if kind is None:
            _logger.warning(
                "prepare() returns argument %d as it is, %s %s: it is neither a model, nor an optimizer, nor a"
                " learning-rate scheduler, nor a DataLoader. What it may hold of these is not prepared.",
                index + 1,
                type(given).__name__,
                _short(given),
            )
        return kind

    def in_given_order(self) -> tuple[Any, ...]:
        """What the lists hold now, in the order of the caller."""
        return tuple(self._list_of(kind)[position] for kind, position in self._places)

    def _list_of(self, kind: Part | None) -> list[Any]:
        return self.unchanged if kind is None else self.of_kind(kind)

    def parameter_names(self) -> dict[Parameter, str]:
        """Name of every parameter of the models: "<index of the model>.<name in the user's model>".

        Taken before and after a strategy replaced parameters, two such tables tell which one became which.
        """
        from accel_plugins.parameters import parameter_names

        return {
            parameter: f"{index}.{name}"
            for index, model in enumerate(self.models)
            for parameter, name in parameter_names(model).items()
        }

    def rebind(self, mapping: Mapping[Parameter, Parameter]) -> None:
        """Make the optimizers hold the new parameters instead of the old ones; their state moves with them."""
        from accel_plugins.parameters import rebind

        rebind(self.optimizers, mapping)

    def rebind_by_name(self, before: Mapping[Parameter, str]) -> None:
        """`rebind` to the parameters that now carry the names in `before`, a table made by `parameter_names`."""
        now = {name: parameter for parameter, name in self.parameter_names().items()}
        self.rebind({old: now[name] for old, name in before.items() if name in now and now[name] is not old})


def vars_of(given: object) -> Mapping[str, Any]:
    """Instance attributes of an object, empty for one that has no room for any."""
    return getattr(given, "__dict__", {})


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else text[:57] + "..."
