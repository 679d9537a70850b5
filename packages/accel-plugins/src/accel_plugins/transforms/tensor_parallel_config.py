"""Settings of tensor parallelism; plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any

from accel_state.errors import Conflict, SettingError

__all__ = ("TorchTensorParallelPlugin",)


@dataclass
class TorchTensorParallelPlugin:
    """How tensors of layers are divided among processes.

    Args:
        tp_size: processes among which each tensor is divided; 1 leaves it to `ParallelismConfig`.
        torch_device_mesh: mesh whose axis "tp", or only axis, is used; made from the sizes when None.
        parallelize_plan: by name of a module, with `*` for any part of a name, how it is divided: "colwise",
            "rowwise", "colwise_rep", "rowwise_rep", "sequence_parallel" or a `ParallelStyle` of torch. When None, the
            model's own plan (`tp_plan`).
        tensor_parallel_degree: another name of `tp_size`.

    Raises:
        SettingError: the size is not a number of processes, or the plan not a mapping.
        Conflict: both names of the size were given and differ.

    Example:
        >>> plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        >>> plugin = TorchTensorParallelPlugin(tp_size=2, parallelize_plan=plan)
    """

    tp_size: int = 1
    torch_device_mesh: Any = None
    parallelize_plan: Mapping[str, Any] | None = None
    tensor_parallel_degree: InitVar[int | None] = None

    def __post_init__(self, tensor_parallel_degree: int | None) -> None:
        if tensor_parallel_degree is not None:
            if self.tp_size not in (1, tensor_parallel_degree):
                raise Conflict(
                    f"Cannot use TorchTensorParallelPlugin(tp_size={self.tp_size!r}, "
                    f"tensor_parallel_degree={tensor_parallel_degree!r}).",
                    "They are two names of one number.",
                    "Give one of them.",
                )
            self.tp_size = tensor_parallel_degree
        if not isinstance(self.tp_size, int) or isinstance(self.tp_size, bool) or self.tp_size < 1:
            raise SettingError(
                f"Cannot use TorchTensorParallelPlugin(tp_size={self.tp_size!r}).",
                "It is a number of processes.",
                "Pass an int of at least 1.",
            )
        if self.parallelize_plan is not None and not isinstance(self.parallelize_plan, Mapping):
            raise SettingError(
                f"Cannot use TorchTensorParallelPlugin(parallelize_plan={self.parallelize_plan!r}).",
                "A plan maps names of modules to styles of sharding.",
                "Give a dict such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}.",
            )
