"""Copies from host memory to a device, beside what the device computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ("HostCopies",)


class HostCopies:
    """Copies from pinned host memory to one device, on a stream of their own.

    The device orders them with what it computes by events; the host waits for nothing.

    Args:
        device: the device; its torch module must have streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor in pinned memory."""
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor is in pinned memory."""
        return tensor.is_pinned()

    def pinned_size(self, tensor: Tensor) -> int:
        """Bytes that a pinned copy takes: torch's allocator rounds up to a power of two."""
        return 1 << max(tensor.nbytes - 1, 0).bit_length()

    def start(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Begin to copy a CPU tensor to the device, which converts it; memory that is not pinned is copied first."""
        pinned = tensor if self.is_pinned(tensor) else self.pin(tensor)
        with self._module.stream(self._stream):
            # torch's allocator keeps pinned memory for as long as a copy from it takes.
            return pinned.to(self.device, non_blocking=True).to(dtype)

    def mark(self) -> Any:
        """The end of the copies that were started until now, for `use_after`."""
        return self._stream.record_event()

    def use_after(self, mark: Any) -> None:
        """Make the calling thread's stream wait for copies before what it is given next."""
        self._module.current_stream(self.device).wait_event(mark)

    def start_after_use(self) -> None:
        """Make copies that are started later wait for what the calling thread's stream was given until now.

        Memory of earlier copies may be freed after that: the next ones reuse it in the order of the stream.
        """
        self._stream.wait_event(self._module.current_stream(self.device).record_event())

    def keep_until_used(self, tensor: Tensor) -> None:
        """Reuse the memory of a copy, whenever it is freed, only after the work of the calling thread's stream."""
        tensor.record_stream(self._module.current_stream(self.device))
