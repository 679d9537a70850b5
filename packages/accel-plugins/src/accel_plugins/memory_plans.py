"""How a backend trains, for estimates of memory before a launch.

`accel estimate-memory --training` runs a step of every plan as one rank, with tensors that have shapes and no values,
and with collectives that send nothing. It lists a backend whose manifest names a subclass of `MemoryPlans`:

    Manifest(name="fancy", strategy=..., memory_plans="accel_backend_fancy.plans:FancyPlans")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

__all__ = ("MemoryPlans", "Overhead", "SinglePlans")


class Overhead(NamedTuple):
    """What a strategy adds to a model of several processes.

    Args:
        held: tensors that the strategy holds from `prepare` to the end of the training, such as buckets of gradients.
        bytes_moved: bytes that the collectives of one step read and write, except those that forward and backward of
            the model call.
    """

    held: Sequence[Tensor] = ()
    bytes_moved: int = 0


class MemoryPlans:
    """The plans of a backend; the defaults are those of data parallelism, whose processes hold the whole model.

    Tensor parallelism is a part of further plans where the manifest has `Axis.TENSOR`. Activation checkpointing of
    repeated blocks is a part of further plans of every backend.
    """

    variants: ClassVar[tuple[str, ...]] = ("",)
    """Ways of training with the backend, each a plan of its own; "" has no name beside that of the backend."""

    recomputes: ClassVar[bool] = False
    """Whether `settings` turns activation checkpointing on; elsewhere the script adds the transform."""

    def trains_on(self, processes: int) -> bool:
        """Whether the backend has plans for a number of processes."""
        return processes > 1

    def keeps_states_on_host(self, variant: str) -> bool:
        """Whether the host's memory has parameters, gradients and states of the optimizer between their uses."""
        return False

    def settings(self, variant: str, blocks: Sequence[str], recompute: bool) -> Mapping[str, Any]:
        """Fields of the settings class that a plan sets; its launch flags and its config file follow from them.

        Args:
            variant: one of `variants`.
            blocks: names of the classes of the blocks that the model repeats.
            recompute: whether activations of these blocks are computed again in backward.
        """
        return {}

    def parallelize(
        self, model: Module, mesh: DeviceMesh, settings: Mapping[str, Any], mixed_precision: str
    ) -> Overhead:
        """Parallelize a model over several processes, in place, as `Strategy.setup` does.

        It may not read values of tensors. Tensor parallelism was applied before.

        Args:
            model: the model, on the CPU.
            mesh: the processes that read different samples; 1-dimensional.
            settings: those of `settings` and of the manifest.
            mixed_precision: "no", "bf16" or "fp16".
        """
        from torch import empty_like

        # An all-reduce reads and writes its bucket.
        buckets = [empty_like(parameter) for parameter in model.parameters() if parameter.requires_grad]
        return Overhead(buckets, 2 * sum(bucket.nbytes for bucket in buckets))


class SinglePlans(MemoryPlans):
    """The plan of one process, which has no others."""

    def trains_on(self, processes: int) -> bool:
        return processes == 1
