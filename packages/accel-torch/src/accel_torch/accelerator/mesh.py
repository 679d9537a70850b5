"""The mesh of an Accelerator: its axes, and the coordinates of this process on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from accel_plugins.manifest import Axis
from accel_state.errors import NoState, NotOffered
from accel_torch.accelerator.facade import Facade

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig

__all__ = ("MeshMixin",)


class _AbsentAttribute(NotOffered, AttributeError):
    """Raised by an attribute that no run has; as an `AttributeError`, so that `hasattr` returns False."""


class MeshMixin(Facade):
    """Axes of the run."""

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the run's mesh axes; None if no `ParallelismConfig` was given."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The run's device mesh, or None."""
        mesh: DeviceMesh | None = self.state.device_mesh
        return mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether the sharding of parameters can be combined with other mesh axes."""
        return self.is_fsdp2

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank of this process on the axis of tensor parallelism; 0 if the mesh has no such axis.

        Raises:
            NoState: the run has no ParallelismConfig; `hasattr` returns False.
        """
        return self._place(Axis.TENSOR)

    @property
    def data_parallel_rank(self) -> int:
        """Rank of this process on the axis of model replicas; see `tensor_parallel_rank`."""
        return self._place(Axis.REPLICATE)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Rank of this process on the axis that shards the parameters; see `tensor_parallel_rank`."""
        return self._place(Axis.SHARD)

    @property
    def context_parallel_rank(self) -> int:
        """Rank of this process on the axis of context parallelism; see `tensor_parallel_rank`."""
        return self._place(Axis.CONTEXT)

    @property
    def sequence_parallel_rank(self) -> int:
        """Rank of this process on the axis of sequence parallelism over attention heads; see `tensor_parallel_rank`."""
        return self._place(Axis.SEQUENCE)

    @property
    def pipeline_parallel_rank(self) -> int:
        """Rank of this process on the axis of pipeline parallelism, which training does not support.

        Raises:
            NotOffered: always; `hasattr` returns False.
        """
        raise _AbsentAttribute(
            "Cannot read accelerator.pipeline_parallel_rank.",
            "Training does not support pipeline parallelism.",
            "Use prepare_pippy for inference, or another axis of ParallelismConfig.",
        )

    def _place(self, axis: Axis) -> int:
        if self.parallelism_config is None:
            raise NoState(
                f"Cannot read the rank on the mesh axis {axis.value!r}.",
                "This run has no ParallelismConfig.",
                "Give parallelism_config=ParallelismConfig(...) to the Accelerator.",
            )
        mesh = self.torch_device_mesh
        if mesh is None or axis.value not in (mesh.mesh_dim_names or ()):
            return 0
        return int(mesh.get_local_rank(axis.value))

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Context manager for forward and backward in which each process computes its shard of the sequence.

        The loss inside is the mean over this process's shard. Without context parallelism the block has no effect.

        Args:
            buffers: tensors with a sequence dimension (inputs, targets, positions); inside the block they are sharded.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that are not restored to their full size after the block.

        Raises:
            ShapeMismatch: the sequence length is not divisible by the number of shards.
            NotReady: nothing in the block called `scaled_dot_product_attention`.

        Example:
            >>> with accelerator.maybe_context_parallel([inputs, targets], [1, 1], {inputs, targets}):
            ...     loss = loss_function(model(inputs), targets)
            ...     accelerator.backward(loss)
        """
        parallelism_config = self.parallelism_config
        if parallelism_config is None:
            return nullcontext()
        from accel_plugins.transforms.sequence_sharding import shard_sequences

        handler = parallelism_config.cp_handler
        exchange = "allgather" if handler is None or handler.cp_comm_strategy is None else handler.cp_comm_strategy
        context = self.session.strategy.context
        return shard_sequences(context, buffers, buffer_seq_dims, no_restore_buffers, exchange)
