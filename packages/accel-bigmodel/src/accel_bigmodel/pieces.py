"""The pieces of a model that stay on one device: layers, unsplit blocks and single tensors, with what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor, nn

from accel_bigmodel.sizes import Dtype, byte_counter

__all__ = ("Piece", "pieces_of")


@dataclass(slots=True)
class Piece:
    """A unit on one device: a layer, an unsplit block or a single tensor, with everything that shares its weights.

    Args:
        names: names of the modules and tensors, in the order of the model.
        sizes: bytes of each one separately.
        size: bytes of all, shared weights counted once.
        buffers: bytes of the buffers among them.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    size: int
    buffers: int

    @property
    def largest(self) -> tuple[int, str]:
        """Bytes and name of its largest layer."""
        if len(self.names) == 1:
            return self.sizes[0], self.names[0]
        return max(zip(self.sizes, self.names, strict=True), key=lambda pair: pair[0])


def pieces_of(
    model: nn.Module,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
) -> list[Piece]:
    """The pieces of a model in its order, from one walk over its modules."""
    walk = _Walk(frozenset(no_split_module_classes or ()), byte_counter(dtype, special_dtypes))
    walk.visit("", model)
    sizes, buffers = walk.sizes, walk.buffers
    # A large model has many pieces; the garbage collector does not track tuples of numbers and texts.
    pieces = []
    for members in _tied_together(walk.layers):
        if len(members) == 1:
            ((name, keys),) = members
            size = sum(map(sizes.__getitem__, keys))
            piece = Piece((name,), (size,), size, 0)
        else:
            names = tuple([name for name, _ in members])
            own_sizes = tuple([sum(map(sizes.__getitem__, own)) for _, own in members])
            keys = tuple(set(chain.from_iterable(own for _, own in members)))
            piece = Piece(names, own_sizes, sum(map(sizes.__getitem__, keys)), 0)
        if buffers:
            piece.buffers = sum([sizes[key] for key in keys if key in buffers])
        pieces.append(piece)
    return pieces


_Layer: TypeAlias = "tuple[str, tuple[int, ...]]"
"""Name of a layer, block or tensor, and the identities of its tensors."""


class _Walk:
    """One pass over a model: its layers, unsplit blocks and single tensors, each with the identities of its tensors."""

    def __init__(self, unsplit: frozenset[str], count: Callable[[str, Tensor], int]) -> None:
        self.unsplit, self.count = unsplit, count
        self.layers: list[_Layer] = []
        self.sizes: dict[int, int] = {}
        self.buffers: set[int] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        # If a module has several names, each one counts, unlike in named_children().
        if name and (not module._modules or type(module).__name__ in self.unsplit):
            keys: set[int] = set()
            self._collect(f"{name}.", module, keys)
            self.layers.append((name, tuple(keys)))
            return
        prefix = f"{name}." if name else ""
        self._add_each(prefix, module._parameters)
        for child, inner in module._modules.items():
            if inner is not None:
                self.visit(prefix + child, inner)
        if module._buffers:
            self._add_each(prefix, module._buffers)
            self.buffers.update(map(id, module._buffers.values()))

    def _add_each(self, prefix: str, tensors: Mapping[str, Tensor | None]) -> None:
        for leaf in tensors:
            if tensors[leaf] is not None:
                keys: set[int] = set()
                self._note(prefix, {leaf: tensors[leaf]}, keys)
                self.layers.append((prefix + leaf, tuple(keys)))

    def _collect(self, prefix: str, module: nn.Module, keys: set[int]) -> None:
        if module._parameters:
            self._note(prefix, module._parameters, keys)
        if module._buffers:
            self._note(prefix, module._buffers, keys)
            self.buffers.update(map(id, module._buffers.values()))
        for child, inner in module._modules.items():
            if inner is not None:
                self._collect(f"{prefix}{child}.", inner, keys)

    def _note(self, prefix: str, tensors: Mapping[str, Tensor | None], keys: set[int]) -> None:
        """Add the identities of tensors to `keys`, and their sizes to those that are known."""
        sizes, count = self.sizes, self.count
        for leaf, tensor in tensors.items():
            if tensor is not None:
                key = id(tensor)
                keys.add(key)
                if key not in sizes:
                    sizes[key] = count(prefix + leaf, tensor)


def _tied_together(layers: Sequence[_Layer]) -> Iterable[Sequence[_Layer]]:
    """The layers, those that share tensors directly or through others in one group, in the order of their first."""
    members = [keys for _, keys in layers]
    if sum(map(len, members)) == len(set[int]().union(*members)):
        return ((layer,) for layer in layers)
    root = list(range(len(members)))

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    first: dict[int, int] = {}
    for number, keys in enumerate(members):
        for key in keys:
            a, b = sorted((find(first.setdefault(key, number)), find(number)))
            root[b] = a
    groups: dict[int, list[_Layer]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault(find(number), []).append(layer)
    return groups.values()
