"""The manifest of a backend: plain data that is read without importing torch or the backend.

Entry points of the group `accel.backends` name `Manifest` objects. A manifest declares all that other code must know
about a backend, so no code compares backend names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from accel_state.errors import NotOffered, PluginError
from accel_state.labels import DistributedType
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import Setting

__all__ = ("OLDEST_PROTOCOL", "PROTOCOL", "Ability", "Axis", "Duty", "Job", "Manifest", "Part", "Phase", "Traits")

PROTOCOL: Final = 3
"""Version of the backend interface that this release implements."""

OLDEST_PROTOCOL: Final = 3
"""The oldest version that this release supports."""

_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


class Duty(str, Enum):
    """A job that a strategy does itself, so that the Accelerator does not."""

    ACCUMULATION = "accumulation"
    PRECISION = "precision"
    CLIPPING = "clipping"
    COMPILE = "compile"
    SEQUENCE = "sequence"


class Part(str, Enum):
    """A kind of object that `prepare` accepts and a checkpoint contains."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "loader"


class Axis(str, Enum):
    """An axis of the device mesh."""

    REPLICATE = "dp_replicate"
    SHARD = "dp_shard"
    CONTEXT = "cp"
    SEQUENCE = "sp"
    TENSOR = "tp"


class Job(str, Enum):
    """A change of the model that some strategies need before, and others after, they wrap the model."""

    AUTOCAST = "autocast"
    COMPILE = "compile"


class Phase(str, Enum):
    """Before or after the strategy wraps the model."""

    BEFORE = "before"
    AFTER = "after"


class Ability(str, Enum):
    """Something that most strategies can do. A manifest lists the missing ones; the kit skips their tests."""

    NO_SYNC = "no_sync"
    CLIP_VALUE = "clip_value"
    JOIN = "join"
    AVERAGE = "average"
    STATE_DICT = "state_dict"
    EXACT_RESUME = "exact_resume"
    SYNCHRONOUS = "synchronous"
    """After every optimizer step all processes have the same weights: those of one process with the global batch.

    Strategies of local steps, such as local SGD and DiLoCo, lack it: their weights differ between two averages.
    """

    SEVERAL_MODELS = "several_models"
    FP16 = "fp16"
    LOCAL_PASSES = "local_passes"
    """Forward and backward under `no_sync` call no collectives, so that one process may stop in the middle.

    The first forward may still broadcast buffers before it computes anything.
    """


class Traits(NamedTuple):
    """How a strategy synchronises and saves, as far as other code must know it.

    Args:
        save_order: the kinds of objects for which `Strategy.save` is called, in this order.
        load_order: the kinds of objects for which `Strategy.load` is called, in this order.
        collective_save: every process must call `save`; otherwise only those that write files call it. If set, save
            hooks of the user do not receive the weights, because a hook that removes weights on one process would
            remove them for all.
        supports_async_save: a collective `save` may run in another thread during training. Its collectives need a
            separate process group.
        save_options: names of further arguments that `save` accepts for models; `save_state` accepts the same names.
        can_checkpoint_partial_grads: the gradients of an unfinished accumulation window are in `parameter.grad`, so
            that a checkpoint can contain them.
        per_parameter_sharding: parameters are gathered one by one, so that a precision may gather them in a smaller
            dtype.
        syncs_in_own_forward: backward synchronises gradients only after a forward through the module that `setup`
            returned.
        compiles_blocks: by default, `torch.compile` compiles the model's repeated blocks before the strategy wraps it;
            False compiles whole models.
        elastic: the number of processes may change between two optimizer steps. Training loaders then call
            `Strategy.begin_step` before each step.
    """

    save_order: Sequence[Part] = (Part.MODEL, Part.OPTIMIZER, Part.SCHEDULER)
    load_order: Sequence[Part] = (Part.MODEL, Part.OPTIMIZER, Part.SCHEDULER)
    collective_save: bool = False
    supports_async_save: bool = False
    save_options: frozenset[str] = frozenset()
    can_checkpoint_partial_grads: bool = True
    per_parameter_sharding: bool = False
    syncs_in_own_forward: bool = False
    compiles_blocks: bool = False
    elastic: bool = False


_REFUSALS: Final = {
    Ability.AVERAGE: (
        "Cannot average parameters over the processes (LocalSGD)",
        "This backend itself keeps the parameters equal, or each process has a different shard of them.",
        "Use the backend 'ddp', or LocalSGD(..., enabled=False).",
    ),
    Ability.CLIP_VALUE: (
        "Cannot clip gradients by value (clip_grad_value_)",
        "This backend clips by norm only.",
        "Use clip_grad_norm_, or set gradient_clipping in its settings.",
    ),
    Ability.JOIN: (
        "Cannot let processes run out of batches at different times (join_uneven_inputs)",
        "Every step of this backend needs all processes.",
        "Use even_batches=True, or the backend 'ddp'.",
    ),
}
"""The error for an ability that a backend lacks: what failed, why, what to do."""

_USUAL_PHASE: Final = {Job.AUTOCAST: Phase.BEFORE, Job.COMPILE: Phase.AFTER}


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
        owns: the jobs that the strategy does itself.
        together: the kinds of objects that users must pass to `prepare` in one call.
        axes: the mesh axes that it supports.
        phases: the phase of each job that differs from the default (autocast before, compile after).
        lacks: the abilities that it does not have.
        traits: how its strategy synchronises and saves.
        settings: arguments for its settings class when the user passes no settings object, such as the version.
        families: names of the device families that it supports; empty means all. A launch on the CPU refuses `switch`
            of a backend without "cpu".
        switch: the setting of a launch that chooses this backend, such as `--use_fsdp`; versions of one engine share
            it. Its environment variable passes it to the processes. At most one such setting may be on.
        parameter: the argument of the Accelerator that accepts its settings, such as "fsdp_plugin".
        memory_plans: a `MemoryPlans` class as "module:class", with which `accel estimate-memory --training` estimates
            the backend's memory; empty if it is not estimated. `"accel_plugins.memory_plans:MemoryPlans"` describes
            data parallelism.
        priority: among the backends for which `present` returns True, the highest priority wins.
        tier: 1: trained in tests on a CPU; 2: trained in tests where a GPU is available; 3: contract tests only; None:
            unknown.
        protocol: the version of this interface that it implements, or (oldest, newest) if it works with several.
            Without one, version 3 is assumed. Write a number, because the value of `PROTOCOL` changes in later
            releases.

    Raises:
        PluginError: the name, a "module:object" reference or the range of versions is malformed.
    """

    name: str
    strategy: str
    config: str = ""
    label: DistributedType | None = None
    present: str | None = None
    requires: tuple[Requirement, ...] = ()
    owns: frozenset[Duty] = frozenset()
    together: frozenset[Part] = frozenset()
    axes: frozenset[Axis] = frozenset()
    phases: Mapping[Job, Phase] = field(default_factory=dict)
    lacks: frozenset[Ability] = frozenset()
    traits: Traits = Traits()  # noqa: RUF009 - it is immutable
    settings: Mapping[str, Any] = field(default_factory=dict)
    families: frozenset[str] = frozenset()
    switch: Setting | None = None
    parameter: str = ""
    memory_plans: str = ""
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
        targets = {
            "strategy": self.strategy,
            "config": self.config or None,
            "present": self.present,
            "memory_plans": self.memory_plans or None,
        }
        for field_name, target in targets.items():
            if target is not None and not _leads_somewhere(target):
                raise PluginError(
                    f"Cannot use {field_name}={target!r} in the Manifest of the backend {self.name!r}.",
                    "The value does not name an object in a module.",
                    "Write it as 'package.module:Name'.",
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
    def common_protocol(self) -> int | None:
        """The newest version that both the backend and this release support, or None."""
        oldest, newest = self.protocols
        common = min(newest, PROTOCOL)
        return common if common >= max(oldest, OLDEST_PROTOCOL) else None

    def phase(self, job: Job) -> Phase:
        """The phase in which a job runs: before or after the strategy wraps the model."""
        return self.phases.get(job, _USUAL_PHASE[job])

    def demand(self, ability: Ability) -> None:
        """Raise if the backend lacks an ability; code that needs one calls this first.

        Raises:
            NotOffered: the backend lacks the ability.
        """
        if ability in self.lacks:
            failed, obstacle, remedy = _REFUSALS.get(
                ability, (f"Cannot use {ability.value!r}", "This backend lacks it.", "Use another backend.")
            )
            raise NotOffered(f"{failed} with the backend {self.name!r}.", obstacle, remedy)


def _is_name(text: str) -> bool:
    return text[:1].isalpha() and len(text) <= 48 and _NAME_CHARACTERS.issuperset(text)


def _leads_somewhere(target: str) -> bool:
    module, colon, name = target.partition(":")
    return bool(colon) and all(part.isidentifier() for part in f"{module}.{name}".split("."))
