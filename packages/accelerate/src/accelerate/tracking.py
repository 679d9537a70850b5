"""What is found at the old address `accelerate.tracking`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_ops.measure import listify as listify
    from accel_state.availability import is_aim_available as is_aim_available
    from accel_state.availability import is_clearml_available as is_clearml_available
    from accel_state.availability import is_comet_ml_available as is_comet_ml_available
    from accel_state.availability import is_dvclive_available as is_dvclive_available
    from accel_state.availability import is_mlflow_available as is_mlflow_available
    from accel_state.availability import is_swanlab_available as is_swanlab_available
    from accel_state.availability import is_tensorboard_available as is_tensorboard_available
    from accel_state.availability import is_trackio_available as is_trackio_available
    from accel_state.availability import is_wandb_available as is_wandb_available
    from accel_state.environment import str_to_bool as str_to_bool
    from accel_state.logging import get_logger as get_logger
    from accel_state.process import PartialState as PartialState
    from accel_state.settings.versions import compare_versions as compare_versions
    from accel_tracking.base import GeneralTracker, on_main_process
    from accel_tracking.registry import LoggerType as LoggerType
    from accel_tracking.registry import filter_trackers, get_available_trackers, register_tracker_class
    from accel_tracking.trackers.aim import AimTracker
    from accel_tracking.trackers.clearml import ClearMLTracker
    from accel_tracking.trackers.comet_ml import CometMLTracker
    from accel_tracking.trackers.dvclive import DVCLiveTracker
    from accel_tracking.trackers.mlflow import MLflowTracker
    from accel_tracking.trackers.swanlab import SwanLabTracker
    from accel_tracking.trackers.tensorboard import TensorBoardTracker
    from accel_tracking.trackers.trackio import TrackioTracker
    from accel_tracking.trackers.wandb import WandBTracker
    from accelerate.legacy.trackers import LOGGER_TYPE_TO_CLASS

__all__ = (
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
)

serve(__name__)
