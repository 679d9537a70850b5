"""Sequence sharding: each process computes its shard of every sequence, and attention covers the full sequence.

Tensors with a sequence dim are sharded, and `scaled_dot_product_attention` is replaced by one that communicates with
the processes of one axis. All other layers work token by token.

Along "cp" (context parallelism) attention uses the keys and values of all processes. On devices with kernels for it,
torch's `context_parallel` sends keys and values during the computation. On others, each process gathers all of them
first and then computes attention for its shard of the queries.

Along "sp" (Ulysses) each process computes attention for some of the heads, over the full sequence, so that every kernel
and mask works. All-to-all collectives before and after attention convert one sharding into the other. The number of
heads must be a multiple of the number of processes. Jacobs et al., "DeepSpeed Ulysses" (2023), arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

from accel_plugins.manifest import Axis
from accel_plugins.mesh import sequence_submesh
from accel_state.errors import NotOffered, NotReady, SettingError, ShapeMismatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.context import Context

__all__ = (
    "ShardedSequences",
    "by_torch",
    "gathering",
    "over_heads",
    "shard_sequences",
)

Attention = Callable[..., Tensor]

_all_gather: Callable[..., Tensor] = getattr(
    collectives, "all_gather_single_autograd", collectives.all_gather_tensor_autograd
)
"""torch 2.13 renamed it and warns about the old name; earlier releases have the old name only."""


def by_torch(
    neighbours: DeviceMesh, buffers: list[Tensor], dims: list[int], kept_cut: list[Tensor], exchange: str
) -> AbstractContextManager[None]:
    """torch's context; see `shard_sequences`.

    Raises:
        SettingError: there is no buffer; torch reads the sequence length from the first one.
    """
    if not buffers:
        raise SettingError(
            "Cannot shard a sequence without buffers.",
            "torch's context parallelism reads the sequence length from the first buffer.",
            "Pass the inputs and targets as `buffers`.",
        )
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(exchange)
    block: AbstractContextManager[None] = context_parallel(
        neighbours, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(kept_cut)
    )
    return block


def gathering(neighbours: DeviceMesh, exchange: str) -> Callable[[Attention], Attention]:
    """Returns an attention function for shards of sequences, based on one for full sequences.

    Raises:
        NotOffered: this device does not support `exchange`.
    """
    if exchange != "allgather":
        raise NotOffered(
            f"Cannot use cp_comm_strategy={exchange!r}.",
            "On this device torch has no attention that sends keys and values in a ring during the computation.",
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
    """Keys and values of the full sequence; gathered by one collective if their shapes allow."""
    if key.shape == value.shape and key.dtype is value.dtype:
        both = torch.stack((key, value))
        keys, values = _all_gather(both, both.ndim - 2, group).unbind(0)
        return keys, values
    keys, values = (_all_gather(one.contiguous(), one.ndim - 2, group) for one in (key, value))
    return keys, values


def _causal(rows: int, columns: int, first: int, device: torch.device) -> Tensor:
    """The causal mask for this shard of the queries; its first query has the position `first`."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(first)


def _rows_of(mask: Tensor, rows: int, columns: int, mine: int, parts: int) -> Tensor:
    """The rows of a mask for this shard of the queries."""
    if mask.shape[-1] == columns and mask.shape[-2] in (1, rows):
        return mask
    if mask.shape[-1] == columns and mask.shape[-2] == rows * parts:
        return mask.narrow(-2, mine * rows, rows)
    raise ShapeMismatch(
        f"Attention over a sharded sequence was given a mask of the shape {tuple(mask.shape)}.",
        f"Its last dim must be the {columns} keys of the full sequence; the dim before, the {rows} queries of this "
        "process or all queries.",
        "Remove the mask and use is_causal, or create a mask for the full sequence.",
    )


def over_heads(neighbours: DeviceMesh, exchange: str = "alltoall") -> Callable[[Attention], Attention]:
    """Returns an attention function for shards of sequences, based on one for full sequences with fewer heads."""
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
                f"Cannot shard attention of {what} of the shape {tuple(tensor.shape)} among {parts} processes.",
                f"The number of heads (the third dim from the end) must be a multiple of {parts}.",
                "Set sp_size to a divisor of the number of heads, or shard the sequence by cp_size.",
            )


def _to_heads(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, parts: int) -> tuple[Tensor, ...]:
    """Convert all three from (..., heads, shard of the sequence, width) to (..., shard of the heads, sequence, width).

    One collective sends all three if their shapes allow.
    """
    inputs = (query, key, value)
    if len({(one.shape, one.dtype) for one in inputs}) == 1:
        return _all_to_all(torch.stack(inputs), -3, -2, group, parts).unbind(0)
    return tuple(_all_to_all(one, -3, -2, group, parts) for one in inputs)


def _to_parts(output: Tensor, group: ProcessGroup, parts: int) -> Tensor:
    return _all_to_all(output, -2, -3, group, parts)


def _all_to_all(tensor: Tensor, split_dim: int, join_dim: int, group: ProcessGroup, parts: int) -> Tensor:
    """Shard one dim and gather another, by an all-to-all.

    Args:
        tensor: a tensor with any number of dims.
        split_dim: the dim to shard; counted from the end.
        join_dim: the sharded dim to gather; counted from the end.
        group: the processes.
        parts: their number.
    """
    split_dim, join_dim = split_dim % tensor.ndim, join_dim % tensor.ndim
    outgoing = torch.stack(tensor.chunk(parts, split_dim))
    incoming = all_to_all_single_autograd(outgoing, None, None, group)
    return torch.cat(incoming.unbind(0), join_dim)


def _for_heads(mask: Tensor, query: Tensor, heads: int, mine: int) -> Tensor:
    """The part of a mask for the heads of this process."""
    length = query.shape[-2]
    if mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise ShapeMismatch(
            f"Attention over a sharded sequence was given a mask of the shape {tuple(mask.shape)}.",
            f"Each process computes attention of its heads over the full sequence of length {length}.",
            "Remove the mask and use is_causal, or create a mask for the full sequence.",
        )
    own = query.shape[-3]
    return mask.narrow(-3, mine * own, own) if mask.ndim >= 3 and mask.shape[-3] == heads else mask


def shard_sequences(
    context: Context,
    buffers: Sequence[Tensor] | None = None,
    dims: Sequence[int] | None = None,
    kept_cut: Iterable[Tensor] | None = None,
    exchange: str = "allgather",
) -> AbstractContextManager[None]:
    """A context that shards sequences along the run's axis "cp" or "sp"; without either, it has no effect.

    Args:
        context: the context of the run.
        buffers: tensors with a sequence dim: inputs, targets, positions. Inside the context they are sharded.
        dims: dim of the sequence in each of them.
        kept_cut: buffers that are not restored on exit.
        exchange: how keys and values are exchanged along "cp": "allgather" or "alltoall".

    Raises:
        SettingError: the numbers of buffers and dims differ, or `kept_cut` has another tensor.
        NotOffered: the device does not support `exchange`.
    """
    submesh = sequence_submesh(context.mesh)
    sharded, kept = list(buffers or ()), list(kept_cut or ())
    _check(sharded, list(dims or ()), kept)
    if submesh is None:
        return nullcontext()
    axis, neighbours = submesh
    if axis is Axis.CONTEXT and context.process.family.spec.ring_attention:
        return by_torch(neighbours, sharded, list(dims or ()), kept, exchange)
    attention = _ATTENTIONS_BY_AXIS[axis](neighbours, exchange)
    return ShardedSequences(attention, neighbours, sharded, list(dims or ()), kept)


def _check(buffers: list[Tensor], dims: list[int], kept: list[Tensor]) -> None:
    if len(buffers) != len(dims):
        raise SettingError(
            f"Cannot shard {len(buffers)} buffers along {len(dims)} dims.",
            "Each buffer needs exactly one sequence dim.",
            "Pass `buffer_seq_dims` with one int for each buffer.",
        )
    if any(all(one is not buffer for buffer in buffers) for one in kept):
        raise SettingError(
            "Cannot use a tensor in no_restore_buffers that is not in buffers.",
            "no_restore_buffers lists buffers that remain sharded, so they must be among the buffers.",
            "Add the tensor to `buffers`, or remove it from `no_restore_buffers`.",
        )


_ATTENTIONS_BY_AXIS: Final[dict[Axis, Callable[[DeviceMesh, str], Callable[[Attention], Attention]]]] = {
    Axis.CONTEXT: gathering,
    Axis.SEQUENCE: over_heads,
}


class ShardedSequences:
    """The context; entered around forward and backward, because recomputed activations need its attention again.

    Args:
        attention: returns an attention function for sharded sequences, based on the original one.
        neighbours: the mesh of the processes that share each sequence.
        buffers: the tensors to shard.
        dims: dim of the sequence in each of them.
        kept_cut: the buffers that are not restored on exit.
    """

    def __init__(
        self,
        attention: Callable[[Attention], Attention],
        neighbours: DeviceMesh,
        buffers: list[Tensor],
        dims: list[int],
        kept_cut: list[Tensor],
    ) -> None:
        self._make = attention
        self._parts, self._mine = neighbours.size(), neighbours.get_local_rank()
        self._buffers, self._dims = buffers, dims
        self._kept = {id(buffer) for buffer in kept_cut}
        self._whole: list[Tensor] = []
        self._calls = 0

    def __enter__(self) -> None:
        plain: Any = functional.scaled_dot_product_attention
        if getattr(plain, "of_sharded_sequences", False):
            raise NotReady(
                "Cannot enter a context with a sharded sequence.",
                "Another such context is active.",
                "Exit the outer context first.",
            )
        cut = [self._cut(buffer, dim) for buffer, dim in zip(self._buffers, self._dims, strict=True)]
        self._plain, self._calls = plain, 0
        self._whole = [buffer.data for buffer in self._buffers]
        for buffer, mine in zip(self._buffers, cut, strict=True):
            buffer.data = mine
        setattr(functional, _ATTENTION_FUNCTION, self._counted(self._make(plain)))

    def _cut(self, buffer: Tensor, dim: int) -> Tensor:
        if not -buffer.ndim <= dim < buffer.ndim or buffer.shape[dim] % self._parts:
            raise ShapeMismatch(
                f"Cannot shard a tensor of shape {tuple(buffer.shape)} along dim {dim} into {self._parts} shards.",
                "The dim does not exist, or its size is not a multiple of the number of shards.",
                f"Pad sequences to a multiple of {self._parts}.",
            )
        return buffer.data.chunk(self._parts, dim)[self._mine].contiguous()

    def _counted(self, attention: Attention) -> Attention:
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self._calls += 1
            return attention(*args, **kwargs)

        counted.of_sharded_sequences = True  # type: ignore[attr-defined]
        return counted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(functional, _ATTENTION_FUNCTION, self._plain)
        for buffer, whole in zip(self._buffers, self._whole, strict=True):
            if id(buffer) not in self._kept:
                buffer.data = whole
        if error is None and not self._calls and not torch.compiler.is_compiling():
            raise NotReady(
                "The sharded sequence had no effect on attention.",
                "The model did not call torch.nn.functional.scaled_dot_product_attention inside the context.",
                "Make the model use that function (attn_implementation='sdpa'), and call the model inside the context.",
            )


_ATTENTION_FUNCTION: Final = "scaled_dot_product_attention"
