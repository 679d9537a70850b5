"""A block in which each process works on its part of every sequence, and attention still sees the whole.

Tensors that have a sequence are cut, each process keeps its part, and `scaled_dot_product_attention` is replaced by one
that reaches the other parts through the processes of one axis. Everything else in a model works token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from accel_plugins.manifest import Axis
from accel_plugins.mesh_axes import sequence_part
from accel_plugins.transforms import context_parallel, sequence_parallel
from accel_state.errors import NotReady, SettingError, ShapeMismatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.context import Context

__all__ = ("DividedSequence", "divide")

Attention = Callable[..., Tensor]


def divide(
    context: Context,
    buffers: Sequence[Tensor] | None = None,
    dims: Sequence[int] | None = None,
    kept_cut: Iterable[Tensor] | None = None,
    exchange: str = "allgather",
) -> AbstractContextManager[None]:
    """A block in which the sequence is divided along the axis "cp" or "sp" of the run; no change where it has neither.

    Args:
        context: the context of the run.
        buffers: tensors with a sequence: inputs, targets, positions. Inside of the block they are cut.
        dims: dim of the sequence in each of them.
        kept_cut: those that need not be whole again afterwards.
        exchange: how keys and values travel along "cp": "allgather" or "alltoall".

    Raises:
        SettingError: buffers and dims do not go together.
        NotOffered: the device cannot exchange in that way.
    """
    found = sequence_part(context.mesh)
    given, kept = list(buffers or ()), list(kept_cut or ())
    _check(given, list(dims or ()), kept)
    if found is None:
        return nullcontext()
    axis, neighbours = found
    if axis is Axis.CONTEXT and context.process.family.ring_attention:
        return context_parallel.by_torch(neighbours, given, list(dims or ()), kept, exchange)
    attention = _ATTENTIONS[axis](neighbours, exchange)
    return DividedSequence(attention, neighbours, given, list(dims or ()), kept)


def _check(buffers: list[Tensor], dims: list[int], kept: list[Tensor]) -> None:
    if len(buffers) != len(dims):
        raise SettingError(
            f"Cannot cut {len(buffers)} buffers along {len(dims)} dims.",
            "Each buffer has one dim that is its sequence.",
            "Give buffer_seq_dims with one number for each buffer.",
        )
    if any(all(one is not buffer for buffer in buffers) for one in kept):
        raise SettingError(
            "no_restore_buffers holds a tensor that is not among the buffers.",
            "Only what is cut can stay cut.",
            "Add it to buffers, or take it out.",
        )


_ATTENTIONS: Final[dict[Axis, Callable[[DeviceMesh, str], Callable[[Attention], Attention]]]] = {
    Axis.CONTEXT: context_parallel.gathering,
    Axis.SEQUENCE: sequence_parallel.over_heads,
}


class DividedSequence:
    """The block; entered around forward and backward, because recomputed activations need its attention again.

    Args:
        attention: makes, of the attention there is, one for the divided sequence.
        neighbours: the processes among which sequences are divided.
        buffers: what is cut.
        dims: dim of the sequence in each of them.
        kept_cut: those of them that stay cut.
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
        if getattr(plain, "of_divided_sequence", False):
            raise NotReady(
                "A block with a divided sequence was entered.",
                "There is one around it already.",
                "Leave the first one before.",
            )
        cut = [self._cut(buffer, dim) for buffer, dim in zip(self._buffers, self._dims, strict=True)]
        self._plain, self._calls = plain, 0
        self._whole = [buffer.data for buffer in self._buffers]
        for buffer, mine in zip(self._buffers, cut, strict=True):
            buffer.data = mine
        setattr(functional, _NAME, self._counted(self._make(plain)))

    def _cut(self, buffer: Tensor, dim: int) -> Tensor:
        if not -buffer.ndim <= dim < buffer.ndim or buffer.shape[dim] % self._parts:
            raise ShapeMismatch(
                f"Cannot cut a tensor of the shape {tuple(buffer.shape)} along dim {dim} into {self._parts} parts.",
                "It has no such dim, or the parts would not be equal.",
                f"Pad sequences to a multiple of {self._parts}.",
            )
        return buffer.data.chunk(self._parts, dim)[self._mine].contiguous()

    def _counted(self, attention: Attention) -> Attention:
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self._calls += 1
            return attention(*args, **kwargs)

        counted.of_divided_sequence = True  # type: ignore[attr-defined]
        return counted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(functional, _NAME, self._plain)
        for buffer, whole in zip(self._buffers, self._whole, strict=True):
            if id(buffer) not in self._kept:
                buffer.data = whole
        if error is None and not self._calls and not torch.compiler.is_compiling():
            raise NotReady(
                "A block with a divided sequence was left.",
                "Nothing in it called torch.nn.functional.scaled_dot_product_attention, so attention saw parts only.",
                "Let the model use that function (attn_implementation='sdpa'), and call it inside of the block.",
            )


_NAME: Final = "scaled_dot_product_attention"
