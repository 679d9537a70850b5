"""Options of DeepSpeed: those that its processes read, and those by which its own launcher finds the machines."""

from __future__ import annotations

from typing import Any, Final

from accel_state.settings.schema import BOOLEAN, TEXT, Kind, choice, setting, table, whole

__all__ = ("LAUNCHERS", "DeepSpeedLaunchSettings", "DeepSpeedSettings")

LAUNCHERS: Final = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
"""Ways in which processes on several machines are started; "standard" is torch.distributed.run on each of them."""

_GROUP: Final = "DeepSpeed"
_DEVICES: Final = choice("none", "cpu", "nvme")


def _parse_stage(text: str) -> int:
    stage = int(text)
    if not 0 <= stage <= 3:
        raise ValueError(text)
    return stage


def _parse_norm(text: str) -> float | str:
    word = text.strip().lower()
    return word if word in ("auto", "none") else float(word)


_NORM: Final = Kind("a number, auto or none", _parse_norm)


def _deepspeed(
    name: str, said: str, kind: Kind = TEXT, variable: str | None = None, question: str | None = None
) -> Any:
    return setting(
        None,
        kind=kind,
        variable=variable,
        flag=f"--{name}",
        key=f"deepspeed_config.{name}",
        question=question,
        help=said,
        group=_GROUP,
    )


def _carried(name: str, said: str, kind: Kind = TEXT, variable: str = "", question: str | None = None) -> Any:
    return _deepspeed(name, said, kind, f"ACCELERATE_{variable or 'DEEPSPEED_' + name.upper()}", question)


@table
class DeepSpeedSettings:
    """What the processes read."""

    deepspeed_config_file: str | None = _carried(
        "deepspeed_config_file", "JSON file with DeepSpeed's own configuration.", variable="DEEPSPEED_CONFIG_FILE"
    )
    zero_stage: int | None = _carried(
        "zero_stage",
        "What is divided: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.",
        Kind("a stage from 0 to 3", _parse_stage),
        question="Which stage of ZeRO do you want to use? (0, 1, 2 or 3)",
    )
    offload_optimizer_device: str | None = _carried(
        "offload_optimizer_device", "Where optimizer states are kept between uses.", _DEVICES
    )
    offload_param_device: str | None = _carried(
        "offload_param_device", "Where parameters are kept between uses.", _DEVICES
    )
    offload_optimizer_nvme_path: str | None = _carried(
        "offload_optimizer_nvme_path", "Folder on the NVMe disk for optimizer states."
    )
    offload_param_nvme_path: str | None = _carried("offload_param_nvme_path", "Folder on the NVMe disk for parameters.")
    gradient_accumulation_steps: int | None = setting(
        None,
        kind=whole(1),
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        flag="--gradient_accumulation_steps",
        key="deepspeed_config.gradient_accumulation_steps",
        help="Micro-batches whose gradients are added up before the optimizer steps.",
        group=_GROUP,
    )
    gradient_clipping: float | None = _carried(
        "gradient_clipping", "Largest norm of the gradients, or auto.", _NORM, "GRADIENT_CLIPPING"
    )
    zero3_init_flag: bool | None = _carried(
        "zero3_init_flag", "Divide parameters while the model is built.", BOOLEAN, "DEEPSPEED_ZERO3_INIT"
    )
    zero3_save_16bit_model: bool | None = _carried(
        "zero3_save_16bit_model", "Gather 16-bit weights when the model is saved.", BOOLEAN
    )
    deepspeed_moe_layer_cls_names: str | None = _carried(
        "deepspeed_moe_layer_cls_names",
        "Classes of mixture-of-experts layers, separated by commas.",
        variable="DEEPSPEED_MOE_LAYER_CLS_NAMES",
    )


@table
class DeepSpeedLaunchSettings:
    """What DeepSpeed's own launcher is told."""

    deepspeed_hostfile: str | None = _deepspeed("deepspeed_hostfile", "File that names the machines.")
    deepspeed_exclusion_filter: str | None = _deepspeed(
        "deepspeed_exclusion_filter", "Machines and devices to leave out, such as host1@host2:0,2."
    )
    deepspeed_inclusion_filter: str | None = _deepspeed(
        "deepspeed_inclusion_filter", "Machines and devices to use, such as host1@host2:0,2."
    )
    deepspeed_multinode_launcher: str | None = _deepspeed(
        "deepspeed_multinode_launcher", "Who starts the processes on several machines.", choice(*LAUNCHERS)
    )
