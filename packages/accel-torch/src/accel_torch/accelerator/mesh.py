"""The mesh of an Accelerator: its axes, and the coordinates of this process on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from accel_plugins.manifest import Axis
from accel_state.errors import NoState, NotOffered
from accel_torch.members import AcceleratorMembers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig

__all__ = ("MeshMixin",)


class _AbsentAttribute(NotOffered, AttributeError):
    """Raised by an attribute that no run has; `hasattr` returns False then."""


class MeshMixin(AcceleratorMembers):
    """Axes of the run."""

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The axes of the run, or None."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh that the devices of the run form, or None."""
        mesh: DeviceMesh | None = self.state.device_mesh
        return mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by the second version of FSDP."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are divided in a way that goes with other axes."""
        return self.is_fsdp2

    @property
    def tensor_parallel_rank(self) -> int:
        """Place of this process among those that divide the tensors of a layer; 0 where nobody does.

        Raises:
            NoState: the run has no ParallelismConfig; `hasattr` returns False.
        """
        return self._place(Axis.TENSOR)

    @property
    def data_parallel_rank(self) -> int:
        """Place of the group of this process among the copies of the model; see `tensor_parallel_rank`."""
        return self._place(Axis.REPLICATE)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Place of this process among those that divide the parameters; see `tensor_parallel_rank`."""
        return self._place(Axis.SHARD)

    @property
    def context_parallel_rank(self) -> int:
        """Place of this process among those that divide the sequence; see `tensor_parallel_rank`."""
        return self._place(Axis.CONTEXT)

    @property
    def sequence_parallel_rank(self) -> int:
        """Place of this process among those that divide the heads of attention; see `tensor_parallel_rank`."""
        return self._place(Axis.SEQUENCE)

    @property
    def pipeline_parallel_rank(self) -> int:
        """Place of this process in a pipeline.

        Raises:
            NotOffered: always; training runs in no pipeline. `hasattr` returns False.
        """
        raise _AbsentAttribute(
            "Cannot read accelerator.pipeline_parallel_rank.",
            "Training is not divided into a pipeline.",
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
        """A block for forward and backward in which each process works on its part of the sequence.

        Where no axis divides the sequence, it changes nothing. The loss inside is the mean over this process's part.

        Args:
            buffers: tensors with a sequence (inputs, targets, positions); inside of the block they are cut.
            buffer_seq_dims: dim of the sequence in each of them.
            no_restore_buffers: those that need not be whole again afterwards.

        Raises:
            ShapeMismatch: the sequence cannot be cut evenly.
            NotReady: nothing in the block used `scaled_dot_product_attention`.

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
        context = self._backend.strategy.context
        return shard_sequences(context, buffers, buffer_seq_dims, no_restore_buffers, exchange)
