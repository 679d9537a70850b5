"""Options of the ways in which a run divides tensors and sequences; plain values, never loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from accel_state.errors import Conflict, SettingError
from accel_state.mesh_settings import MESH_GROUP
from accel_state.settings.environ import fill
from accel_state.settings.schema import BOOLEAN, TEXT, Kind, choice, setting, settings_of

__all__ = (
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "DeepSpeedSequenceParallelConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
)

BETA_CP_AVAILABLE_PYTORCH_VERSION: Final = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION: Final = "0.18.2"
BETA_TP_AVAILABLE_PYTORCH_VERSION: Final = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION: Final = "4.52.0"

_ATTENTION: Final = ("sdpa", "flash_attention_2", "flash_attention_3")


def _length(text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    length = int(text)
    if length < 1:
        raise ValueError(text)
    return length


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism by torch.

    Args:
        enable_async_tp: overlap the communication of tensor parallelism with its computation.
    """

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism by torch.

    Args:
        cp_comm_strategy: how keys and values travel: "allgather" (all at once) or "alltoall" (around a ring).

    Raises:
        SettingError: there is no such strategy.
    """

    cp_comm_strategy: str | None = setting(
        None,
        kind=choice("allgather", "alltoall"),
        variable="PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        flag="--parallelism_config_cp_comm_strategy",
        key="parallelism_config.parallelism_config_cp_comm_strategy",
        help="How keys and values travel in context parallelism.",
        group=MESH_GROUP,
        unset="allgather",
    )

    def __post_init__(self) -> None:
        fill(self)
        self.cp_comm_strategy = settings_of(type(self))["cp_comm_strategy"].parse(
            str(self.cp_comm_strategy), "argument"
        )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism by DeepSpeed.

    Args:
        sp_seq_length: tokens of a whole sequence; needed when all have the same.
        sp_seq_length_is_variable: whether sequences differ in length.
        sp_attn_implementation: "sdpa", "flash_attention_2", "flash_attention_3", or a flash attention kernel of the
            Hub such as "kernels-community/flash-attn2"; None leaves the model's.

    Raises:
        SettingError: the attention cannot be used.
        Conflict: sequences have one length and it is not known.
    """

    sp_seq_length: int | None = setting(
        None,
        kind=Kind("an integer of at least 1", _length),
        variable="PARALLELISM_CONFIG_SP_SEQ_LENGTH",
        flag="--parallelism_config_sp_seq_length",
        key="parallelism_config.parallelism_config_sp_seq_length",
        help="Tokens of a whole sequence, when all have the same number.",
        group=MESH_GROUP,
    )
    sp_seq_length_is_variable: bool | None = setting(
        None,
        kind=BOOLEAN,
        variable="PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        flag="--parallelism_config_sp_seq_length_is_variable",
        key="parallelism_config.parallelism_config_sp_seq_length_is_variable",
        help="Whether sequences differ in length.",
        group=MESH_GROUP,
        unset=True,
    )
    sp_attn_implementation: str | None = setting(
        None,
        kind=TEXT,
        variable="PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        flag="--parallelism_config_sp_attn_implementation",
        key="parallelism_config.parallelism_config_sp_attn_implementation",
        help="Attention that works on a divided sequence.",
        group=MESH_GROUP,
    )

    def __post_init__(self) -> None:
        fill(self)
        name = self.sp_attn_implementation
        if name is not None and name not in _ATTENTION and not ("/" in name and "flash-attn" in name):
            raise SettingError(
                f"DeepSpeedSequenceParallelConfig(sp_attn_implementation={name!r}) was asked for.",
                "It does not work on a divided sequence.",
                f"Give one of {', '.join(_ATTENTION)}, or a flash attention kernel such as "
                "'kernels-community/flash-attn2'.",
            )
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise Conflict(
                "DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False) was asked for.",
                "The length that all sequences have is not given.",
                "Give sp_seq_length, or set PARALLELISM_CONFIG_SP_SEQ_LENGTH.",
            )
