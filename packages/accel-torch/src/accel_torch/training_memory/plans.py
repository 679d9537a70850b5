"""Plans of training: a backend, parallelism, micro-batches; and how to launch each plan.

The backends are those whose manifests declare `memory_plans`, including third-party backends.
"""

from __future__ import annotations

import importlib
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from accel_plugins import resolve
from accel_plugins.manifest import Axis, Manifest
from accel_plugins.memory_plans import MemoryPlans
from accel_state.errors import PluginError, SettingError
from accel_state.library import stack_level
from accel_state.settings.schema import Setting, settings_of

__all__ = (
    "PlannedBackend",
    "TrainingPlan",
    "config_values",
    "launch_command",
    "needs_in_script",
    "plan_settings",
    "planned_backend",
    "planned_backends",
)


class PlannedBackend(NamedTuple):
    """A backend whose memory is estimated.

    Args:
        manifest: the backend's manifest.
        plans: its `memory_plans`.
    """

    manifest: Manifest
    plans: MemoryPlans


@cache
def planned_backends() -> Mapping[str, PlannedBackend]:
    """The installed backends that can run and have plans, by name and in order of priority.

    A backend whose plans cannot be imported is omitted with a warning.
    """
    manifests = [backend.value for backend in resolve.BACKENDS.loaded() if backend.value and not backend.obstacle]
    planned = {}
    for manifest in sorted(manifests, key=lambda one: (one.priority, one.name)):
        if manifest.memory_plans:
            try:
                planned[manifest.name] = PlannedBackend(manifest, resolve.memory_plans(manifest))
            except PluginError as error:
                warnings.warn(str(error), stacklevel=stack_level())
    return planned


def planned_backend(name: str) -> PlannedBackend:
    """A backend by its name.

    Raises:
        SettingError: there is no backend of that name with plans.
    """
    known = planned_backends()
    if name not in known:
        raise SettingError(
            f"Cannot estimate the memory of the backend {name!r}.",
            "It is not installed, or its Manifest has no memory_plans.",
            f"Use one of {', '.join(known)}.",
        )
    return known[name]


@dataclass(frozen=True)
class TrainingPlan:
    """How a number of processes train.

    Args:
        processes: the number of processes.
        backend: name of a backend with `memory_plans`.
        variant: a variant of the backend's plans, such as "offload".
        tp: the size of tensor parallelism.
        recompute: recompute the activations of blocks in backward.
        micro_batch: samples of one forward; 0 for those of the example batch.
        accumulation: micro-batches of one step.
        mixed_precision: "no", "bf16" or "fp16".
        device: "cpu", or another device, on which optimizers update all parameters at once.
    """

    processes: int = 1
    backend: str = "single"
    variant: str = ""
    tp: int = 1
    recompute: bool = False
    micro_batch: int = 0
    accumulation: int = 1
    mixed_precision: str = "no"
    device: str = "cuda"

    @property
    def data_processes(self) -> int:
        """The number of processes that read different samples."""
        return self.processes // self.tp

    @property
    def name(self) -> str:
        """A short name of the plan."""
        parts = [self.backend, self.variant, f"tp={self.tp}" if self.tp > 1 else "", self.recompute and "recompute"]
        return " + ".join(part for part in parts if part)


def plan_settings(plan: TrainingPlan, blocks: Sequence[str]) -> dict[str, Any]:
    """The fields that a plan sets in its backend's settings class.

    Args:
        plan: the plan.
        blocks: class names of the model's repeated blocks.
    """
    manifest, plans = planned_backend(plan.backend)
    return {**manifest.settings, **plans.settings(plan.variant, blocks, plan.recompute)}


def config_values(plan: TrainingPlan, blocks: Sequence[str]) -> dict[str, Any]:
    """The values of a config file for a plan, by dotted key."""
    return {key: value for key, _, value in _launch_values(plan, blocks)}


def launch_command(plan: TrainingPlan, blocks: Sequence[str], script: str = "train.py") -> str:
    """The command that launches a script and its arguments under a plan."""
    words = ["accel", "launch"]
    for _, flags, _ in _launch_values(plan, blocks):
        words += flags
    return f"{shlex.join(words)} {script}"


def _launch_values(plan: TrainingPlan, blocks: Sequence[str]) -> Iterator[tuple[str, list[str], Any]]:
    """(key of the config file, words of the command line, value) of each setting in the launch of a plan."""
    manifest, _ = planned_backend(plan.backend)
    on_cpu = plan.device == "cpu"
    kind = "NO" if plan.processes == 1 else "MULTI_CPU" if on_cpu else "MULTI_GPU"
    if manifest.switch is not None:
        label = manifest.name if manifest.label is None else manifest.label.value
        yield "distributed_type", [str(manifest.switch.flag)], label
    else:
        yield "distributed_type", ["--multi_gpu"] if kind == "MULTI_GPU" else [], kind
        yield "backend", ["--backend", manifest.name], manifest.name
    if on_cpu:
        yield "use_cpu", ["--cpu"], True
    for name, value in (
        ("num_processes", plan.processes),
        ("mixed_precision", plan.mixed_precision),
        ("gradient_accumulation_steps", plan.accumulation),
    ):
        yield name, [f"--{name}", str(value)], value
    for known, value in _launch_settings(manifest, plan_settings(plan, blocks)):
        text = known.type.format(value)
        yield str(known.key), [str(known.flag), text], value if isinstance(value, (bool, int, float)) else text
    if plan.tp > 1:
        sizes = {Axis.TENSOR: plan.tp}
        if plan.data_processes > 1:
            sizes[Axis.SHARD if Axis.SHARD in manifest.axes else Axis.REPLICATE] = plan.data_processes
        for axis, size in sizes.items():
            name = f"parallelism_config_{axis.value}_size"
            words = ["--use_parallelism_config"] if axis is Axis.TENSOR else []
            yield f"parallelism_config.{name}", [*words, f"--{name}", str(size)], size


def _launch_settings(manifest: Manifest, values: Mapping[str, Any]) -> Iterator[tuple[Setting, Any]]:
    """The definitions of fields of a settings class, with their values."""
    if not manifest.config:
        return
    module, _, name = manifest.config.partition(":")
    known = settings_of(getattr(importlib.import_module(module), name))
    for field, value in values.items():
        yield known[field], value


def needs_in_script(plan: TrainingPlan) -> str:
    """What the script itself must set for a plan; empty if the launch sets everything."""
    if plan.recompute and not planned_backend(plan.backend).plans.recomputes:
        return "Accelerator(transforms=[accel_plugins.transforms.activation_checkpoint.ActivationCheckpoint()])"
    return ""
