"""How a model is quantised by bitsandbytes: to 8 bits or to 4, and what of it stays in a floating-point dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from accel_state.errors import SettingError
from accel_state.labels import CustomDtype

__all__ = ("BnbQuantizationConfig",)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_QUANT_TYPES = ("fp4", "nf4")


@dataclass
class BnbQuantizationConfig:
    """What `load_and_quantize_model` does to the linear layers of a model.

    Args:
        load_in_8bit: quantise by LLM.int8() (Dettmers et al. 2022); a bool as second argument counts as `load_in_4bit`.
        llm_int8_threshold: columns of inputs with a larger value are computed in half precision; none with 0.
        load_in_4bit: quantise blocks of weights to 4 bits, as QLoRA does (Dettmers et al. 2023).
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: quantise the scales of the blocks too.
        bnb_4bit_compute_dtype: dtype in which 4-bit layers compute, or "fp32", "fp16", "bf16"; None means "fp16".
        torch_dtype: dtype of what is not quantised; when None float16, or the dtype of computation with 4 bits.
        skip_modules: names, or parts of them between dots, of modules that are not quantised; the head when None.
        keep_in_fp32_modules: the same for modules that keep float32.
        llm_int8_skip_modules: another name of `skip_modules`.
        llm_int8_enable_fp32_cpu_offload: a map that is made here may leave parts on the CPU or the disk; these are not
            quantised and keep float32.
        llm_int8_has_fp16_weight: keep half-precision weights and quantise them in every forward, to train them.
        bnb_4bit_quant_storage: dtype of the tensors that hold 4-bit weights; uint8 when None.

    Raises:
        SettingError: not exactly one of 8 and 4 bits, or a value that is none of those above.

    Example:
        >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16").torch_dtype
        torch.bfloat16
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    llm_int8_skip_modules: list[str] | None = field(default=None, kw_only=True)
    llm_int8_enable_fp32_cpu_offload: bool = field(default=False, kw_only=True)
    llm_int8_has_fp16_weight: bool = field(default=False, kw_only=True)
    bnb_4bit_quant_storage: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.llm_int8_threshold, bool):
            self.load_in_4bit, self.llm_int8_threshold = self.llm_int8_threshold, 6.0
        self._check_flags()
        if self.bnb_4bit_quant_type not in _QUANT_TYPES:
            raise _wrong("bnb_4bit_quant_type", self.bnb_4bit_quant_type, f"Use one of {', '.join(_QUANT_TYPES)}.")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype or "fp16")
        own = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = own if self.torch_dtype is None else _dtype("torch_dtype", self.torch_dtype)
        if self.bnb_4bit_quant_storage is None:
            self.bnb_4bit_quant_storage = torch.uint8
        elif not isinstance(self.bnb_4bit_quant_storage, torch.dtype):
            raise _wrong("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage, "Give a torch dtype.")
        self._take_skipped()
        self.target_dtype: torch.dtype | CustomDtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def _check_flags(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant", "llm_int8_has_fp16_weight"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "Give True or False.")
        if self.load_in_8bit == self.load_in_4bit:
            both = "Both" if self.load_in_8bit else "Neither"
            raise SettingError(
                "Quantise a model with bitsandbytes.",
                f"{both} of load_in_8bit and load_in_4bit was asked for.",
                "Set exactly one of them.",
            )
        if not isinstance(self.llm_int8_threshold, (int, float)) or self.llm_int8_threshold < 0:
            raise _wrong("llm_int8_threshold", self.llm_int8_threshold, "Give a number of 0 or more.")

    def _take_skipped(self) -> None:
        if self.llm_int8_skip_modules is not None:
            if self.skip_modules not in (None, self.llm_int8_skip_modules):
                raise _wrong("llm_int8_skip_modules", self.llm_int8_skip_modules, "Give skip_modules alone.")
            self.skip_modules = self.llm_int8_skip_modules
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
                raise _wrong(name, value, "Give a list of names.")


def _dtype(name: str, value: Any) -> torch.dtype:
    found = _DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise _wrong(name, value, f"Use one of {', '.join(_DTYPES)}, or a floating-point dtype of torch.")
    return found


def _wrong(name: str, value: Any, remedy: str) -> SettingError:
    return SettingError(f"Quantise a model with {name}={value!r}.", f"That is no value of {name}.", remedy)
