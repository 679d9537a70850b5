"""What a backend declares about itself: plain data, read without importing torch or the backend.

The entry-point group `accel.backends` leads to objects of `Manifest`. Everything others must know about a backend
stands here, so nobody has to ask for its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from accel_state.errors import PluginError
from accel_state.labels import DistributedType
from accel_state.settings.installed import Requirement

__all__ = ("PROTOCOL", "Ability", "Axis", "Duty", "Job", "Manifest", "Part", "Phase")

PROTOCOL: Final = 1
"""Version of the backend interface that this release speaks."""

_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


class Duty(str, Enum):
    """A job that a strategy does by itself, so that nobody else must."""

    ACCUMULATION = "accumulation"
    PRECISION = "precision"
    CLIPPING = "clipping"
    SCHEDULE = "schedule"
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
    SEVERAL_MODELS = "several_models"
    FP16 = "fp16"
    LOCAL_PASSES = "local_passes"
    """Forward and backward under `no_sync` have no collectives, so that one process may stop in the middle of them.

    The first forward may still make buffers equal, before it computes anything.
    """


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
        settings: arguments for its settings class where nobody gives the settings, such as the version it is for.
        parameter: argument of the Accelerator by which its settings may be given, such as "fsdp_plugin".
        launcher: "module:function" of its own launcher, or None.
        priority: of the backends that are present, the one with the highest is taken.
        tier: 1 tested for real on a CPU, 2 tested when a GPU is at hand, 3 contract tests only; None is not known.
        protocol: version of this interface it was written for.

    Raises:
        PluginError: a name or target is malformed.
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
    settings: Mapping[str, Any] = field(default_factory=dict)
    parameter: str = ""
    launcher: str | None = None
    priority: int = 0
    tier: int | None = None
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise PluginError(
                f"A backend calls itself {self.name!r}.",
                "A name has lower-case letters, digits, '-' and '_', starts with a letter and is at most 48 long.",
                "Rename it in its Manifest.",
            )
        targets = {"strategy": self.strategy, "config": self.config or None, "present": self.present}
        for field_name, target in {**targets, "launcher": self.launcher}.items():
            if target is not None and not _leads_somewhere(target):
                raise PluginError(
                    f"The backend {self.name!r} declares {field_name}={target!r}.",
                    "That does not lead to an object.",
                    "Write it as 'package.module:Name'.",
                )

    def phase(self, job: Job) -> Phase:
        """When a job is done, relative to the strategy's own wrapping."""
        return self.phases.get(job, _USUAL_PHASE[job])


def _is_name(text: str) -> bool:
    return text[:1].isalpha() and len(text) <= 48 and _NAME_CHARACTERS.issuperset(text)


def _leads_somewhere(target: str) -> bool:
    module, colon, name = target.partition(":")
    return bool(colon) and all(part.isidentifier() for part in f"{module}.{name}".split("."))
