"""What a backend declares about itself: plain data, read without importing torch or the backend.

The entry-point group `accel.backends` leads to objects of `Manifest`. Everything others must know about a backend
is here, so nobody has to ask for its name.
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

PROTOCOL: Final = 2
"""Version of the backend interface that this release speaks."""

OLDEST_PROTOCOL: Final = 1
"""The version before, which an adapter translates for one release."""

_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


class Duty(str, Enum):
    """A job that a strategy does by itself, so that nobody else must."""

    ACCUMULATION = "accumulation"
    PRECISION = "precision"
    CLIPPING = "clipping"
    COMPILE = "compile"
    SEQUENCE = "sequence"


class Part(str, Enum):
    """A kind of object that `prepare` takes and a checkpoint holds."""

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
    """A change of the model whose order relative to the strategy's own wrapping differs between strategies."""

    AUTOCAST = "autocast"
    COMPILE = "compile"


class Phase(str, Enum):
    """Whether something happens before or after the strategy wraps the model."""

    BEFORE = "before"
    AFTER = "after"


class Ability(str, Enum):
    """Something that most strategies can do; one that cannot says so, and its tests are skipped."""

    NO_SYNC = "no_sync"
    CLIP_VALUE = "clip_value"
    JOIN = "join"
    AVERAGE = "average"
    STATE_DICT = "state_dict"
    EXACT_RESUME = "exact_resume"
    SYNCHRONOUS = "synchronous"
    """Every optimizer step leaves the same weights on all processes, those of one process with the global batch.

    Strategies of local steps, such as local SGD and DiLoCo, lack it: their processes differ between two averages.
    """

    SEVERAL_MODELS = "several_models"
    FP16 = "fp16"
    LOCAL_PASSES = "local_passes"
    """Forward and backward under `no_sync` have no collectives, so that one process may stop in the middle of them.

    The first forward may still make buffers equal, before it computes anything.
    """


class Traits(NamedTuple):
    """How a strategy synchronises and saves, where others have to know it.

    Args:
        save_order: kinds of objects that `Strategy.save` is called for, in this order.
        load_order: kinds of objects that `Strategy.load` is called for, in this order.
        collective_save: every process must call `save`; otherwise only those that write files do. When it is set, save
            hooks of the user do not see the weights: what one process takes away the others would miss.
        supports_async_save: a collective `save` may run in another thread while training goes on. Its collectives need
            a process group of their own.
        save_options: further arguments that `save` takes for models, by the names under which `save_state` receives
            them.
        can_checkpoint_partial_grads: parameters hold the gradients of an unfinished accumulation window, so that a
            checkpoint can hold them.
        per_parameter_sharding: parameters are gathered one by one, so that a precision may gather them in fewer bits.
        syncs_in_own_forward: backward synchronises gradients only after a forward through the module that `setup`
            returned.
        compiles_blocks: `torch.compile` compiles the blocks that a model repeats before the strategy wraps it, unless
            the settings say otherwise; else it compiles whole models.
        elastic: the number of processes may change between two optimizer steps. Loaders that train then ask
            `Strategy.begin_step` for the members of each step.
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
        "This backend keeps the parameters equal itself, or each process has another shard of the parameters.",
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
"""What an error says of an ability that a backend lacks: what failed, what stands in the way, what to do."""

_USUAL_PHASE: Final = {Job.AUTOCAST: Phase.BEFORE, Job.COMPILE: Phase.AFTER}


@dataclass(frozen=True)
class Manifest:
    """The declaration of one backend.

    Args:
        name: what users choose it by: lower-case letters, digits, `-` and `_`, at most 48.
        strategy: "module:class" of the `Strategy`; imported when the backend is chosen.
        config: "module:class" of its settings class, which never imports torch; empty when it has none.
        label: what users read as `distributed_type`; None asks the device family.
        present: "module:function" that is given the process and answers whether its circumstances call for this
            backend; None if only an option selects it.
        requires: packages that must be installed.
        owns: what the strategy does by itself.
        together: what `prepare` must be given in one call.
        axes: mesh axes it can live with.
        phases: where jobs go whose order differs from the usual one (autocast before, compile after).
        lacks: what it cannot do.
        traits: how its strategy synchronises and saves.
        settings: arguments for its settings class where nobody gives the settings, such as the version it is for.
        families: names of the device families that it drives; empty for every one. A launch on the CPU refuses the
            switch of a backend that has others only.
        switch: setting of a launch that chooses this backend, such as `--use_fsdp`; versions of one engine share it.
            Its variable passes it to the processes. At most one such setting is on.
        parameter: argument of the Accelerator by which its settings may be given, such as "fsdp_plugin".
        memory_plans: "module:class" of the `MemoryPlans` by which `accel estimate-memory --training` lists the backend;
            empty where its memory is not estimated. `"accel_plugins.memory_plans:MemoryPlans"` is data parallelism.
        priority: of the backends that are present, the one with the highest is taken.
        tier: 1 tested for real on a CPU, 2 tested when a GPU is at hand, 3 contract tests only; None is not known.
        protocol: version of this interface it was written for, or (oldest, newest) when it works with several. What
            declares none was written for version 1. Write a number: `PROTOCOL` is another one in the next release.

    Raises:
        PluginError: a name, a target or a range of versions is malformed.
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
                "A name has lower-case letters, digits, '-' and '_', starts with a letter and is at most 48 long.",
                "Rename it in its Manifest.",
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
                "The first version is newer than the last.",
                "Write the oldest version first.",
            )

    @property
    def protocols(self) -> tuple[int, int]:
        """The oldest and the newest version of this interface that it works with."""
        return self.protocol if isinstance(self.protocol, tuple) else (self.protocol, self.protocol)

    @property
    def common_protocol(self) -> int | None:
        """The newest version that it and this release have in common, or None."""
        oldest, newest = self.protocols
        common = min(newest, PROTOCOL)
        return common if common >= max(oldest, OLDEST_PROTOCOL) else None

    def phase(self, job: Job) -> Phase:
        """When a job is done, relative to the strategy's own wrapping."""
        return self.phases.get(job, _USUAL_PHASE[job])

    def demand(self, ability: Ability) -> None:
        """Refuse to use an ability that the backend lacks; whoever uses one calls this first.

        Raises:
            NotOffered: the backend lacks it.
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
