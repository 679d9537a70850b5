"""Availability of libraries, devices and number formats: one function for each.

A library counts as available when it can be imported and its version fits; nothing is imported to find out. Questions
about devices go to their family. Importing this module never loads torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from accel_state.errors import SettingError
from accel_state.settings.environ import from_environment, read_setting
from accel_state.settings.installed import Requirement
from accel_state.settings.run import OutputSettings, ProcessSettings, XLASettings
from accel_state.settings.schema import settings_of
from accelerate.legacy.versions import is_torch_version

if TYPE_CHECKING:
    USE_TORCH_XLA: bool
    """Whether torch_xla is enabled by the variable USE_TORCH_XLA."""

F = TypeVar("F", bound=Callable[..., Any])

_FP8_CAPABILITY: Final = (8, 9)
"""Compute capability of the Ada generation, the first with 8-bit floating point units."""

_USE_XLA: Final = settings_of(XLASettings)["enabled"]


def __getattr__(name: str) -> Any:
    if name != "USE_TORCH_XLA":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    setting = read_setting(_USE_XLA)
    return setting is None or bool(setting.value)


def _library(module: str, versions: str = "", distribution: str = "") -> Callable[[], bool]:
    """A function that returns whether a library is available."""
    requirement = Requirement(module, distribution, versions)

    def is_available() -> bool:
        return requirement.obstacle() is None

    is_available.__doc__ = f"Whether {requirement.distribution or module} {versions} is installed.".replace("  ", " ")
    return is_available


is_4bit_bnb_available = _library("bitsandbytes", ">=0.39.0")
is_8bit_bnb_available = _library("bitsandbytes", ">=0.37.2")
is_aim_available = _library("aim")
is_amdsmi_available = _library("amdsmi")
is_boto3_available = _library("boto3")
is_clearml_available = _library("clearml")
is_comet_ml_available = _library("comet_ml", distribution="comet-ml")
is_datasets_available = _library("datasets")
is_deepspeed_available = _library("deepspeed")
is_dvclive_available = _library("dvclive")
is_import_timer_available = _library("import_timer", distribution="import-timer")
is_lomo_available = _library("lomo_optim", distribution="lomo-optim")
is_matplotlib_available = _library("matplotlib")
is_megatron_lm_available = _library("megatron", distribution="megatron-core")
is_mlflow_available = _library("mlflow")
is_msamp_available = _library("msamp", distribution="ms-amp")
is_pandas_available = _library("pandas")
is_peft_available = _library("peft")
is_pynvml_available = _library("pynvml", distribution="nvidia-ml-py")
is_pytest_available = _library("pytest")
is_sagemaker_available = _library("sagemaker")
is_schedulefree_available = _library("schedulefree")
is_swanlab_available = _library("swanlab")
is_timm_available = _library("timm")
is_torchao_available = _library("torchao", ">=0.6.1")
is_torchdata_available = _library("torchdata")
is_torchdata_stateful_dataloader_available = _library("torchdata", ">=0.8.0")
is_torchvision_available = _library("torchvision")
is_tqdm_available = _library("tqdm")
is_trackio_available = _library("trackio")
is_transformer_engine_available = _library("transformer_engine", distribution="transformer-engine")
is_transformers_available = _library("transformers")
is_triton_available = _library("triton")
is_wandb_available = _library("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, of at least `min_version`."""
    return _library("bitsandbytes", f">={min_version}" if min_version else "")()


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, of at least `min_version`."""
    return _library("numpy", f">={min_version}")()


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return _library("tensorboard")() or _library("tensorboardX")()


def is_rich_available() -> bool:
    """Whether rich is installed and ACCELERATE_ENABLE_RICH enables it."""
    return from_environment(OutputSettings).enable_rich and _library("rich")()


def is_pippy_available() -> bool:
    """Whether torch includes pipeline parallelism."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Whether torch can load checkpoints, including numpy arrays, without running code from them."""
    return is_torch_version(">=", "2.4.0")


def _family(name: str) -> Any:
    from accel_state.devices.select import family_of

    return family_of(name)


def _device(name: str, check_device: bool = False) -> bool:
    """Whether a device family can be used; `check_device` counts its devices too."""
    family = _family(name)
    return bool(family.present() and (not check_device or family.count() > 0))


def _accelerator(name: str) -> Callable[[bool], bool]:
    """A function that returns whether a device family can be used."""

    def is_available(check_device: bool = False) -> bool:
        return _device(name, check_device)

    is_available.__doc__ = f"Whether there is a device of the family {name}; `check_device` counts its devices too."
    return is_available


is_mlu_available = _accelerator("mlu")
is_musa_available = _accelerator("musa")
is_neuron_available = _accelerator("neuron")
is_npu_available = _accelerator("npu")
is_sdaa_available = _accelerator("sdaa")
is_xpu_available = _accelerator("xpu")


def is_cuda_available() -> bool:
    """Whether there is an NVIDIA or AMD GPU; checked without initialising it, so that the process can still fork."""
    return _device("cuda")


def is_rocm_available() -> bool:
    """Whether there is an AMD GPU."""
    return _device("cuda") and bool(_family("cuda").is_rocm)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether there is a Gaudi accelerator; `init_hccl` also readies its collectives."""
    return _device("hpu") and (not init_hccl or bool(_family("hpu").distributed_backend()))


def is_habana_gaudi1() -> bool:
    """Whether there is a Gaudi accelerator of the first generation."""
    return _device("hpu") and str(_family("hpu").module.get_device_name()).upper() == "GAUDI"


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is the GPU of an Apple computer, and torch is of at least `min_version`."""
    return is_torch_version(">=", min_version) and _device("mps")


def is_xccl_available() -> bool:
    """Whether torch can move tensors between Intel GPUs."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_xccl_available()


def is_torch_distributed_available() -> bool:
    """Whether torch was built with torch.distributed."""
    import torch.distributed as dist

    return dist.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla has devices, optionally of one kind.

    Raises:
        SettingError: both arguments are True.
    """
    if check_is_tpu and check_is_gpu:
        raise SettingError(
            "Cannot check is_torch_xla_available(check_is_tpu=True, check_is_gpu=True).",
            "A runtime has devices of one kind.",
            "Set one of the two.",
        )
    if not _device("xla"):
        return False
    device_type = _family("xla").device_type()
    return bool(
        (not check_is_tpu or device_type == "TPU") and (not check_is_gpu or device_type in ("CUDA", "ROCM", "GPU"))
    )


def _supports(dtype: str) -> bool:
    import torch

    from accel_state.devices.select import wanted_family

    return wanted_family(from_environment(ProcessSettings)).supports(getattr(torch, dtype))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether forward passes can run in bfloat16 on this machine; always False on a TPU with `ignore_tpu`."""
    if ignore_tpu and is_torch_xla_available(check_is_tpu=True):
        return False
    return _supports("bfloat16")


def is_fp16_available() -> bool:
    """Whether forward passes can run in float16 here."""
    return _supports("float16")


def is_fp8_available() -> bool:
    """Whether a library for 8-bit floating point training is installed."""
    return is_transformer_engine_available() or is_msamp_available() or is_torchao_available()


def check_cuda_fp8_capability() -> bool:
    """Whether the current NVIDIA GPU computes with 8-bit floating point numbers; False where there is none."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _FP8_CAPABILITY


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is installed and the GPU scales 8-bit numbers by blocks."""
    return is_transformer_engine_available() and _device("cuda") and bool(_family("cuda").scales_fp8_by_blocks())


def get_current_device_type() -> tuple[str, str]:
    """Type of the devices that a run uses by default, and the `distributed_type` of several processes on them."""
    from accel_state.devices.select import best_family

    family = best_family()
    return family.name, family.spec.label.value


def deepspeed_required(func: F) -> F:
    """Decorator: raise an error in calls of a function if DeepSpeed is not installed.

    Raises:
        Missing: when the function is called without it.
    """
    return _demanding(Requirement("deepspeed"), func)


def torchao_required(func: F) -> F:
    """Decorator: raise an error in calls of a function if torchao is not installed.

    Raises:
        Missing: when the function is called without it.
    """
    return _demanding(Requirement("torchao", versions=">=0.6.1"), func)


def _demanding(requirement: Requirement, func: F) -> F:
    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        requirement.demand(f"Cannot call {func.__qualname__}().")
        return func(*args, **kwargs)

    demanding: Any = call
    return demanding  # type: ignore[no-any-return]
