"""The Accelerator's page of attributes that other libraries read, pop from and assign; the registry owns what is shown.

Settings objects that were given can be read here too, each under the name that these libraries know it by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from accel_data import DataLoaderConfiguration
from accel_plugins.checkpoint.config import ProjectConfiguration
from accel_state.errors import SettingError
from accel_state.labels import PrecisionType
from accel_torch.parts import Parts

if TYPE_CHECKING:
    from torch import Tensor

    from accel_plugins.ddp.config import DistributedDataParallelKwargs
    from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
    from accel_plugins.precision.fp8_config import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
    from accel_state.kwargs import InitProcessGroupKwargs
    from accel_torch.profile import ProfileKwargs

__all__ = ("ViewsPage",)


class _Registered:
    """An attribute that is one of the registry's.

    Args:
        name: what it is called there.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance._registry, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance._registry, self._name, value)


class ViewsPage(Parts):
    """What was prepared, registered and given."""

    _models = _Registered("models")
    _optimizers = _Registered("optimizers")
    _schedulers = _Registered("schedulers")
    _dataloaders = _Registered("loaders")
    _custom_objects = _Registered("custom")
    _save_model_state_pre_hook = _Registered("save_hooks")
    _load_model_state_pre_hook = _Registered("load_hooks")

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The engine of a backend that has one: what was assigned here, else that of the strategy, else None."""
        assigned = self._registry.engine
        return assigned if assigned is not None else getattr(self._engine.strategy, "engine", None)

    @deepspeed_engine_wrapped.setter
    def deepspeed_engine_wrapped(self, engine: Any) -> None:
        self._registry.engine = engine

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed configuration in use, or None."""
        return self.state.deepspeed_plugin

    @property
    def flag_tensor(self) -> Tensor | None:
        """The flag of `set_trigger`; None before it was used."""
        return self._trigger.flag

    @flag_tensor.setter
    def flag_tensor(self, flag: Tensor | None) -> None:
        self._trigger.flag = flag

    @property
    def native_amp(self) -> bool:
        """Whether forward passes autocast."""
        return self._engine.precision.dtype is not None

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are prepared."""
        return self._options.loader

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where checkpoints and logs go.

        Raises:
            SettingError: what is assigned is no `ProjectConfiguration`.
        """
        return self._options.project

    @project_configuration.setter
    def project_configuration(self, configuration: ProjectConfiguration) -> None:
        if not isinstance(configuration, ProjectConfiguration):
            raise SettingError(
                f"Accelerator.project_configuration = {configuration!r}",
                "It says where checkpoints and logs go.",
                "Assign a ProjectConfiguration(project_dir=...).",
            )
        self._options = self._options._replace(project=configuration)

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The settings object that was given for autocast, or None."""
        from accel_plugins.precision.config import AutocastKwargs

        return self._options.handler(AutocastKwargs)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The one for the gradient scaler."""
        from accel_plugins.precision.config import GradScalerKwargs

        return self._options.handler(GradScalerKwargs)

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The one for `DistributedDataParallel`."""
        from accel_plugins.ddp.config import DistributedDataParallelKwargs

        return self._options.handler(DistributedDataParallelKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The one for the process group."""
        from accel_state.kwargs import InitProcessGroupKwargs

        return self._options.handler(InitProcessGroupKwargs)

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The one for `profile`."""
        from accel_torch.profile import ProfileKwargs

        return self._options.handler(ProfileKwargs)

    @property
    def fp8_recipe_handler(self) -> FP8RecipeKwargs | None:
        """The one for training in 8 bits, whatever the library."""
        from accel_plugins.precision.fp8_config import FP8RecipeKwargs

        return self._options.handler(FP8RecipeKwargs)

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The one for training in 8 bits by torchao."""
        from accel_plugins.precision.fp8_config import AORecipeKwargs

        return self._options.handler(AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The one for training in 8 bits by Transformer Engine."""
        from accel_plugins.precision.fp8_config import TERecipeKwargs

        return self._options.handler(TERecipeKwargs)

    @property
    def msamp_recipe_handler(self) -> MSAMPRecipeKwargs | None:
        """The one for training in 8 bits by MS-AMP."""
        from accel_plugins.precision.fp8_config import MSAMPRecipeKwargs

        return self._options.handler(MSAMPRecipeKwargs)

    @property
    def has_fp8_handler(self) -> bool:
        """Whether a settings object for training in 8 bits was given."""
        return any((self.ao_recipe_handler, self.te_recipe_handler, self.msamp_recipe_handler))

    @property
    def fp8_enabled(self) -> bool:
        """Whether the run computes in 8 bits."""
        return self._engine.precision.name == PrecisionType.FP8.value
