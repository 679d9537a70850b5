"""Training in 8 bits by MS-AMP of Microsoft, which changes a model and its optimizer together.

It runs on GPUs only; what is here is tested against a stand-in with its interface. No package index has a release of it
with which that interface could be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from accel_plugins.precision.config import AutocastKwargs
from accel_plugins.precision.float8 import Float8
from accel_plugins.precision.fp8_config import MSAMPRecipeKwargs
from accel_plugins.precision.fp8_library import FP8BackendType
from accel_state.errors import Conflict
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle
    from accel_state.devices.base import DeviceFamily

__all__ = ("MSAMP", "REQUIREMENT")

REQUIREMENT: Final = Requirement("msamp", "ms-amp", extra="msamp @ git+https://github.com/Azure/MS-AMP")


class MSAMP(Float8):
    """Weights, gradients and states of the optimizer are kept in 8 bits as far as the level says.

    Args:
        family: family of the device that computes.
        options: how to autocast.
        recipe: the level.

    Raises:
        Missing: MS-AMP is not installed.
    """

    library: ClassVar[FP8BackendType] = FP8BackendType.MSAMP
    exchanges_layers: ClassVar[bool] = False

    def __init__(
        self, family: DeviceFamily, options: AutocastKwargs | None = None, recipe: MSAMPRecipeKwargs | None = None
    ) -> None:
        REQUIREMENT.demand("Cannot use mixed_precision='fp8' with MS-AMP.")
        super().__init__(family, options)
        self._recipe = recipe or MSAMPRecipeKwargs()

    def check(self, bundle: Bundle) -> None:
        if bundle.models and (len(bundle.models), len(bundle.optimizers)) != (1, 1):
            raise Conflict(
                "Cannot use mixed_precision='fp8' with MS-AMP.",
                f"It changes one model and its optimizer together; prepare() was given {len(bundle.models)} models and "
                f"{len(bundle.optimizers)} optimizers.",
                "Give one model and its optimizer in one call.",
            )

    def engine_entries(self) -> Mapping[str, Any]:
        return {"msamp": {"enabled": True, "opt_level": self._recipe.opt_level}}

    def setup(self, bundle: Bundle, per_parameter_sharding: bool = False) -> None:
        if bundle.optimizers:
            import msamp

            made: Any = msamp.initialize(bundle.models[0], bundle.optimizers[0], opt_level=self._recipe.opt_level)
            bundle.models[0], bundle.optimizers[0] = made
        super().setup(bundle, per_parameter_sharding)
