"""Settings of the XLA backend; plain data, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel_state.errors import SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.environ import resolve
from accel_state.settings.run import XLASettings

__all__ = ("XLAPlugin",)


@dataclass
class XLAPlugin(KwargsHandler):
    """How models train on devices that torch_xla drives; give it in `kwargs_handlers`.

    Args:
        fsdp: let each process drive all devices that it has, and shard parameters and batches between them (FSDP v2
            by SPMD); from ACCEL_XLA_FSDP when None. The devices must not have been used before the Accelerator is made.
        blocks: names of the classes of modules whose outputs are sharded too, as those of a transformer's layers.
        downcast_bf16: with mixed precision bf16, hold floats on the device in bfloat16 and doubles in 32 bits; from
            ACCELERATE_DOWNCAST_BF16 when None.
        prefetch: batches that torch_xla's `MpDeviceLoader` reads and sends ahead in its own threads when DataLoader
            workers (`num_workers`) make them; 0 sends each batch when the loop reaches it.

    Raises:
        SettingError: a number is negative, or a name of a class is none.

    Example:
        >>> XLAPlugin(fsdp=True, blocks=("LlamaDecoderLayer",)).downcast_bf16
        False
    """

    fsdp: bool | None = None
    blocks: Sequence[str] = ()
    downcast_bf16: bool | None = None
    prefetch: int = 8

    def __post_init__(self) -> None:
        given = resolve(XLASettings, {"fsdp": self.fsdp, "downcast_bf16": self.downcast_bf16})
        self.fsdp, self.downcast_bf16 = bool(given["fsdp"].value), bool(given["downcast_bf16"].value)
        if isinstance(self.blocks, str) or not all(isinstance(name, str) for name in self.blocks):
            _refuse(
                "blocks", self.blocks, "The value must be a sequence of class names.", "Give ('LlamaDecoderLayer',)."
            )
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            _refuse(
                "prefetch",
                self.prefetch,
                "The value must be a number of batches, an int of at least 0.",
                "Give 0 or more.",
            )


def _refuse(name: str, value: Any, obstacle: str, remedy: str) -> None:
    raise SettingError(f"Cannot use XLAPlugin({name}={value!r}).", obstacle, remedy)
