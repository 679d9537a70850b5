"""Training in 8 bits by Transformer Engine of NVIDIA, which brings layers of its own.

It runs on GPUs only; what is here is tested against a stand-in with its interface, and the text of its releases is
compared with that interface (`nox -s float8`).
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch.nn import LayerNorm, Linear, Module

from accel_plugins.precision.config import AutocastKwargs
from accel_plugins.precision.float8 import Float8
from accel_plugins.precision.fp8_config import FP8RecipeKwargs, TERecipeKwargs
from accel_plugins.precision.fp8_library import FP8BackendType
from accel_state.errors import NotOffered, SettingError
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from accel_plugins.bundle import Bundle
    from accel_state.devices.base import DeviceFamily

__all__ = (
    "REQUIREMENT",
    "TransformerEngine",
    "apply_fp8_autowrap",
    "contextual_fp8_autocast",
    "convert_model",
    "has_transformer_engine_layers",
)

REQUIREMENT: Final = Requirement(
    "transformer_engine", "transformer-engine", ">=2.2", extra="transformer-engine[pytorch]>=2.2"
)

_MULTIPLE: Final = 16
"""Sizes of matrices have to be multiples of this."""


class TransformerEngine(Float8):
    """Linear layers and layer norms are those of Transformer Engine; everything else computes in bf16.

    Args:
        family: family of the device that computes.
        options: how to autocast.
        recipe: how values are scaled.

    Raises:
        Missing: Transformer Engine is not installed.
    """

    library: ClassVar[FP8BackendType] = FP8BackendType.TE

    def __init__(
        self, family: DeviceFamily, options: AutocastKwargs | None = None, recipe: TERecipeKwargs | None = None
    ) -> None:
        REQUIREMENT.demand("Cannot use mixed_precision='fp8' with Transformer Engine.")
        super().__init__(family, options)
        self._recipe = recipe or TERecipeKwargs()
        if self._recipe.interval != 1:
            warnings.warn(
                f"interval={self._recipe.interval} has no effect: Transformer Engine computes scaling factors at every "
                "step.",
                UserWarning,
                stacklevel=2,
            )

    def check(self, bundle: Bundle) -> None:
        _check_recipe(self._recipe)

    def prepare(self, model: Module) -> Module:
        with torch.no_grad():
            convert_model(model)
        if not has_transformer_engine_layers(model):
            raise SettingError(
                f"Cannot train {type(model).__name__} in 8 bits with Transformer Engine.",
                f"It has no layer norm, and no linear layer whose sizes are multiples of {_MULTIPLE}.",
                "Use mixed_precision='bf16'.",
            )
        return super().prepare(apply_fp8_autowrap(model, self._recipe))


def convert_model(
    model: Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> Module:
    """Exchange linear layers and layer norms of a model, in place, for those of Transformer Engine, or back.

    Layers that share a parameter with another stay as they are: an exchanged one would have its own. So do layer norms
    without weight or bias, which Transformer Engine does not have.

    Args:
        model: the model; weights are copied.
        to_transformer_engine: False exchanges them back for torch's.
        _convert_linear: whether linear layers are exchanged.
        _convert_ln: whether layer norms are.

    Raises:
        Missing: Transformer Engine is not installed.
    """
    REQUIREMENT.demand("convert_model() was called.")
    import transformer_engine.pytorch as engine

    everything = [part for _, part in model.named_modules(remove_duplicate=False)]
    uses = Counter(id(own) for part in everything for own in part.parameters(recurse=False))
    for name, part in list(model.named_modules()):
        if not name or any(uses[id(own)] > 1 for own in part.parameters(recurse=False)):
            continue
        made = _counterpart(part, engine, to_transformer_engine, _convert_linear, _convert_ln)
        if made is not None:
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, made)
    return model


def _counterpart(part: Any, engine: Any, forth: bool, linear: bool, norm: bool) -> Module | None:
    """The layer that takes the place of another, with its weights; None when none does."""
    dtype = getattr(getattr(part, "weight", None), "dtype", None)
    options: dict[str, Any] = {"params_dtype": dtype} if forth else {"dtype": dtype}
    if linear and type(part) is (Linear if forth else engine.Linear):
        if forth and any(size % _MULTIPLE for size in part.weight.shape):
            return None
        has_bias = _filled(part.bias)
        kind = engine.Linear if forth else Linear
        return _with_weights(kind(part.in_features, part.out_features, bias=has_bias, **options), part)
    if norm and type(part) is (LayerNorm if forth else engine.LayerNorm):
        if part.weight is None or part.bias is None:
            return None
        kind = engine.LayerNorm if forth else LayerNorm
        # Both have the attributes by which torch's is made; the sizes stand in the weight's shape.
        return _with_weights(kind(tuple(part.weight.shape), eps=part.eps, **options), part)
    return None


def _filled(bias: Any) -> bool:
    """Whether there is a bias; Transformer Engine keeps an empty tensor where there is none."""
    return bias is not None and bias.numel() > 0


def _with_weights(made: Any, source: Any) -> Module:
    made.weight.copy_(source.weight)
    if _filled(source.bias):
        made.bias.copy_(source.bias)
    module: Module = made.to(source.weight.device)
    return module


def has_transformer_engine_layers(model: Module) -> bool:
    """Whether a part of a model is a layer of Transformer Engine.

    Raises:
        Missing: Transformer Engine is not installed.
    """
    REQUIREMENT.demand("has_transformer_engine_layers() was called.")
    import transformer_engine.pytorch as engine

    kinds = (engine.LayerNorm, engine.Linear, engine.TransformerLayer)
    return any(isinstance(part, kinds) for part in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A forward that computes in 8 bits in training, and in evaluation only when told so.

    Args:
        model_forward: a function whose first argument is the model.
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
    """A block in which layers compute by a recipe; releases have it by one of two names."""
    if hasattr(engine, "autocast"):
        region: AbstractContextManager[None] = engine.autocast(enabled=enabled, recipe=recipe)
    else:
        region = engine.fp8_autocast(enabled=enabled, fp8_recipe=recipe)
    return region


def apply_fp8_autowrap(model: Module, fp8_recipe_handler: TERecipeKwargs | None) -> Module:
    """Make the forward of a model compute in 8 bits; returns the model.

    Args:
        model: the model.
        fp8_recipe_handler: how values are scaled; by the defaults when None.

    Raises:
        Missing: Transformer Engine is not installed.
        NotOffered: it does not have what the settings ask for.
    """
    REQUIREMENT.demand("apply_fp8_autowrap() was called.")
    handler = fp8_recipe_handler or TERecipeKwargs()
    if isinstance(handler, FP8RecipeKwargs) and not handler.autocasts:
        return model
    plain = model.forward
    recipe, in_evaluation = _recipe(handler), bool(handler.use_autocast_during_eval)
    changed = contextual_fp8_autocast(getattr(plain, "__func__", plain), recipe, in_evaluation)
    setattr(model, "forward", MethodType(changed, model))  # noqa: B010 - a type checker refuses the assignment
    return model


def _check_recipe(handler: TERecipeKwargs) -> None:
    """Refuse what releases of Transformer Engine do not have any more, or never had."""
    if any(handler.override_linear_precision or ()):
        raise NotOffered(
            f"Cannot use TERecipeKwargs(override_linear_precision={handler.override_linear_precision}).",
            "Transformer Engine has no such option since its version 2.2.",
            "Leave it out, or use mixed_precision='bf16'.",
        )
    if handler.fp8_format == "E5M2":
        raise NotOffered(
            "Cannot use TERecipeKwargs(fp8_format='E5M2').",
            "Transformer Engine does not compute forward in E5M2.",
            "Use 'HYBRID', which has E5M2 in backward, or 'E4M3'.",
        )


def _recipe(handler: TERecipeKwargs) -> Any:
    """The recipe of Transformer Engine for our settings."""
    from transformer_engine.common import recipe

    _check_recipe(handler)
    usual = {"margin": handler.margin, "fp8_format": getattr(recipe.Format, str(handler.fp8_format))}
    if handler.use_mxfp8_block_scaling:
        return recipe.MXFP8BlockScaling(**usual)
    return recipe.DelayedScaling(
        **usual, amax_history_len=handler.amax_history_len, amax_compute_algo=handler.amax_compute_algo
    )
