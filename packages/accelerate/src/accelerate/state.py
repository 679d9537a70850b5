"""What is found at the old address `accelerate.state`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.gradient import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_state.gradient import GradientState
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.labels import DynamoBackend as DynamoBackend
    from accel_state.labels import SageMakerDistributedType as SageMakerDistributedType
    from accel_state.process import PartialState, do_nothing
    from accel_state.run_state import AcceleratorState, is_initialized
    from accel_state.shared import SharedDict, ThreadLocalSharedDict

__all__ = (
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "SharedDict",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
)

serve(__name__)
