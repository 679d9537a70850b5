"""The models of a script: the names of their parameters, and the part of each tensor that this process has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from accel_check.records import StartRecord, TensorPart

__all__ = ("Models", "piece_of", "plain_name")

_WRAPPER_PREFIXES: Final = (
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
    "module.",
)


def plain_name(name: str) -> str:
    """The name of a parameter or module in the script's own model, without the attributes of wrappers."""
    for wrapper in _WRAPPER_PREFIXES:
        name = name.replace(wrapper, "")
    return name


def piece_of(tensor: Tensor) -> TensorPart:
    """A copy of the part of a tensor that this process has; no collective is called."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return TensorPart(tensor.to_local().to("cpu", copy=True), shape, tuple(offset))
    # Gradients of sparse embeddings have rows in any order, some of them twice.
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return TensorPart(dense.to("cpu", copy=True), tuple(dense.shape))


class Models:
    """The outermost modules that a script calls in training, in the order of their first calls."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._parameters: dict[int, str] = {}
        self._outside: dict[str, weakref.ref[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._roots)

    @staticmethod
    def prefix(index: int) -> str:
        """How the names of a model begin, if several models are trained."""
        return f"model {index}: " if index else ""

    def knows(self, module: nn.Module) -> bool:
        """Whether the module is part of a model."""
        return module in self._names

    def name(self, module: nn.Module) -> str | None:
        """The name of a module; None for one that is not part of a model."""
        return self._names.get(module)

    def add(self, root: nn.Module) -> StartRecord | None:
        """Add a model, and return its parameters and buffers; None if it has no parameter of its own."""
        own = [parameter for parameter in root.parameters() if id(parameter) not in self._parameters]
        if not own:
            return None
        prefix = self.prefix(len(self._roots))
        self._roots.append((prefix, weakref.ref(root)))
        for name, module in root.named_modules():
            if module not in self._names:
                self._names[module] = prefix + plain_name(f"{name}.")[:-1]
        for name, parameter in root.named_parameters():
            self._parameters.setdefault(id(parameter), prefix + plain_name(name))
        start = StartRecord()
        for name, tensor in self._of(root, prefix, root.named_parameters()):
            start.parameters[name] = piece_of(tensor)
        for name, tensor in self._of(root, prefix, root.named_buffers()):
            start.buffers[name] = piece_of(tensor)
        return start

    def add_outside(self, optimizer: int, groups: Iterable[Mapping[str, Any]]) -> StartRecord:
        """Name parameters of an optimizer that no model has, and return them."""
        start = StartRecord()
        for group, one in enumerate(groups):
            for index, parameter in enumerate(one["params"]):
                if id(parameter) not in self._parameters:
                    name = f"parameter {index} of group {group} of optimizer {optimizer}"
                    self._parameters[id(parameter)] = name
                    self._outside[name] = weakref.ref(parameter)
                    start.parameters[name] = piece_of(parameter)
        return start

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters of all models, and those outside of them."""
        for prefix, reference in self._roots:
            root = reference()
            if root is not None:
                yield from self._of(root, prefix, root.named_parameters())
        for name, outside in self._outside.items():
            parameter = outside()
            if parameter is not None:
                yield name, parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The name and the tensor of each buffer of all recorded models."""
        for prefix, reference in self._roots:
            root = reference()
            if root is not None:
                yield from self._of(root, prefix, root.named_buffers())

    def roots(self) -> Iterator[nn.Module]:
        """The models, and all modules in them, so that a check of variables knows them."""
        for _, reference in self._roots:
            root = reference()
            if root is not None:
                yield from root.modules()

    def replicas(self) -> Iterator[nn.parallel.DistributedDataParallel]:
        """The replicated models."""
        for module in self.roots():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                yield module

    def load(self, values: Callable[[str], Tensor | None]) -> list[str]:
        """Copy values into parameters and buffers; returns the names of those that have another shape."""
        wrong = []
        with torch.no_grad():
            for name, tensor in (*self.parameters(), *self.buffers()):
                value = values(name)
                if value is None:
                    continue
                own = tensor.detach()
                own = own.to_local() if isinstance(own, DTensor) else own
                if own.shape == value.shape:
                    own.copy_(value)
                else:
                    wrong.append(name)
        return wrong

    @staticmethod
    def _of(root: nn.Module, prefix: str, named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            yield prefix + plain_name(name), tensor
