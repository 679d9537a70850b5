"""How the processes of a run are arranged along axes, and which changes of the model that and other options ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.errors import Conflict, NotOffered
from accel_state.run_state import parallelism_config_from_environment

if TYPE_CHECKING:
    from accel_plugins.transform import Transform
    from accel_plugins.transforms.tensor_parallel_config import TorchTensorParallelPlugin
    from accel_state.current import Process
    from accel_state.mesh import ParallelismConfig
    from accel_torch.options import Options

__all__ = ("arrangement", "transforms_of")


def arrangement(options: Options, process: Process) -> ParallelismConfig | None:
    """The arrangement asked for by argument, by variables, or by the size in a `TorchTensorParallelPlugin`.

    Raises:
        Conflict: two of them contradict each other, or the processes are too few or too many.
    """
    arranged = options.arranged or parallelism_config_from_environment()
    plugin: TorchTensorParallelPlugin | None = options.plugins.get("torch_tp_plugin")
    asked = 1 if plugin is None else _size(plugin)
    if asked > 1 and arranged is None:
        from accel_state.mesh import ParallelismConfig

        # What tensor parallelism leaves of the processes divides the parameters.
        arranged = ParallelismConfig(tp_size=asked, dp_shard_size=max(process.world_size // asked, 1))
    if arranged is None:
        return None
    if asked not in (1, arranged.tp_size):
        raise Conflict(
            f"TorchTensorParallelPlugin(tp_size={asked}) and ParallelismConfig(tp_size={arranged.tp_size}) were given.",
            "They are the same number.",
            "Give the size in the ParallelismConfig only.",
        )
    arranged.check_world(process.world_size)
    return arranged


def _size(plugin: TorchTensorParallelPlugin) -> int:
    mesh = plugin.torch_device_mesh
    if plugin.tp_size > 1 or mesh is None:
        return plugin.tp_size
    return int(mesh.size() if mesh.ndim == 1 else mesh["tp"].size())


def transforms_of(options: Options, arranged: ParallelismConfig | None) -> tuple[Transform, ...]:
    """The changes of every model that an Accelerator makes.

    Raises:
        NotOffered: one cannot be made.
    """
    made = list(options.transforms)
    if arranged is not None and arranged.tp_enabled:
        made.append(_tensor_parallel(options, arranged))
    if options.plugins.get("dynamo_plugin") is not None:
        from accel_plugins.transforms.compile import Compile

        made.append(Compile(options.plugins["dynamo_plugin"]))
    return tuple(made)


def _tensor_parallel(options: Options, arranged: ParallelismConfig) -> Transform:
    from accel_plugins.transforms.tensor_parallel import TensorParallel

    if arranged.tp_handler is not None and arranged.tp_handler.enable_async_tp:
        raise NotOffered(
            "TorchTensorParallelConfig(enable_async_tp=True) was asked for.",
            "It needs symmetric memory between the GPUs and a compiler pass of torch that is not stable.",
            "Leave it out.",
        )
    plugin: TorchTensorParallelPlugin | None = options.plugins.get("torch_tp_plugin")
    return TensorParallel(plugin.parallelize_plan, plugin.torch_device_mesh) if plugin else TensorParallel()
