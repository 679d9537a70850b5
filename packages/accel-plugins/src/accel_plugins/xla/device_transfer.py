"""Send batches to XLA devices, one call per batch, and end a step's graph between batches.

With DataLoader workers, threads of torch_xla's `MpDeviceLoader` read batches and send them ahead. Otherwise the
training thread reads them, because reading may use this process's random-number generators, and their use by two
threads would make runs irreproducible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch_xla
import torch_xla.core.xla_model as xla_model
from torch import Tensor
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from accel_ops.conversion import send_to_device
from accel_ops.tree import recursively_apply

__all__ = ("XLADeviceTransfer",)

Pair = tuple[Any, Any]

_CPU: Final = torch.device("cpu")


class _Opaque:
    """Data beside tensors that torch_xla must not inspect; it searches objects with a `__dict__` for tensors."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class _Failed:
    """An exception that a reading thread raised, passed to the loop."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


class XLADeviceTransfer:
    """Sends batches to the device; an `accel_data.hooks.DeviceTransfer`.

    Args:
        device: the target device.
        prefetch: number of batches that `MpDeviceLoader` reads ahead, where allowed; 0: never use it.
        sharding: how torch_xla shards tensors among devices, or None.
    """

    def __init__(self, device: torch.device, prefetch: int, sharding: Any = None) -> None:
        self.device, self.prefetch, self.sharding = device, prefetch, sharding

    def __call__(self, pairs: Iterator[Pair], ahead: bool) -> Iterator[Pair]:
        return self._in_threads(pairs) if ahead and self.prefetch else self._one_by_one(pairs)

    def _one_by_one(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        for batch, rest in pairs:
            # The loop has finished the previous batch: its operations become one graph.
            torch_xla.sync()
            sent = xla_model.send_cpu_data_to_device(_tensors_of(batch), self.device, self.sharding)
            yield self._put_together(batch, sent), rest
        torch_xla.sync()

    def _in_threads(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        sizes = {"loader_prefetch_size": self.prefetch, "device_prefetch_size": self.prefetch}
        loader = MpDeviceLoader(_Reading(pairs), self.device, input_sharding=self.sharding, **sizes)
        try:
            for sent, travelling in iter(loader):
                if isinstance(travelling.content, _Failed):
                    raise travelling.content.error
                batch, rest = travelling.content
                yield self._put_together(batch, sent), rest
        finally:
            loader._parallel_loader.close()

    def _put_together(self, batch: Any, sent: list[Tensor]) -> Any:
        """The batch with its tensors replaced by the sent ones."""
        places = dict(zip(map(id, _tensors_of(batch)), sent, strict=True))
        moved = recursively_apply(lambda tensor: places.get(id(tensor), tensor), batch)
        return send_to_device(moved, self.device)


class _Reading:
    """An iterable for `MpDeviceLoader` that keeps exceptions of reading, which its thread would lose."""

    def __init__(self, pairs: Iterator[Pair]) -> None:
        self._pairs = pairs

    def __iter__(self) -> Iterator[list[Any]]:
        try:
            for batch, rest in self._pairs:
                yield [_tensors_of(batch), _Opaque((batch, rest))]
        except Exception as error:
            yield [[], _Opaque(_Failed(error))]


def _tensors_of(batch: Any) -> list[Tensor]:
    """The CPU tensors of a batch, each once."""
    tensors: dict[int, Tensor] = {}

    def remember(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and tensor.device == _CPU:
            tensors[id(tensor)] = tensor
        return tensor

    recursively_apply(remember, batch)
    return list(tensors.values())
