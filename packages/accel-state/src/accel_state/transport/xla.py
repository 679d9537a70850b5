"""The transport between processes that torch_xla's runtime connects.

The runtime's own collectives send tensors on devices, inside compiled graphs; gloo sends headers and CPU tensors.
Replicas must execute the same graphs. Therefore each collective is a separate graph, and pending work, which may differ
between the processes, runs before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel_state.transport.base import DONE, Reduction, Transport, Work
from accel_state.transport.torch_dist import TorchDistTransport

__all__ = ("XLATransport",)

_NAMES = {"product": "mul"}
"""torch_xla's names of reductions, where they differ."""


class XLATransport(TorchDistTransport):
    """Collectives between XLA devices, one per process, with a process group over gloo for CPU tensors.

    If one process drives several devices as one (SPMD), the runtime has no collectives between processes, and tensors
    are sent through the host.
    """

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        if header or not self._on_device(tensor):
            return super().all_gather(output, tensor, header=header)
        if _spmd():
            gathered = torch.empty(output.shape, dtype=output.dtype)
            super().all_gather(gathered.view(-1), tensor.cpu().view(-1)).wait()
        else:
            gathered = _alone(lambda model: model.all_gather(tensor.reshape(-1), dim=0))
        output.view(-1).copy_(gathered.view(-1))
        return DONE

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        if not self._on_device(tensor):
            return super().all_reduce(tensor, op, into)
        target = tensor if into is None else into.copy_(tensor)
        if _spmd():
            reduced = target.cpu()
            super().all_reduce(reduced, op).wait()
            target.copy_(reduced)
        else:
            _alone(lambda model: model.all_reduce(_NAMES.get(op, op), [target]))
        return DONE

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        if not self._on_device(tensor):
            return super().broadcast(tensor, src)
        # The runtime's broadcast multiplies by 0 on the other processes, where infinities and NaN would not become 0.
        gathered = torch.empty(self.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self.all_gather(gathered, tensor.contiguous())
        tensor.copy_(gathered.view(self.world_size, -1)[src].view_as(tensor))
        return DONE

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int) -> Work:
        if not self._on_device(output):
            return super().scatter(output, inputs, src)
        every = torch.stack([part.reshape(-1) for part in inputs or [output] * self.world_size])
        self.broadcast(every, src)
        output.copy_(every[self.rank].view_as(output))
        return DONE

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int) -> Work:
        if not self._on_device(tensor):
            return super().gather(outputs, tensor, dst)
        gathered = torch.empty(self.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self.all_gather(gathered, tensor.contiguous())
        for output, part in zip(outputs or (), gathered.view(self.world_size, -1), strict=outputs is not None):
            output.copy_(part.view_as(output))
        return DONE

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        if not self._on_device(tensor):
            return super().all_to_all(output, tensor)
        return Transport.all_to_all(self, output, tensor)

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        return Transport.subgroup(self, group, label, meet)

    def _on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type


def _spmd() -> bool:
    import torch_xla.runtime as runtime

    return bool(runtime.is_spmd())


def _alone(collective: Any) -> Any:
    """The result of a collective that runs as a separate graph."""
    import torch_xla
    import torch_xla.core.xla_model as xla_model

    torch_xla.sync()
    result = collective(xla_model)
    torch_xla.sync()
    return result
