"""Context parallelism: attention over a sequence that is divided, with the keys and values of all processes.

Where torch has kernels for it, its own `context_parallel` is used, which passes keys and values on while it computes.
Elsewhere each process collects all keys and values before it computes attention for its part of the queries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from accel_state.errors import NotOffered, SettingError, ShapeMismatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ("by_torch", "gathering")

Attention = Callable[..., Tensor]

_all_gather: Callable[..., Tensor] = getattr(
    functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd
)
"""torch 2.13 renamed it and warns about the old name; earlier releases have the old name only."""


def by_torch(
    neighbours: DeviceMesh, buffers: list[Tensor], dims: list[int], kept_cut: list[Tensor], exchange: str
) -> AbstractContextManager[None]:
    """The block of torch; see `divided_sequence.divide`.

    Raises:
        SettingError: there is no buffer; torch takes the length of the sequence from one.
    """
    if not buffers:
        raise SettingError(
            "A block with a divided sequence was entered without buffers.",
            "torch's context parallelism takes the length of the sequence from the first of them.",
            "Give the inputs and targets as buffers.",
        )
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(exchange)
    block: AbstractContextManager[None] = context_parallel(
        neighbours, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(kept_cut)
    )
    return block


def gathering(neighbours: DeviceMesh, exchange: str) -> Callable[[Attention], Attention]:
    """Makes an attention for parts of a sequence of one for whole sequences.

    Raises:
        NotOffered: keys and values were to travel in another way.
    """
    if exchange != "allgather":
        raise NotOffered(
            f"Cannot use cp_comm_strategy={exchange!r}.",
            "On this kind of device torch has no attention that computes while keys and values travel in a ring.",
            "Use TorchContextParallelConfig(cp_comm_strategy='allgather').",
        )
    group, mine, parts = neighbours.get_group(), neighbours.get_local_rank(), neighbours.size()

    def make(whole_attention: Attention) -> Attention:
        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **options: Any,
        ) -> Tensor:
            keys, values = _gathered(key, value, group)
            rows, columns = query.shape[-2], keys.shape[-2]
            if is_causal:
                attn_mask = _causal(rows, columns, mine * rows, query.device)
            elif attn_mask is not None:
                attn_mask = _rows_of(attn_mask, rows, columns, mine, parts)
            return whole_attention(query, keys, values, attn_mask=attn_mask, dropout_p=dropout_p, **options)

        return attention

    return make


def _gathered(key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence; in one collective where their shapes allow."""
    if key.shape == value.shape and key.dtype is value.dtype:
        both = torch.stack((key, value))
        keys, values = _all_gather(both, both.ndim - 2, group).unbind(0)
        return keys, values
    keys, values = (_all_gather(one.contiguous(), one.ndim - 2, group) for one in (key, value))
    return keys, values


def _causal(rows: int, columns: int, first: int, device: torch.device) -> Tensor:
    """Which keys each query of this part may see, when its first query has the position `first`."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(first)


def _rows_of(mask: Tensor, rows: int, columns: int, mine: int, parts: int) -> Tensor:
    """The rows of a mask that belong to the queries of this part."""
    if mask.shape[-1] == columns and mask.shape[-2] in (1, rows):
        return mask
    if mask.shape[-1] == columns and mask.shape[-2] == rows * parts:
        return mask.narrow(-2, mine * rows, rows)
    raise ShapeMismatch(
        f"Attention over a divided sequence was given a mask of the shape {tuple(mask.shape)}.",
        f"It has to cover all {columns} keys, for the {rows} queries of this process or for all of them.",
        "Leave the mask out and use is_causal, or make it for the whole sequence.",
    )
