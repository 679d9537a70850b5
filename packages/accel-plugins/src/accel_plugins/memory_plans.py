"""How a backend trains, for estimates of memory before a launch.

`accel estimate-memory --training` runs a step of every plan as one rank, with meta tensors and with collectives that
send nothing. It lists a backend if its manifest names a subclass of `MemoryPlans`:

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
    """What a strategy adds to the memory of a model on several processes.

    Args:
        held: tensors that exist from `prepare` to the end of training, such as gradient buckets.
        bytes_moved: bytes that the collectives of one step read and write, without those that forward and backward
            call.
    """

    held: Sequence[Tensor] = ()
    bytes_moved: int = 0


class MemoryPlans:
    """The plans of a backend; the defaults describe data parallelism with the whole model on each process.

    If the manifest has `Axis.TENSOR`, further plans include tensor parallelism. Every backend has further plans with
    activation checkpointing of repeated blocks.
    """

    variants: ClassVar[tuple[str, ...]] = ("",)
    """Names of variants, such as sharding strategies; each is a separate plan. "" adds nothing to the backend's
    name."""

    recomputes: ClassVar[bool] = False
    """Whether `settings` turns activation checkpointing on; if not, the script adds the transform."""

    def trains_on(self, processes: int) -> bool:
        """Whether the backend has plans for this number of processes."""
        return processes > 1

    def keeps_states_on_host(self, variant: str) -> bool:
        """Whether parameters, gradients and optimizer state are in host memory between their uses."""
        return False

    def settings(self, variant: str, blocks: Sequence[str], recompute: bool) -> Mapping[str, Any]:
        """Fields of the settings class that a plan sets; they also determine its launch flags and config file.

        Args:
            variant: one of `variants`.
            blocks: class names of the model's repeated blocks.
            recompute: whether activations of these blocks are computed again in backward.
        """
        return {}

    def parallelize(
        self, model: Module, mesh: DeviceMesh, settings: Mapping[str, Any], mixed_precision: str
    ) -> Overhead:
        """Parallelize a model over several processes, in place, as `Strategy.setup` does.

        It must not read values of tensors. Tensor parallelism is applied already.

        Args:
            model: the model, on the CPU.
            mesh: 1-dimensional mesh of the processes that read different samples.
            settings: the fields from `settings` and from the manifest.
            mixed_precision: "no", "bf16" or "fp16".
        """
        from torch import empty_like

        # An all-reduce reads and writes its bucket.
        buckets = [empty_like(parameter) for parameter in model.parameters() if parameter.requires_grad]
        return Overhead(buckets, 2 * sum(bucket.nbytes for bucket in buckets))


class SinglePlans(MemoryPlans):
    """The plan of a single process."""

    def trains_on(self, processes: int) -> bool:
        return processes == 1
