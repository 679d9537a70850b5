"""Sequence parallelism (Ulysses): each process has a part of the sequence, and in attention a part of the heads.

Two exchanges around attention turn one division into the other, so that attention itself is that of a whole sequence:
every kernel and mask works. The number of heads has to be a multiple of the number of processes.
Jacobs et al., "DeepSpeed Ulysses" (2023), arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from accel_state.errors import ShapeMismatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ("over_heads",)

Attention = Callable[..., Tensor]


def over_heads(neighbours: DeviceMesh, exchange: str = "alltoall") -> Callable[[Attention], Attention]:
    """Makes an attention for parts of a sequence of one for whole sequences with fewer heads."""
    group, mine, parts = neighbours.get_group(), neighbours.get_local_rank(), neighbours.size()

    def make(whole_attention: Attention) -> Attention:
        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **options: Any
        ) -> Tensor:
            _check_heads(query, key, parts)
            whole = _to_heads(query, key, value, group, parts)
            if attn_mask is not None:
                attn_mask = _for_heads(attn_mask, whole[0], query.shape[-3], mine)
            return _to_parts(whole_attention(*whole, attn_mask, *args, **options), group, parts)

        return attention

    return make


def _check_heads(query: Tensor, key: Tensor, parts: int) -> None:
    for what, tensor in (("queries", query), ("keys and values", key)):
        if tensor.ndim < 3 or tensor.shape[-3] % parts:
            raise ShapeMismatch(
                f"Cannot divide attention of {what} of the shape {tuple(tensor.shape)} among {parts} processes.",
                "Its heads (the third dim from the end) cannot be shared out evenly.",
                "Set sp_size to a divisor of the number of heads, or divide the sequence by cp_size.",
            )


def _to_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, parts: int) -> tuple[Tensor, ...]:
    """From (..., heads, part of the sequence, width) to (..., part of the heads, sequence, width), for all three.

    They travel in one collective where their shapes allow.
    """
    given = (query, key, value)
    if len({(one.shape, one.dtype) for one in given}) == 1:
        return _exchanged(torch.stack(given), -3, -2, group, parts).unbind(0)
    return tuple(_exchanged(one, -3, -2, group, parts) for one in given)


def _to_parts(output: Tensor, group: ProcessGroup, parts: int) -> Tensor:
    return _exchanged(output, -2, -3, group, parts)


def _exchanged(tensor: Tensor, given: int, taken: int, group: ProcessGroup, parts: int) -> Tensor:
    """Give away parts of one dim and collect those of another.

    Args:
        tensor: any number of dims.
        given: dim that is whole, and is divided afterwards; counted from the end.
        taken: dim that is divided, and is whole afterwards; counted from the end.
        group: the processes.
        parts: their number.
    """
    given, taken = given % tensor.ndim, taken % tensor.ndim
    outgoing = torch.stack(tensor.chunk(parts, given))
    incoming = all_to_all_single_autograd(outgoing, None, None, group)
    return torch.cat(incoming.unbind(0), taken)


def _for_heads(mask: Tensor, query: Tensor, heads: int, mine: int) -> Tensor:
    """The part of a mask that belongs to the heads of this process."""
    length = query.shape[-2]
    if mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise ShapeMismatch(
            f"Attention over a divided sequence was given a mask of the shape {tuple(mask.shape)}.",
            f"Each process attends over the whole sequence of {length} for its heads.",
            "Leave the mask out and use is_causal, or make it for the whole sequence.",
        )
    own = query.shape[-3]
    return mask.narrow(-3, mine * own, own) if mask.ndim >= 3 and mask.shape[-3] == heads else mask
