"""CUDA's functions answered by the processor, so that Megatron-LM's own code computes where there is no GPU.

Devices become the processor, streams do nothing, and generators are the processor's. Numbers are real; nothing is shown
of speed, of memory and of what overlaps.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnProcessor(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = dict(kwargs or {})
        if str(told.get("device", "")).startswith("cuda"):
            told["device"] = "cpu"
        return func(*args, **told)


class _Stream:
    """A stream on which everything is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


_plain_type = torch.Tensor.type


def _type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The name of a tensor's type says CUDA, which Megatron-LM looks for."""
    if dtype is None:
        return str(_plain_type(self)).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")
    return _plain_type(self, dtype, *args, **kwargs)


def simulate() -> None:
    """Answer for CUDA from now on, in this process."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor: Any = torch.Tensor
    tensor.cuda, tensor.type = lambda self, *args, **kwargs: self, _type
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    _OnProcessor().__enter__()
