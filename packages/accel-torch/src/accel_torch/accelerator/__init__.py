"""The Accelerator: one object that makes a plain training loop run anywhere.

Its mixins (`process`, `mesh`, `data`, `training`, `saving`, `tracking`, `attributes`) document the interface and
delegate to the lower packages and to the other modules of this package.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_data.config import DataLoaderConfiguration
from accel_plugins.checkpoint.config import ProjectConfiguration
from accel_state.gradient import GradientAccumulationPlugin
from accel_state.kwargs import KwargsHandler
from accel_state.labels import PrecisionType, RNGType
from accel_torch.accelerator.attributes import AttributesMixin
from accel_torch.accelerator.data import DataMixin
from accel_torch.accelerator.mesh import MeshMixin
from accel_torch.accelerator.process import ProcessMixin
from accel_torch.accelerator.saving import SavingMixin
from accel_torch.accelerator.tracking import TrackingMixin
from accel_torch.accelerator.training import TrainingMixin
from accel_torch.options import (
    UNSET,
    Options,
    accumulation_plugin,
    backend_config,
    checked_handlers,
    checked_interval,
    checked_placement,
    checked_trackers,
    checked_transforms,
    compile_settings,
    generator_names,
    given_precision,
    goodput_enabled,
    is_run_recorded,
    loader_configuration,
    project_configuration,
    resolve_alias,
    without_none,
)
from accel_torch.start_run import start_session

if TYPE_CHECKING:
    from accel_plugins.transform import Transform
    from accel_plugins.transforms.config import TorchDynamoPlugin, TorchTensorParallelPlugin
    from accel_state.choices import DynamoBackend
    from accel_state.mesh import ParallelismConfig

__all__ = ("Accelerator",)


class Accelerator(ProcessMixin, MeshMixin, DataMixin, TrainingMixin, SavingMixin, TrackingMixin, AttributesMixin):
    """Makes a plain PyTorch training loop run on one process or many, on any device, in any precision.

    Args:
        device_placement: move models and batches to the device.
        split_batches: deprecated; use the field of `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16", "bf16" or "fp8". None reads the environment variable ACCELERATE_MIXED_PRECISION.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: use the CPU even if another device is present.
        dataloader_config: how DataLoaders are sharded, shuffled and moved to the device.
        deepspeed_plugin, fsdp_plugin, megatron_lm_plugin: settings of a backend; giving one selects that backend.
            `deepspeed_plugin` may also be a dict of several plugins by name.
        deepspeed_plugins: an older spelling of `deepspeed_plugin`.
        rng_types: random-number generators that DataLoaders synchronise at the start of each epoch. None synchronises
            the sampler's generator.
        log_with: trackers, by name or as instances.
        project_dir: folder for checkpoints and logs.
        project_config: the same with more settings, such as automatic checkpoint names.
        gradient_accumulation_plugin: gradient accumulation with more settings.
        dispatch_batches, even_batches, use_seedable_sampler: deprecated; use the fields of `DataLoaderConfiguration`.
        step_scheduler_with_optimizer: step a scheduler only when its optimizer steps.
        kwargs_handlers: settings of objects that the Accelerator creates, such as `AutocastKwargs` for autocast.
        dynamo_backend: compile models with this backend of `torch.compile`.
        dynamo_plugin: the same with more settings.
        torch_tp_plugin: how tensor parallelism shards the layers.
        parallelism_config: the sizes of the mesh axes, such as data and tensor parallelism.
        transforms: further changes that `prepare` applies to every model, such as `ActivationCheckpoint()`.
        backend: name of the backend that trains the models, as `accel backends` lists it.
        check_replicas_every: the number of optimizer steps between two checks that replicas agree. A check compares
            weights, random-number generators and DataLoader positions, and raises `ReplicasDiffer`, which names the
            first difference. None compares a sample of the weights once, in the background after the second step, and
            warns about a difference. 0 disables all checks.
        straggler_report: at `end_training`, print and log how each process spent its time, which shows the process that
            the others wait for.
        goodput: record how each process spends its time, over all restarts, in the folder "goodput" of `project_dir`.
            `accel runs goodput` shows the record. None records if the run was started with `accel launch
            --project_dir`.

    Raises:
        SettingError: an argument or an environment variable has an invalid value.
        Conflict: two arguments contradict each other, or an earlier Accelerator of this process started the run with
            others.
        NotOffered: the device or the backend does not support what an argument selects.

    Example:
        >>> from accel_torch import Accelerator
        >>> accelerator = Accelerator()
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     loss = loss_function(model(inputs), targets)
        ...     accelerator.backward(loss)
        ...     optimizer.step()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = UNSET,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        dispatch_batches: bool | None = UNSET,
        even_batches: bool = UNSET,
        use_seedable_sampler: bool = UNSET,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        *,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        backend: str | None = None,
        transforms: Sequence[Transform] | None = None,
        check_replicas_every: int | None = None,
        straggler_report: bool = False,
        goodput: bool | None = None,
    ) -> None:
        moved = {
            "split_batches": split_batches,
            "dispatch_batches": dispatch_batches,
            "even_batches": even_batches,
            "use_seedable_sampler": use_seedable_sampler,
        }
        plugins = {
            "deepspeed_plugin": resolve_alias(
                "deepspeed_plugin", deepspeed_plugin, "deepspeed_plugins", deepspeed_plugins
            ),
            "fsdp_plugin": fsdp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
        }
        settings = {
            "dynamo_plugin": compile_settings(dynamo_plugin, dynamo_backend),
            "torch_tp_plugin": torch_tp_plugin,
        }
        loader = loader_configuration(dataloader_config, moved)
        project = project_configuration(project_config, project_dir)
        trackers = checked_trackers(log_with, project.logging_dir)
        self.session = start_session(
            Options(
                cpu=cpu,
                mixed_precision=given_precision(mixed_precision),
                backend=backend,
                backend_config=backend_config(plugins),
                device_placement=checked_placement(device_placement),
                loader=loader,
                splits_by_argument=split_batches is True,
                project=project,
                accumulation=accumulation_plugin(gradient_accumulation_plugin, gradient_accumulation_steps, loader),
                rng_types=generator_names(rng_types),
                log_with=trackers,
                step_scheduler_with_optimizer=step_scheduler_with_optimizer,
                handlers=checked_handlers(kwargs_handlers),
                backends=without_none(plugins),
                plugins=without_none(settings),
                parallelism_config=parallelism_config,
                transforms=checked_transforms(transforms),
                check_replicas_every=checked_interval(check_replicas_every),
                straggler_report=straggler_report,
                goodput=goodput_enabled(goodput),
                records_run=is_run_recorded(project, project_dir, trackers),
            )
        )
        project = self.session.options.project
        if project.remote is not None:
            from accel_torch.folders import automatic_folder
            from accel_torch.remote import probe

            probe(self.session, automatic_folder(project))

    def __repr__(self) -> str:
        return (
            f"Accelerator({self.distributed_type.value}, process {self.process_index} of {self.num_processes}, "
            f"{self.device}, mixed_precision={self.mixed_precision!r})"
        )
