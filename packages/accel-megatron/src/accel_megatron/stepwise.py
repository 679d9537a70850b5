"""Set up Megatron-LM step by step, as scripts for the original do; `prepare` does all steps at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from accel_megatron import parallel
from accel_megatron.objects import MegatronLMDummyDataLoader, MegatronLMOptimizerWrapper
from accel_state.run_state import AcceleratorState

__all__ = (
    "finish_mpu_init",
    "initialize",
    "model_provider_func",
    "prepare_megatron_loader",
    "prepare_model_optimizer_scheduler",
    "prepare_optimizer",
    "prepare_scheduler",
)


def initialize(
    accelerator: Any,
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add settings, create the process groups, and seed the generators.

    Args:
        accelerator: an object with `state.megatron_lm_plugin`.
        extra_args_provider: adds arguments to a parser; their defaults become settings.
        args_defaults: settings under Megatron-LM's names; the plugin's settings have precedence.

    Raises:
        NotOffered: there is no CUDA device.
    """
    parallel.demand_cuda()
    plugin = accelerator.state.megatron_lm_plugin
    further = dict(args_defaults or {})
    if extra_args_provider is not None:
        parser = argparse.ArgumentParser(add_help=False)
        further.update(vars((extra_args_provider(parser) or parser).parse_args([])))
    plugin.megatron_lm_default_args = {**further, **plugin.megatron_lm_default_args}
    parallel.create_groups(plugin)
    parallel.seed(plugin)


def finish_mpu_init() -> None:
    """Create the process groups of the run, and seed the generators.

    Raises:
        NotOffered: there is no CUDA device.
    """
    parallel.demand_cuda()
    plugin = AcceleratorState().megatron_lm_plugin
    parallel.create_groups(plugin)
    parallel.seed(plugin)


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> Any:
    """Create the part of the model that one pipeline stage trains.

    Args:
        pre_process: whether the part includes the embedding.
        post_process: whether the part includes the head.
        add_encoder: ignored, because encoder and decoder are in one stage.
        add_decoder: ignored, see `add_encoder`.
    """
    from accel_megatron import building

    plugin = AcceleratorState().megatron_lm_plugin
    return building.provide_model(plugin, building.transformer_config(plugin), pre_process, post_process)


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[Any, Any, Any]:
    """Create this process's model parts, their optimizer and their scheduler from the settings.

    Args:
        accelerator: an object with `device` and `state.megatron_lm_plugin`.
    """
    from accel_megatron import building

    plugin = accelerator.state.megatron_lm_plugin
    parts = building.build_parts(plugin, accelerator.device)
    optimizer = building.build_optimizer(plugin, parts)
    return parts, optimizer, building.build_schedule(plugin, optimizer)


def prepare_megatron_loader(accelerator: Any, dataloader: Any) -> Any:
    """Prepare a loader for this process's samples; for a placeholder, create Megatron-LM's three iterators.

    Args:
        accelerator: the Accelerator that prepares the loader.
        dataloader: a `DataLoader`, or a `MegatronLMDummyDataLoader`.
    """
    if isinstance(dataloader, MegatronLMDummyDataLoader):
        return dataloader.build_train_valid_test_data_iterators(accelerator)
    return accelerator.prepare_data_loader(dataloader)


def prepare_optimizer(accelerator: Any, model: Any) -> Any:
    """Create Megatron-LM's optimizer for the parts of a model.

    Args:
        accelerator: an object with `state.megatron_lm_plugin`.
        model: the parts, as returned by `prepare_model_optimizer_scheduler`.
    """
    from accel_megatron import building

    parts = list(model) if isinstance(model, (list, tuple)) else [model]
    return building.build_optimizer(accelerator.state.megatron_lm_plugin, parts)


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """Create a scheduler for Megatron-LM's optimizer.

    Args:
        accelerator: an object with `state.megatron_lm_plugin`.
        optimizer: Megatron-LM's optimizer, or its wrapper.
        scheduler: a `MegatronLMDummyScheduler`, or a torch scheduler.
    """
    from accel_megatron import building

    inner = optimizer.optimizer if isinstance(optimizer, MegatronLMOptimizerWrapper) else optimizer
    return building.prepare_schedule(accelerator.state.megatron_lm_plugin, inner, scheduler)
