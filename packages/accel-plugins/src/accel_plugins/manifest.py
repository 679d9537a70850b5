"""The manifest of a backend: plain data that is read without importing torch or the backend.

Entry points of the group `accel.backends` name `Manifest` objects. A manifest declares all that other code must know
about a backend, so no code compares backend names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from accel_state.errors import NotOffered, PluginError
from accel_state.labels import DistributedType
from accel_state.plugins import check_targets
from accel_state.settings.environ import read_setting
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import Setting

__all__ = (
    "ENGINE_CAPABILITIES",
    "OLDEST_PROTOCOL",
    "PROTOCOL",
    "SAVED_KINDS",
    "Axis",
    "Capabilities",
    "Manifest",
    "ObjectKind",
)

PROTOCOL: Final = 3
"""Version of the backend interface that this release implements."""

OLDEST_PROTOCOL: Final = 3
"""The oldest version that this release supports."""

_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


class ObjectKind(str, Enum):
    """A kind of object that `prepare` accepts and a checkpoint contains."""

    MODEL = "model"
    """A `torch.nn.Module`."""
    OPTIMIZER = "optimizer"
    """A `torch.optim.Optimizer`."""
    SCHEDULER = "scheduler"
    """A learning-rate scheduler: an `LRScheduler`, or any object with `step` and `load_state_dict`."""
    LOADER = "loader"
    """A `DataLoader`; a checkpoint contains its position, and no strategy saves it."""


class Axis(str, Enum):
    """An axis of the device mesh that accel itself knows. A backend may have others, by names of its own."""

    REPLICATE = "dp_replicate"
    """Each process has the model, and other samples."""
    SHARD = "dp_shard"
    """Parameters, gradients and optimizer states are sharded, and processes have other samples."""
    CONTEXT = "cp"
    """Torch shards the sequence of the same samples."""
    SEQUENCE = "sp"
    """The sequence of the same samples is sharded, and in attention the heads."""
    TENSOR = "tp"
    """Each tensor of a layer is sharded; samples are the same."""


SAVED_KINDS: Final = (ObjectKind.MODEL, ObjectKind.OPTIMIZER, ObjectKind.SCHEDULER)
"""The kinds of objects for which `Strategy.save` and `Strategy.load` are called, in this order."""


class Capabilities(NamedTuple):
    """What a backend can do, what it does itself, and when; the defaults are those of plain torch in one process.

    Code that needs a capability asks for it, never for the name of a backend. The kit skips the tests of what is
    missing.

    Args:
        own_accumulation: the engine accumulates gradients itself, and divides the loss.
        own_precision: the engine casts and scales itself; no autocast and no scaler of the run is used.
        own_clipping: the engine clips gradients by the norm in its settings.
        own_compile: the engine compiles models itself.
        own_sequence_parallelism: the engine shards sequences itself.
        no_sync: `no_sync` holds back the synchronisation of gradients.
        clip_value: gradients can be clipped by value.
        join: processes may run out of batches at different times.
        average_parameters: parameters can be averaged over the processes, as LocalSGD does.
        state_dict: the weights of a model can be read and loaded.
        exact_resume: a resumed run continues bit for bit.
        equal_replicas: after every optimizer step all processes have the same weights. Strategies of local steps, such
            as local SGD and DiLoCo, lack it: their weights differ between two averages.
        exact_gradients: complete gradients are those of one process with the global batch, and with `equal_replicas` so
            are the weights after a step. A strategy that sends compressed gradients lacks it, if its settings do not
            switch that off by default.
        unused_parameters: some processes may have no gradient of a parameter of which others have one, such as of a
            branch that only some batches take. Engines that wait for all gradients lack it.
        loss_in_forward: in training, forward of a prepared model takes what the loss needs, computes loss and gradients
            together, as schedules of pipelines do, and returns the loss. `backward` of this loss then does nothing, so
            the backend needs `own_accumulation` as well.
        whole_model: the model that `Strategy.unwrap` returns has all its weights, or shards of them as DTensors.
            Backends of which each process has other layers lack it, and `unwrap_model` is refused.
        several_models: several models can be trained in one run.
        fp16: the backend trains in fp16.
        local_passes: forward and backward under `no_sync` call no collectives, so that one process may stop in the
            middle. The first forward may still broadcast buffers before it computes anything.
        partial_gradients: the gradients of an unfinished accumulation window are in `parameter.grad`, so that a
            checkpoint can contain them.
        collective_save: every process must call `save`; otherwise only those that write files call it. If set, save
            hooks of the user do not receive the weights, because a hook that removes weights on one process would
            remove them for all.
        async_save: a collective `save` may run in another thread during training. Its collectives need a separate
            process group.
        per_parameter_sharding: parameters are gathered one by one, so that a precision may gather them in a smaller
            dtype.
        distributed_models: models that arrive distributed, with DTensors for parameters, are accepted as they are.
        syncs_in_own_forward: backward synchronises gradients only after a forward through the module that `setup`
            returned.
        autocast_before_wrap: autocast is set up before the strategy wraps the model, otherwise after.
        compile_before_wrap: whole models are compiled before the strategy wraps them, otherwise after.
        compiles_blocks: by default, `torch.compile` compiles the model's repeated blocks before the strategy wraps it;
            False compiles whole models.
        elastic: the number of processes may change between two optimizer steps. The loaders that `Strategy.wrap_loader`
            receives then have a global order, and `Strategy.share_of_batch` weights their batches.
    """

    own_accumulation: bool = False
    own_precision: bool = False
    own_clipping: bool = False
    own_compile: bool = False
    own_sequence_parallelism: bool = False
    no_sync: bool = True
    clip_value: bool = True
    join: bool = True
    average_parameters: bool = True
    state_dict: bool = True
    exact_resume: bool = True
    equal_replicas: bool = True
    exact_gradients: bool = True
    unused_parameters: bool = True
    loss_in_forward: bool = False
    whole_model: bool = True
    several_models: bool = True
    fp16: bool = True
    local_passes: bool = True
    partial_gradients: bool = True
    collective_save: bool = False
    async_save: bool = False
    per_parameter_sharding: bool = False
    distributed_models: bool = False
    syncs_in_own_forward: bool = False
    autocast_before_wrap: bool = True
    compile_before_wrap: bool = False
    compiles_blocks: bool = False
    elastic: bool = False


ENGINE_CAPABILITIES: Final = Capabilities(
    own_accumulation=True,
    own_precision=True,
    own_clipping=True,
    no_sync=False,
    clip_value=False,
    join=False,
    average_parameters=False,
    several_models=False,
    unused_parameters=False,
    local_passes=False,
    partial_gradients=False,
    collective_save=True,
)
"""Those of a backend whose engine owns the training step: it accumulates, casts, scales and clips for one model."""

_REFUSALS: Final = {
    "average_parameters": (
        "Cannot average parameters over the processes (LocalSGD)",
        "This backend itself keeps the parameters equal, or each process has a different shard of them.",
        "Use the backend 'ddp', or LocalSGD(..., enabled=False).",
    ),
    "clip_value": (
        "Cannot clip gradients by value (clip_grad_value_)",
        "This backend clips by norm only.",
        "Use clip_grad_norm_, or set gradient_clipping in its settings.",
    ),
    "fp16": (
        "Cannot train in fp16 (mixed_precision='fp16')",
        "It does not scale the loss so that small gradients stay above zero.",
        "Use mixed_precision='bf16' or 'no', or another backend.",
    ),
    "whole_model": (
        "Cannot unwrap the model (unwrap_model)",
        "Each process has only some of its layers, and the others would have old weights.",
        "Use get_state_dict(model) for the weights, on every process, and load them into a model of the same class.",
    ),
    "distributed_models": (
        "Cannot prepare a model that arrives distributed",
        "Some of its parameters are DTensors already, and this backend distributes whole models itself.",
        "Do not choose a backend, or choose 'fsdp2' (fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)).",
    ),
    "join": (
        "Cannot let processes run out of batches at different times (join_uneven_inputs)",
        "Every step of this backend needs all processes.",
        "Use even_batches=True, or the backend 'ddp'.",
    ),
}
"""The error for a capability that a backend lacks: what failed, why, what to do."""


@dataclass(frozen=True)
class Manifest:
    """The declaration of one backend.

    Args:
        name: the name by which users choose it: at most 48 lower-case letters, digits, `-` and `_`; the first is a
            letter.
        strategy: the `Strategy` subclass as "module:class"; imported when the backend is chosen.
        config: the settings class as "module:class", in a module that never imports torch; empty when there is none.
        label: the value of `distributed_type` that users read; None: the device family's value.
        present: a function as "module:function" that receives the process and returns whether the run needs this
            backend; None if users select it explicitly.
        requires: packages that must be installed.
        capabilities: what it can do, what it does itself, and when.
        together: the kinds of objects that users must pass to `prepare` in one call; one with only some of them is
            refused. A model that is only evaluated is prepared by `prepare_model(model, evaluation_mode=True)`, and
            does not reach the strategy.
        axes: the mesh axes that it supports: members of `Axis`, and names of further axes that this backend has, such
            as "pp". Users give their sizes by `ParallelismConfig(axes={"pp": 2})`; processes along them read the same
            samples, and the mesh has them outside of all others. All combinations of supported axes are supported
            whose members of `Axis` can be combined.
        settings: arguments for its settings class when the user passes no settings object, such as the version.
        families: names of the device families that it supports; empty means all. A launch on the CPU refuses `switch`
            of a backend without "cpu".
        switch: the setting of a launch that chooses this backend, such as `--use_fsdp`; versions of one engine share
            it. Its environment variable passes it to the processes. At most one such setting may be on.
        parameter: the argument of the Accelerator that accepts its settings, such as "fsdp_plugin".
        imports_from_folder: whether the engine's own launcher lets scripts import modules from the working directory,
            so that a launch with this backend does too.
        priority: among the backends for which `present` returns True, the highest priority wins.
        tier: 1: trained in tests on a CPU; 2: trained in tests where a GPU is available; 3: contract tests only; None:
            unknown.
        protocol: the version of this interface that it implements, or (oldest, newest) if it works with several.
            Without one, version 3 is assumed. Write a number, because the value of `PROTOCOL` changes in later
            releases.

    Raises:
        PluginError: the name, a "module:object" reference or the range of versions is malformed, or capabilities
            contradict each other.
    """

    name: str
    strategy: str
    config: str = ""
    label: DistributedType | None = None
    present: str | None = None
    requires: tuple[Requirement, ...] = ()
    capabilities: Capabilities = Capabilities()  # noqa: RUF009 - it is immutable
    together: frozenset[ObjectKind] = frozenset()
    axes: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)
    families: frozenset[str] = frozenset()
    switch: Setting | None = None
    parameter: str = ""
    imports_from_folder: bool = False
    priority: int = 0
    tier: int | None = None
    protocol: int | tuple[int, int] = OLDEST_PROTOCOL

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise PluginError(
                f"Cannot use the backend name {self.name!r}.",
                "A name consists of at most 48 lower-case letters, digits, '-' and '_', and starts with a letter.",
                "Correct `name` in its Manifest.",
            )
        optional = {"config": self.config, "present": self.present}
        check_targets("backend", self.name, {"strategy": self.strategy}, optional)
        if self.capabilities.loss_in_forward and not self.capabilities.own_accumulation:
            raise PluginError(
                f"Cannot use Capabilities(loss_in_forward=True) in the Manifest of the backend {self.name!r}.",
                "Its gradients exist before the loss could be divided by the number of micro-batches, so the backend "
                "has to divide itself.",
                "Set own_accumulation=True too.",
            )
        oldest, newest = self.protocols
        if oldest > newest:
            raise PluginError(
                f"Cannot use protocol={self.protocol!r} in the Manifest of the backend {self.name!r}.",
                "The first version is newer than the second.",
                "Write the oldest version first.",
            )

    @property
    def protocols(self) -> tuple[int, int]:
        """The oldest and the newest version of this interface that the backend works with."""
        return self.protocol if isinstance(self.protocol, tuple) else (self.protocol, self.protocol)

    @property
    def switched_on(self) -> bool:
        """Whether the launch of this process set the backend's `switch`.

        Raises:
            SettingError: the variable of the switch has an invalid value.
        """
        switch = None if self.switch is None else read_setting(self.switch)
        return switch is not None and bool(switch.value)

    def demand(self, capability: str) -> None:
        """Raise if the backend lacks a capability; code that needs one calls this first.

        Args:
            capability: the name of a field of `Capabilities`.

        Raises:
            NotOffered: the backend lacks it.
        """
        if not getattr(self.capabilities, capability):
            failure, obstacle, remedy = _REFUSALS.get(
                capability, (f"Cannot use {capability!r}", "This backend lacks it.", "Use another backend.")
            )
            raise NotOffered(f"{failure} with the backend {self.name!r}.", obstacle, remedy)


def _is_name(text: str) -> bool:
    return text[:1].isalpha() and len(text) <= 48 and _NAME_CHARACTERS.issuperset(text)
