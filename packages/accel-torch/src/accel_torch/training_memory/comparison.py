"""Compares all plans for a number of processes: which fit into the memory of a device, and their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.nn import Module

from accel_ops.tree import find_batch_size
from accel_plugins.manifest import Axis
from accel_state.errors import AccelError, SettingError
from accel_torch.training_memory.plans import TrainingPlan, planned_backends
from accel_torch.training_memory.trial import RankMemory, TrainingCase, block_names, count_operations

__all__ = (
    "ModelFacts",
    "PlanComparison",
    "PlanEstimate",
    "compare_plans",
    "model_facts",
    "read_facts",
)

_OPERATIONS: Final = 200e12
_BETWEEN: Final = 100e9
_HOST: Final = 25e9
"""Rates that the cost assumes, per second: device operations, bytes between devices, bytes between host and device."""
_RECOMPUTED: Final = 4 / 3
"""Backward takes twice the time of forward, and recomputing runs forward once more."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that its plans depend on.

    Args:
        batch: samples of the example batch.
        blocks: class names of the model's repeated blocks.
        divides_tensors: whether the model has a plan for tensor parallelism.
        operations: floating-point operations of forward and backward for one sample.
    """

    batch: int
    blocks: tuple[str, ...]
    divides_tensors: bool
    operations: float


@dataclass(frozen=True)
class PlanEstimate:
    """A plan with its memory and cost.

    Args:
        plan: the plan.
        memory: the memory of its first rank, which no other rank exceeds.
        seconds: a simple cost of one step: operations / 200e12 (4/3 of them with recomputation), plus bytes of
            collectives / 100e9, plus bytes between host and device / 25e9.
        limit: bytes of a device; None for no limit.
    """

    plan: TrainingPlan
    memory: RankMemory
    seconds: float
    limit: int | None = None

    @property
    def missing(self) -> int:
        """Bytes by which the plan exceeds the device; 0 if it fits."""
        return 0 if self.limit is None else max(self.memory.peak - self.limit, 0)

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the device."""
        return not self.missing


@dataclass(frozen=True)
class PlanComparison:
    """Every plan for a number of processes.

    Args:
        facts: facts about the model.
        estimates: first the plans that fit, by cost; then the others, by missing bytes.
        refused: plans that do not apply to the model or to the global batch, and why.
        limit: bytes of a device; None for no limit.
    """

    facts: ModelFacts
    estimates: list[PlanEstimate]
    refused: list[tuple[TrainingPlan, str]]
    limit: int | None = None


def read_facts(case: TrainingCase) -> ModelFacts:
    """Build the model once under fake tensors, and count the operations of one step.

    Raises:
        SettingError: the model needs the values of tensors.
    """
    model, batch, operations = count_operations(case)
    return model_facts(model, batch, operations)


def model_facts(model: Module, batch: Any, operations: float) -> ModelFacts:
    """The facts about a model; `operations` are those of the whole batch."""
    samples = find_batch_size(batch)
    plan: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return ModelFacts(samples, tuple(block_names(model)), bool(plan), operations / samples)


def compare_plans(
    facts: ModelFacts,
    measure: Callable[[TrainingPlan], RankMemory],
    processes: int,
    memory: int | None = None,
    global_batch: int | None = None,
    mixed_precision: str = "no",
    device: str = "cuda",
    progress: Callable[[TrainingPlan], None] | None = None,
) -> PlanComparison:
    """Estimate every plan for a number of processes.

    The micro-batch of a plan is a process's shard of the global batch, halved until it fits; accumulation keeps the
    global batch.

    Args:
        facts: facts about the model.
        measure: runs a trial of a plan.
        processes: the number of processes.
        memory: bytes of a device. With None, the whole shard of a process is one micro-batch.
        global_batch: samples of one step on all processes. None is one example batch for each process.
        mixed_precision: "no", "bf16" or "fp16".
        device: "cpu", or another one.
        progress: called before each trial.

    Raises:
        SettingError: no plan applies.
        Exception: the error of the trials, if all fail with the same one.
    """
    samples = global_batch or facts.batch * processes
    estimates, refused, failures = [], [], []
    for plan in _plans(facts, processes, mixed_precision, device):
        if samples % plan.data_processes:
            refused.append((plan, f"{plan.data_processes} shards of {samples} samples have different sizes"))
            continue
        try:
            estimates.append(_largest_that_fits(facts, measure, plan, samples // plan.data_processes, memory, progress))
        except Exception as error:
            failures.append(error)
            reason = error.obstacle if isinstance(error, AccelError) else str(error)
            refused.append((plan, reason.partition("\n")[0]))
    if not estimates and failures and len({reason for _, reason in refused}) == 1:
        raise failures[0]
    if not estimates:
        raise SettingError(
            f"Cannot train on {processes} processes with a global batch of {samples} samples.",
            "; ".join(f"{plan.name}: {reason}" for plan, reason in refused),
            "Give another number of processes, or a --global-batch that it divides.",
        )
    estimates.sort(key=lambda one: (one.missing, one.seconds))
    return PlanComparison(facts, estimates, refused, memory)


def _largest_that_fits(
    facts: ModelFacts,
    measure: Callable[[TrainingPlan], RankMemory],
    plan: TrainingPlan,
    share: int,
    limit: int | None,
    progress: Callable[[TrainingPlan], None] | None,
) -> PlanEstimate:
    """The estimate of a plan with the largest micro-batch that fits, or with the smallest if none fits."""
    estimate = None
    for micro_batch in _halves(share):
        sized = replace(plan, micro_batch=micro_batch, accumulation=share // micro_batch)
        if progress is not None:
            progress(sized)
        memory = measure(sized)
        estimate = PlanEstimate(sized, memory, _seconds(facts, sized, memory), limit)
        if estimate.fits:
            break
    assert estimate is not None  # This is the smallest micro-batch.
    return estimate


def _plans(facts: ModelFacts, processes: int, mixed_precision: str, device: str) -> Iterator[TrainingPlan]:
    whole = TrainingPlan(processes, mixed_precision=mixed_precision, device=device)
    for recompute in (False, True) if facts.blocks else (False,):
        for name, (manifest, plans) in planned_backends().items():
            if not plans.trains_on(processes):
                continue
            plan = replace(whole, backend=name, recompute=recompute)
            for variant in plans.variants:
                yield replace(plan, variant=variant)
            if facts.divides_tensors and Axis.TENSOR in manifest.axes:
                for tp in sorted({2, 4, 8, processes}):
                    if 1 < tp <= processes and processes % tp == 0:
                        yield replace(plan, tp=tp)


def _halves(share: int) -> Iterator[int]:
    """A number, and its halves as long as they divide it; then 1."""
    size = share
    while True:
        yield size
        if size == 1:
            return
        size = size // 2 if size % 2 == 0 else 1


def _seconds(facts: ModelFacts, plan: TrainingPlan, memory: RankMemory) -> float:
    computed = (
        facts.operations * plan.micro_batch * plan.accumulation / plan.tp * (_RECOMPUTED if plan.recompute else 1)
    )
    return computed / _OPERATIONS + memory.moved / _BETWEEN + memory.copied / _HOST
