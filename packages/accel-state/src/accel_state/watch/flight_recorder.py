"""The collective of torch in which this process waits, from torch's flight recorder where it is on.

The recorder has the collectives that torch starts itself, and those whose wait is not in a function of
torch.distributed, such as that for a device. torch records them for NCCL and gloo if `TORCH_FR_BUFFER_SIZE` is above
zero, which is its default with NCCL.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

__all__ = ("pending_collective",)

_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch that return the recorder's entries as JSON, the newer one first."""

_STARTS_AT_ONCE: Final = "gloo:"
"""Prefix of collectives that have no separate start: they are never "started"."""


def pending_collective() -> str:
    """The oldest collective of torch that has started and not ended; empty if there is none, or the recorder is off.

    Example: "nccl:all_reduce of default_pg (number 17)".
    """
    distributed: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = next((found for name in _DUMPS if (found := getattr(distributed, name, None)) is not None), None)
    if dump is None:
        return ""
    try:
        for entry in json.loads(dump(includeCollectives=True, onlyActive=True) or b"{}").get("entries") or ():
            name = str(entry["profiling_name"])
            # A collective that is only queued on a device may wait for computation there.
            if not entry["retired"] and (entry["state"] == "started" or name.startswith(_STARTS_AT_ONCE)):
                return f"{name} of {entry['process_group'][1]} (number {entry['collective_seq_id']})"
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        # A recorder of another version is no proof.
        pass
    return ""
