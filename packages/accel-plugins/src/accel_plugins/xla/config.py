"""Settings of the XLA backend: plain data, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel_state.errors import SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.environ import resolve
from accel_state.settings.integers import as_int
from accel_state.settings.run import XLASettings

__all__ = ("XLAPlugin",)


@dataclass
class XLAPlugin(KwargsHandler):
    """How models train on devices of torch_xla; pass it in `kwargs_handlers`.

    Args:
        fsdp: each process uses all its devices, and parameters and batches are sharded among them (FSDP v2 by SPMD).
            None: from ACCEL_XLA_FSDP. No device may be used before the Accelerator is created.
        blocks: class names of modules with outputs that are also sharded, such as a transformer's layers.
        downcast_bf16: with mixed precision bf16, store float32 on the device in bfloat16 and float64 in 32 bits. None:
            from ACCELERATE_DOWNCAST_BF16.
        prefetch: number of batches that threads of torch_xla's `MpDeviceLoader` read and send ahead, if the DataLoader
            has workers (`num_workers`). 0: send each batch when the loop reaches it.

    Raises:
        SettingError: a number is negative, or a class name is invalid.

    Example:
        >>> XLAPlugin(fsdp=True, blocks=("LlamaDecoderLayer",)).downcast_bf16
        False
    """

    fsdp: bool | None = None
    blocks: Sequence[str] = ()
    downcast_bf16: bool | None = None
    prefetch: int = 8

    def __post_init__(self) -> None:
        resolved = resolve(XLASettings, {"fsdp": self.fsdp, "downcast_bf16": self.downcast_bf16})
        self.fsdp, self.downcast_bf16 = bool(resolved["fsdp"].value), bool(resolved["downcast_bf16"].value)
        if isinstance(self.blocks, str) or not all(isinstance(name, str) for name in self.blocks):
            _refuse(
                "blocks",
                self.blocks,
                "The value must be a sequence of class names.",
                "Pass a sequence such as ('LlamaDecoderLayer',).",
            )
        if (as_int(self.prefetch) or 0) < 0 or as_int(self.prefetch) is None:
            _refuse(
                "prefetch",
                self.prefetch,
                "The value must be a number of batches, an int of at least 0.",
                "Pass 0 or more.",
            )


def _refuse(name: str, value: Any, obstacle: str, remedy: str) -> None:
    raise SettingError(f"Cannot use XLAPlugin({name}={value!r}).", obstacle, remedy)
