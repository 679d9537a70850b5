"""The `ParallelismConfig` of a run, and the transforms of the model that it and other options require."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.errors import Conflict, NotOffered
from accel_state.run_state import parallelism_config_from_environment

if TYPE_CHECKING:
    from accel_plugins.transform import Transform
    from accel_plugins.transforms.config import TorchTensorParallelPlugin
    from accel_state.current import Process
    from accel_state.mesh import ParallelismConfig
    from accel_torch.options import Options

__all__ = ("parallelism_config_of", "transforms_of")


def parallelism_config_of(options: Options, process: Process) -> ParallelismConfig | None:
    """The `ParallelismConfig` given by argument, by variables, or as the size in a `TorchTensorParallelPlugin`.

    Raises:
        Conflict: two of them contradict each other, or the processes are too few or too many.
    """
    parallelism_config = options.parallelism_config or parallelism_config_from_environment()
    plugin: TorchTensorParallelPlugin | None = options.plugins.get("torch_tp_plugin")
    asked = 1 if plugin is None else _size(plugin)
    if asked > 1 and parallelism_config is None:
        from accel_state.mesh import ParallelismConfig

        # Parameters are sharded over the remaining factor of the world size.
        parallelism_config = ParallelismConfig(tp_size=asked, dp_shard_size=max(process.world_size // asked, 1))
    if parallelism_config is None:
        return None
    if asked not in (1, parallelism_config.tp_size):
        raise Conflict(
            f"Cannot combine TorchTensorParallelPlugin(tp_size={asked}) with "
            f"ParallelismConfig(tp_size={parallelism_config.tp_size}).",
            "Both set the size of tensor parallelism.",
            "Give the size in the ParallelismConfig only.",
        )
    parallelism_config.check_world(process.world_size)
    return parallelism_config


def _size(plugin: TorchTensorParallelPlugin) -> int:
    mesh = plugin.torch_device_mesh
    if plugin.tp_size > 1 or mesh is None:
        return plugin.tp_size
    return int(mesh.size() if mesh.ndim == 1 else mesh["tp"].size())


def transforms_of(options: Options, parallelism_config: ParallelismConfig | None) -> tuple[Transform, ...]:
    """The changes of every model that an Accelerator makes.

    Raises:
        NotOffered: one cannot be made.
    """
    made = list(options.transforms)
    if parallelism_config is not None and parallelism_config.tp_enabled:
        made.append(_tensor_parallel(options, parallelism_config))
    if options.plugins.get("dynamo_plugin") is not None:
        from accel_plugins.transforms.compile import Compile

        made.append(Compile(options.plugins["dynamo_plugin"]))
    return tuple(made)


def _tensor_parallel(options: Options, parallelism_config: ParallelismConfig) -> Transform:
    from accel_plugins.transforms.tensor_parallel import TensorParallel

    if parallelism_config.tp_handler is not None and parallelism_config.tp_handler.enable_async_tp:
        raise NotOffered(
            "Cannot use TorchTensorParallelConfig(enable_async_tp=True).",
            "It needs symmetric memory between the GPUs and a compiler pass of torch that is not stable.",
            "Leave it out.",
        )
    plugin: TorchTensorParallelPlugin | None = options.plugins.get("torch_tp_plugin")
    return TensorParallel(plugin.parallelize_plan, plugin.torch_device_mesh) if plugin else TensorParallel()
