"""The blocks of a model: the submodules that are compiled, recomputed or sharded as units."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module, ModuleList

from accel_state.errors import SettingError
from accel_state.settings.schema import closest

__all__ = (
    "blocks_of_class",
    "get_module_class_from_name",
    "has_repeated_blocks",
    "is_repeated_blocks",
    "repeated_blocks",
)


def is_repeated_blocks(module: Module) -> bool:
    """Whether a module is a list of at least one block, all of one class."""
    return isinstance(module, ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: Module) -> bool:
    """Whether a module contains a list of blocks of one class, at any depth."""
    return any(is_repeated_blocks(part) for part in module.modules())


def repeated_blocks(model: Module) -> list[Module]:
    """The blocks of the outermost lists of blocks of one class, in order."""
    if is_repeated_blocks(model):
        return list(model.children())
    return [block for child in model.children() for block in repeated_blocks(child)]


def blocks_of_class(model: Module, names: Iterable[str]) -> list[Module]:
    """The submodules with one of these class names, innermost first.

    Raises:
        SettingError: the model has no class of that name.
    """
    class_names = list(names)
    present = {type(part).__name__ for part in model.modules()}
    for name in class_names:
        if name not in present:
            near = closest(name, present)
            raise SettingError(
                f"Cannot find blocks of the class {name!r}.",
                f"{type(model).__name__} does not contain it; its classes are {', '.join(sorted(present))}.",
                f"Did you mean {near!r}?" if near else "Use one of these.",
            )
    return [part for part in reversed(list(model.modules())) if type(part).__name__ in class_names]


def get_module_class_from_name(module: Module, name: str) -> type[Module] | None:
    """The class named `name` among those of a module and its submodules, or None."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)
