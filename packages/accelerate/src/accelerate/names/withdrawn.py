"""What cannot be had at an old address any more, or never could, and what to use in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ("NOT_PROVIDED", "REMOVED")

NOT_PROVIDED: Final[Mapping[str, tuple[str, str]]] = {
    "accelerate.deepspeed_utils": ("It was removed before 1.0.", "Import from accelerate.utils."),
    "accelerate.kwargs_handlers": ("It was removed before 1.0.", "Import from accelerate.utils."),
    "accelerate.test_utils": (
        "The test helpers of the original library are not part of the drop-in.",
        "Use accel_state.testing (real processes, clean state) and accel_plugins.testing (suites for backends).",
    ),
}
"""Modules that cannot be had: what stands in the way, and what to do."""

REMOVED: Final[Mapping[str, str]] = {
    "get_launch_prefix": "Call `accel launch`; on several machines it starts torch.distributed.run.",
    "is_ccl_available": "torch has no need of oneCCL's bindings on CPU any more; gloo is the backend there.",
    "is_ipex_available": "Its optimisations are part of torch; leave the call out.",
    "is_safetensors_available": "safetensors is always installed; leave the call out.",
    "is_tpu_available": "Use is_torch_xla_available(check_is_tpu=True).",
    "shard_checkpoint": "Use accel_bigmodel.split_state_dict, or huggingface_hub.split_torch_state_dict_into_shards.",
}
"""Names that were removed before 1.15, and what replaces each."""
