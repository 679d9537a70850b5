"""Looking for a module that is small enough, one at a time, for callers who pack a model themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from accel_bigmodel.byte_counts import convert_file_size_to_int
from accel_state.errors import SettingError

__all__ = ("fallback_allocate", "get_module_size_with_ties")


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Bytes of a module with the modules that share weights with it, and names and modules of these.

    Args:
        tied_params: names of parameters of other modules that the module shares.
        module_size: bytes of the module alone.
        module_sizes: bytes by name, as `compute_module_sizes` gives them.
        modules_to_treat: names and modules among which the others are looked for.

    Raises:
        SettingError: none of them has a parameter that was named.
    """
    names, modules = list[str](), list[nn.Module]()
    for tied in tied_params:
        found = next(((name, module) for name, module in modules_to_treat if tied.startswith(f"{name}.")), None)
        if found is None:
            raise SettingError(
                f"Count the parameter {tied!r} with the module that shares it.",
                "None of the given modules has it.",
                "Give the modules that are still to be placed.",
            )
        module_size += module_sizes[found[0]] - module_sizes[tied]
        names.append(found[0])
        modules.append(found[1])
    return module_size, names, modules


def fallback_allocate(
    modules: list[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | None, list[tuple[str, nn.Module]]]:
    """The first module, or part of one, that is small enough; and the list without it.

    Args:
        modules: names and modules, in the order in which they are looked at.
        module_sizes: bytes by name, as `compute_module_sizes` gives them.
        size_limit: bytes, or text such as "1GB".
        no_split_module_classes: names of classes whose modules are taken whole or not at all.
        tied_parameters: groups of names of shared parameters, counted with the module that is taken.
    """
    limit, ties = convert_file_size_to_int(size_limit), tied_parameters or ()
    for number, (name, module) in enumerate(modules):
        before, after = modules[:number], modules[number + 1 :]
        if _size_with_ties(name, [*before, *after], module_sizes, ties) <= limit:
            return name, module, [*before, *after]
        if isinstance(module, nn.Module) and type(module).__name__ not in (no_split_module_classes or ()):
            parts = [(f"{name}.{child}", inner) for child, inner in module.named_children()]
            found, part, left = fallback_allocate(parts, module_sizes, limit, no_split_module_classes, ties)
            if found is not None:
                return found, part, [*before, *left, *after]
    return None, None, modules


def _size_with_ties(
    name: str,
    others: Sequence[tuple[str, nn.Module]],
    sizes: Mapping[str, int],
    groups: Sequence[Sequence[str]],
) -> int:
    shared = [
        tied
        for group in groups
        if any(one.startswith(f"{name}.") for one in group)
        for tied in group
        if not tied.startswith(f"{name}.") and any(tied.startswith(f"{other}.") for other, _ in others)
    ]
    return get_module_size_with_ties(shared, sizes[name], sizes, others)[0]
