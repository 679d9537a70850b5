"""Settings of the backend; plain data without torch."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.kwargs import KwargsHandler
from accel_state.settings.schema import choice, int_at_least, setting

__all__ = ("PipelineConfig",)

_GROUP = "Backend pipeline"


@dataclass
class PipelineConfig(KwargsHandler):
    """How batches go through the stages.

    Args:
        schedule: "1f1b", "gpipe", or "interleaved", a 1F1B with two stages on each process.
        micro_batches: parts into which the batch of a process is divided.
    """

    schedule: str = setting(
        "1f1b",
        type=choice("1f1b", "gpipe", "interleaved"),
        variable="ACCEL_PIPELINE_SCHEDULE",
        flag="--pipeline_schedule",
        key="pipeline_config.schedule",
        help="Order of the forward and backward passes of micro-batches.",
        group=_GROUP,
    )
    micro_batches: int = setting(
        2,
        type=int_at_least(1),
        variable="ACCEL_PIPELINE_MICRO_BATCHES",
        flag="--pipeline_micro_batches",
        key="pipeline_config.micro_batches",
        help="Parts into which the batch of a process is divided.",
        group=_GROUP,
    )
