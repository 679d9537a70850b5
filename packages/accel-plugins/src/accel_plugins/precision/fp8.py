"""8-bit training: choose the library, and use layers of torchao or of Transformer Engine.

torchao converts linear layers in place and keeps their parameters. NVIDIA's Transformer Engine replaces layers by its
own. Operations outside of these layers compute in bf16.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch.nn import LayerNorm, Linear, Module

from accel_plugins.manifest import Axis
from accel_plugins.precision.base import Precision
from accel_plugins.precision.config import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8BackendType,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    backend_of_environment,
    no_msamp,
)
from accel_plugins.precision.native import Autocasting
from accel_state.devices.base import DeviceFamily
from accel_state.errors import Conflict, Missing, NotOffered, SettingError
from accel_state.library import stack_level
from accel_state.settings.installed import Requirement, importable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from accel_plugins.bundle import Bundle

__all__ = (
    "RECIPES",
    "TORCHAO",
    "TRANSFORMER_ENGINE",
    "Float8",
    "TorchAO",
    "TransformerEngine",
    "apply_fp8_autowrap",
    "choose_float8",
    "contextual_fp8_autocast",
    "convert_model",
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
    "has_transformer_engine_layers",
)


class Float8(Autocasting):
    """Linear layers compute in 8 bits, everything else in bf16."""

    name: ClassVar[str] = "fp8"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    library: ClassVar[FP8BackendType]
    excludes: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR})
    swaps_modules: ClassVar[bool] = True


def choose_float8(family: DeviceFamily, handlers: tuple[object, ...]) -> Precision:
    """The 8-bit precision with the recipe's library, else that of the environment, else an installed one.

    Args:
        family: the family of the training device.
        handlers: settings objects; a recipe among them determines the library.

    Raises:
        Conflict: `handlers` has recipes of two libraries.
        NotOffered: the library is MS-AMP.
        Missing: the library is not installed, or none is.
    """
    recipes = [one for one in handlers if isinstance(one, (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs))]
    if len(recipes) > 1:
        raise Conflict(
            f"Cannot use mixed_precision='fp8' with {' and '.join(type(one).__name__ for one in recipes)}.",
            "A run uses one library, and each recipe belongs to a different one.",
            "Pass only one of them.",
        )
    library = _library_of(recipes[0]) if recipes else backend_of_environment() or _installed()
    if library is FP8BackendType.MSAMP:
        raise no_msamp("Cannot use mixed_precision='fp8' with MS-AMP.")
    recipe: Any = recipes[0] if recipes else None
    options = next((one for one in handlers if isinstance(one, AutocastKwargs)), None)
    return (TorchAO if library is FP8BackendType.AO else TransformerEngine)(family, options, recipe)


def _library_of(recipe: object) -> FP8BackendType:
    if isinstance(recipe, FP8RecipeKwargs):
        return FP8BackendType(recipe.backend)
    if isinstance(recipe, AORecipeKwargs):
        return FP8BackendType.AO
    return FP8BackendType.TE if isinstance(recipe, TERecipeKwargs) else FP8BackendType.MSAMP


def _installed() -> FP8BackendType:
    for library, module in ((FP8BackendType.TE, "transformer_engine"), (FP8BackendType.AO, "torchao")):
        if importable(module):
            return library
    raise Missing(
        "Cannot use mixed_precision='fp8'.",
        "No library that trains in 8 bits is installed.",
        'Run: pip install torchao, or on NVIDIA GPUs: pip install "transformer-engine[pytorch]".',
    )


# ---------------------------------------------------------------------- torchao

TORCHAO: Final = Requirement("torchao", versions=">=0.15")

RECIPES: Final = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Names of torchao's recipes: one scale per tensor, one per row, and one per row with weight gradients in bf16."""


class TorchAO(Float8):
    """Linear layers are torchao's `Float8Linear`; everything else computes in bf16.

    Args:
        family: the family of the training device.
        options: how to autocast.
        recipe: which layers to convert, and how.

    Raises:
        Missing: torchao is not installed.
        SettingError: there is no such recipe.
    """

    library: ClassVar[FP8BackendType] = FP8BackendType.AO

    def __init__(
        self, family: DeviceFamily, options: AutocastKwargs | None = None, recipe: AORecipeKwargs | None = None
    ) -> None:
        TORCHAO.demand("Cannot use mixed_precision='fp8' with torchao.")
        super().__init__(family, options)
        self._recipe = recipe or AORecipeKwargs()
        self._config = _torchao_config(self._recipe, narrow_gather=False)

    def setup(self, bundle: Bundle, per_parameter_sharding: bool = False) -> None:
        narrow = per_parameter_sharding and bool(self._recipe.enable_fsdp_float8_all_gather)
        self._config = _torchao_config(self._recipe, narrow)
        super().setup(bundle, per_parameter_sharding)

    def prepare(self, model: Module) -> Module:
        convert_model_to_fp8_ao(model, self._config, self._recipe.module_filter_func)
        return super().prepare(model)


def _torchao_config(recipe: AORecipeKwargs, narrow_gather: bool) -> Any:
    from torchao.float8 import Float8LinearConfig

    config = recipe.config
    if config is None:
        return Float8LinearConfig(enable_fsdp_float8_all_gather=narrow_gather, pad_inner_dim=bool(recipe.pad_inner_dim))
    if isinstance(config, str):
        if config not in RECIPES:
            raise SettingError(
                f"Cannot use AORecipeKwargs(config={config!r}).",
                f"torchao has the recipes {', '.join(RECIPES)}.",
                "Use one of them, or pass a Float8LinearConfig.",
            )
        return Float8LinearConfig.from_recipe_name(config)
    if not isinstance(config, Float8LinearConfig):
        raise SettingError(
            f"Cannot use AORecipeKwargs(config={config!r}).",
            f"The value is a {type(config).__name__}.",
            "Pass the name of a recipe, or a Float8LinearConfig of torchao.",
        )
    return config


def find_first_last_linear_layers(model: Module) -> tuple[str | None, str | None]:
    """Names of the first and the last linear layer of a model, or None and None when it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Whether a submodule may be converted; of these, torchao converts the linear layers.

    Args:
        module: a submodule of a model.
        fqn: its name in the model.
        layers_to_filter: names of layers that are not converted.
    """
    # The kernels need matrices with sizes that are multiples of 16.
    if isinstance(module, Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: Module, fqn: str) -> bool:
    """`filter_linear_layers` that excludes the first and the last linear layer of `module`.

    Args:
        module: a model.
        fqn: the name of one of its submodules.
    """
    return filter_linear_layers(module, fqn, [name for name in find_first_last_linear_layers(module) if name])


def convert_model_to_fp8_ao(
    model: Module, config: Any = None, module_filter_func: Callable[[Module, str], bool] | None = None
) -> Module:
    """Convert linear layers of a model to 8-bit computation, in place.

    Args:
        model: the model.
        config: a `Float8LinearConfig` of torchao; None: the default.
        module_filter_func: receives a module and its name and returns whether to convert it; by default all linear
            layers with sizes that are multiples of 16, except the first and the last.

    Raises:
        Missing: torchao is not installed.
        SettingError: there is no layer to convert.
    """
    TORCHAO.demand("Cannot call convert_model_to_fp8_ao().")
    from torchao.float8 import convert_to_float8_training

    if module_filter_func is None:
        ends = [name for name in find_first_last_linear_layers(model) if name is not None]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=ends)
    convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)
    if not has_ao_layers(model):
        raise SettingError(
            f"Cannot train {type(model).__name__} in 8 bits with torchao.",
            "Between its first and its last linear layer, it has none with sizes that are multiples of 16.",
            "Pass AORecipeKwargs(module_filter_func=...), or use mixed_precision='bf16'.",
        )
    return model


def has_ao_layers(model: Module) -> bool:
    """Whether a model has a layer that torchao converted.

    Raises:
        Missing: torchao is not installed.
    """
    TORCHAO.demand("Cannot call has_ao_layers().")
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(part, Float8Linear) for part in model.modules())


# ---------------------------------------------------------------------- Transformer Engine

TRANSFORMER_ENGINE: Final = Requirement(
    "transformer_engine", "transformer-engine", ">=2.2", install="transformer-engine[pytorch]>=2.2"
)

_REPLACED_FORWARD: Final = "_replaced_forward"
"""Attribute of a model that computes in 8 bits: its forward, if that is not the method of its class."""

_SIZE_MULTIPLE: Final = 16
"""Sizes of matrices must be multiples of this."""


class TransformerEngine(Float8):
    """Linear layers and layer norms are layers of Transformer Engine; everything else computes in bf16.

    Args:
        family: the family of the training device.
        options: how to autocast.
        recipe: how values are scaled.

    Raises:
        Missing: Transformer Engine is not installed.
    """

    library: ClassVar[FP8BackendType] = FP8BackendType.TE

    def __init__(
        self, family: DeviceFamily, options: AutocastKwargs | None = None, recipe: TERecipeKwargs | None = None
    ) -> None:
        TRANSFORMER_ENGINE.demand("Cannot use mixed_precision='fp8' with Transformer Engine.")
        super().__init__(family, options)
        self._recipe = recipe or TERecipeKwargs()
        if self._recipe.interval != 1:
            warnings.warn(
                f"interval={self._recipe.interval} has no effect: Transformer Engine computes scaling factors at every "
                "step.",
                UserWarning,
                stacklevel=stack_level(),
            )

    def check(self, bundle: Bundle) -> None:
        _check_recipe(self._recipe)

    def prepare(self, model: Module) -> Module:
        with torch.no_grad():
            convert_model(model)
        if not has_transformer_engine_layers(model):
            raise SettingError(
                f"Cannot train {type(model).__name__} in 8 bits with Transformer Engine.",
                f"It has no layer norm, and no linear layer with sizes that are multiples of {_SIZE_MULTIPLE}.",
                "Use mixed_precision='bf16'.",
            )
        return super().prepare(apply_fp8_autowrap(model, self._recipe))


def convert_model(
    model: Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> Module:
    """Replace linear layers and layer norms of a model by those of Transformer Engine, in place, or convert them back.

    Layers that share a parameter with another are not replaced, because the new layer would not share it. Layer norms
    without weight or bias are not replaced, because Transformer Engine has none.

    Args:
        model: the model; weights are copied.
        to_transformer_engine: False converts layers back to torch's.
        _convert_linear: whether to replace linear layers.
        _convert_ln: whether to replace layer norms.

    Raises:
        Missing: Transformer Engine is not installed.
    """
    TRANSFORMER_ENGINE.demand("Cannot call convert_model().")
    import transformer_engine.pytorch as engine

    everything = [part for _, part in model.named_modules(remove_duplicate=False)]
    uses = Counter(id(own) for part in everything for own in part.parameters(recurse=False))
    for name, part in list(model.named_modules()):
        if not name or any(uses[id(own)] > 1 for own in part.parameters(recurse=False)):
            continue
        converted = _counterpart(part, engine, to_transformer_engine, _convert_linear, _convert_ln)
        if converted is not None:
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, converted)
    return model


def _counterpart(part: Any, engine: Any, forth: bool, linear: bool, norm: bool) -> Module | None:
    """The replacement of a layer, with its weights; None if it is not replaced."""
    dtype = getattr(getattr(part, "weight", None), "dtype", None)
    options: dict[str, Any] = {"params_dtype": dtype} if forth else {"dtype": dtype}
    if linear and type(part) is (Linear if forth else engine.Linear):
        if forth and any(size % _SIZE_MULTIPLE for size in part.weight.shape):
            return None
        has_bias = _filled(part.bias)
        kind = engine.Linear if forth else Linear
        return _with_weights(kind(part.in_features, part.out_features, bias=has_bias, **options), part)
    if norm and type(part) is (LayerNorm if forth else engine.LayerNorm):
        if part.weight is None or part.bias is None:
            return None
        kind = engine.LayerNorm if forth else LayerNorm
        # Both have the attributes that torch's constructor needs; the weight's shape has the sizes.
        return _with_weights(kind(tuple(part.weight.shape), eps=part.eps, **options), part)
    return None


def _filled(bias: Any) -> bool:
    """Whether a layer has a bias; Transformer Engine represents a missing one by an empty tensor."""
    return bias is not None and bias.numel() > 0


def _with_weights(converted: Any, source: Any) -> Module:
    converted.weight.copy_(source.weight)
    if _filled(source.bias):
        converted.bias.copy_(source.bias)
    module: Module = converted.to(source.weight.device)
    return module


def has_transformer_engine_layers(model: Module) -> bool:
    """Whether a model has a layer of Transformer Engine.

    Raises:
        Missing: Transformer Engine is not installed.
    """
    TRANSFORMER_ENGINE.demand("Cannot call has_transformer_engine_layers().")
    import transformer_engine.pytorch as engine

    kinds = (engine.LayerNorm, engine.Linear, engine.TransformerLayer)
    return any(isinstance(part, kinds) for part in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A forward that computes in 8 bits in training, and optionally in evaluation.

    Args:
        model_forward: a function with the model as first argument.
        fp8_recipe: a recipe of Transformer Engine.
        use_during_eval: compute in 8 bits in evaluation too.
    """
    import transformer_engine.pytorch as engine

    @functools.wraps(model_forward)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        with _region(engine, use_during_eval or self.training, fp8_recipe):
            return model_forward(self, *args, **kwargs)

    return forward


def _region(engine: Any, enabled: bool, recipe: Any) -> AbstractContextManager[None]:
    """A context in which layers compute by a recipe; its name depends on the release."""
    if hasattr(engine, "autocast"):
        region: AbstractContextManager[None] = engine.autocast(enabled=enabled, recipe=recipe)
    else:
        region = engine.fp8_autocast(enabled=enabled, fp8_recipe=recipe)
    return region


def apply_fp8_autowrap(model: Module, fp8_recipe_handler: TERecipeKwargs | None) -> Module:
    """Make the forward of a model compute in 8 bits; return the model.

    Args:
        model: the model.
        fp8_recipe_handler: how values are scaled; None: the defaults.

    Raises:
        Missing: Transformer Engine is not installed.
        NotOffered: Transformer Engine does not support a setting.
    """
    TRANSFORMER_ENGINE.demand("Cannot call apply_fp8_autowrap().")
    handler = fp8_recipe_handler or TERecipeKwargs()
    if isinstance(handler, FP8RecipeKwargs) and not handler.autocasts:
        return model
    plain = model.forward
    recipe, in_evaluation = _recipe(handler), bool(handler.use_autocast_during_eval)
    changed = contextual_fp8_autocast(_with_model(plain, model), recipe, in_evaluation)
    setattr(model, "forward", MethodType(changed, model))  # noqa: B010 - a type checker refuses the assignment
    return model


def _with_model(forward: Callable[..., Any], model: Module) -> Callable[..., Any]:
    """The forward of a model as a function that takes the model first."""
    if isinstance(forward, MethodType) and forward.__self__ is model:
        return forward.__func__
    # A hook has replaced it. As an attribute it is copied together with the model.
    vars(model)[_REPLACED_FORWARD] = forward

    @functools.wraps(forward)
    def with_model(self: Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_REPLACED_FORWARD](*args, **kwargs)

    return with_model


def _check_recipe(handler: TERecipeKwargs) -> None:
    """Raise for options that current releases of Transformer Engine do not support."""
    if any(handler.override_linear_precision or ()):
        raise NotOffered(
            f"Cannot use TERecipeKwargs(override_linear_precision={handler.override_linear_precision}).",
            "Transformer Engine removed this option in version 2.2.",
            "Remove it, or use mixed_precision='bf16'.",
        )
    if handler.fp8_format == "E5M2":
        raise NotOffered(
            "Cannot use TERecipeKwargs(fp8_format='E5M2').",
            "Transformer Engine does not support E5M2 in forward.",
            "Use 'HYBRID', with E5M2 in backward only, or 'E4M3'.",
        )


def _recipe(handler: TERecipeKwargs) -> Any:
    """The recipe object of Transformer Engine for these settings."""
    from transformer_engine.common import recipe

    _check_recipe(handler)
    usual = {"margin": handler.margin, "fp8_format": getattr(recipe.Format, str(handler.fp8_format))}
    if handler.use_mxfp8_block_scaling:
        return recipe.MXFP8BlockScaling(**usual)
    return recipe.DelayedScaling(
        **usual, amax_history_len=handler.amax_history_len, amax_compute_algo=handler.amax_compute_algo
    )
