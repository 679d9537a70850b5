"""Constants that only older code reads: lists of option names, and versions in which features of others appeared."""

from __future__ import annotations

import operator
from typing import Final

from accel_plugins.fsdp.config import BACKWARD_PREFETCHES, SHARDING_STRATEGIES, STATE_DICT_TYPES, WRAP_POLICIES

FSDP_SHARDING_STRATEGY: Final = list(SHARDING_STRATEGIES)
FSDP_AUTO_WRAP_POLICY: Final = list(WRAP_POLICIES)
FSDP_BACKWARD_PREFETCH: Final = list(BACKWARD_PREFETCHES)
FSDP_STATE_DICT_TYPE: Final = list(STATE_DICT_TYPES)
FSDP2_STATE_DICT_TYPE: Final = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
FSDP_PYTORCH_VERSION: Final = "2.1.0.a0+32f93b1"
FSDP2_PYTORCH_VERSION: Final = "2.6.0"
DTENSOR_PYTORCH_VERSION: Final = "2.5.0"

DEEPSPEED_MULTINODE_LAUNCHERS: Final = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]
TORCH_DYNAMO_MODES: Final = ["default", "reduce-overhead", "max-autotune"]
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION: Final = "2.2.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.1.0"
PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"

SAGEMAKER_PARALLEL_EC2_INSTANCES: Final = ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"]
SAGEMAKER_PYTHON_VERSION: Final = "py38"
SAGEMAKER_PYTORCH_VERSION: Final = "1.10.2"
SAGEMAKER_TRANSFORMERS_VERSION: Final = "4.17.0"

STR_OPERATION_TO_FUNC: Final = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}

TORCH_LAUNCH_PARAMS: Final = [
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "standalone",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "role",
    "module",
    "m",
    "no_python",
    "run_path",
    "log_dir",
    "r",
    "redirects",
    "t",
    "tee",
    "node_rank",
    "master_addr",
    "master_port",
]
