"""Training in 8 bits by torchao: linear layers are converted in place and keep their parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch.nn import Linear, Module

from accel_plugins.precision.config import AutocastKwargs
from accel_plugins.precision.float8 import Float8
from accel_plugins.precision.fp8_config import AORecipeKwargs
from accel_plugins.precision.fp8_library import FP8BackendType
from accel_state.errors import SettingError
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle
    from accel_state.devices.base import DeviceFamily

__all__ = (
    "RECIPES",
    "REQUIREMENT",
    "TorchAO",
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
)

REQUIREMENT: Final = Requirement("torchao", versions=">=0.15", extra="accel-plugins[torchao]")

RECIPES: Final = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Names of torchao's recipes: one scale for a tensor, one for a row, the same with weights' gradients in bf16."""


class TorchAO(Float8):
    """Linear layers compute by torchao's `Float8Linear`, everything else in bf16.

    Args:
        family: family of the device that computes.
        options: how to autocast.
        recipe: which layers, and how.

    Raises:
        Missing: torchao is not installed.
        SettingError: there is no such recipe.
    """

    library: ClassVar[FP8BackendType] = FP8BackendType.AO

    def __init__(
        self, family: DeviceFamily, options: AutocastKwargs | None = None, recipe: AORecipeKwargs | None = None
    ) -> None:
        REQUIREMENT.demand("Cannot use mixed_precision='fp8' with torchao.")
        super().__init__(family, options)
        self._recipe = recipe or AORecipeKwargs()
        self._config = _config(self._recipe, narrow_gather=False)

    def setup(self, bundle: Bundle, per_parameter_sharding: bool = False) -> None:
        narrow = per_parameter_sharding and bool(self._recipe.enable_fsdp_float8_all_gather)
        self._config = _config(self._recipe, narrow)
        super().setup(bundle, per_parameter_sharding)

    def prepare(self, model: Module) -> Module:
        convert_model_to_fp8_ao(model, self._config, self._recipe.module_filter_func)
        return super().prepare(model)


def _config(recipe: AORecipeKwargs, narrow_gather: bool) -> Any:
    from torchao.float8 import Float8LinearConfig

    given = recipe.config
    if given is None:
        return Float8LinearConfig(enable_fsdp_float8_all_gather=narrow_gather, pad_inner_dim=bool(recipe.pad_inner_dim))
    if isinstance(given, str):
        if given not in RECIPES:
            raise SettingError(
                f"Cannot use AORecipeKwargs(config={given!r}).",
                f"The recipes of torchao are {', '.join(RECIPES)}.",
                "Name one of them, or give a Float8LinearConfig.",
            )
        return Float8LinearConfig.from_recipe_name(given)
    if not isinstance(given, Float8LinearConfig):
        raise SettingError(
            f"Cannot use AORecipeKwargs(config={given!r}).",
            f"It is a {type(given).__name__}.",
            "Give the name of a recipe, or a Float8LinearConfig of torchao.",
        )
    return given


def find_first_last_linear_layers(model: Module) -> tuple[str | None, str | None]:
    """Names of the first and the last linear layer of a model, or None and None when it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Whether a part of a model may be converted; of those that may, torchao converts the linear layers.

    Args:
        module: a part of a model.
        fqn: its name in the model.
        layers_to_filter: names of layers that stay as they are.
    """
    # The kernels take matrices whose sizes are multiples of 16.
    if isinstance(module, Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: Module, fqn: str) -> bool:
    """`filter_linear_layers` that leaves the first and the last linear layer of `module`.

    Args:
        module: a whole model.
        fqn: name of a part of it.
    """
    return filter_linear_layers(module, fqn, [name for name in find_first_last_linear_layers(module) if name])


def convert_model_to_fp8_ao(
    model: Module, config: Any = None, module_filter_func: Callable[[Module, str], bool] | None = None
) -> Module:
    """Convert linear layers of a model, in place, to compute in 8 bits.

    Args:
        model: the model.
        config: a `Float8LinearConfig` of torchao; its default when None.
        module_filter_func: gets a module and its name and answers whether it is converted; by default all linear
            layers whose sizes are multiples of 16, but the first and the last.

    Raises:
        Missing: torchao is not installed.
        SettingError: no layer is left to convert.
    """
    REQUIREMENT.demand("convert_model_to_fp8_ao() was called.")
    from torchao.float8 import convert_to_float8_training

    if module_filter_func is None:
        ends = [name for name in find_first_last_linear_layers(model) if name is not None]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=ends)
    convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)
    if not has_ao_layers(model):
        raise SettingError(
            f"Cannot train {type(model).__name__} in 8 bits with torchao.",
            "It has no linear layer between its first and its last whose sizes are multiples of 16.",
            "Give AORecipeKwargs(module_filter_func=...), or use mixed_precision='bf16'.",
        )
    return model


def has_ao_layers(model: Module) -> bool:
    """Whether a part of a model computes in 8 bits by torchao.

    Raises:
        Missing: torchao is not installed.
    """
    REQUIREMENT.demand("has_ao_layers() was called.")
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(part, Float8Linear) for part in model.modules())
