"""Attributes that other libraries read and assign: the prepared objects, and the settings objects given.

Their names are those of the documented interface.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from accel_data.config import DataLoaderConfiguration
from accel_plugins.checkpoint.config import ProjectConfiguration
from accel_state.errors import NoState, SettingError, UnknownKind
from accel_state.kwargs import KwargsHandler
from accel_state.labels import PrecisionType
from accel_torch.accelerator.facade import Facade

if TYPE_CHECKING:
    from accel_plugins.ddp.config import DistributedDataParallelKwargs
    from accel_plugins.precision.config import (
        AORecipeKwargs,
        AutocastKwargs,
        FP8RecipeKwargs,
        GradScalerKwargs,
        MSAMPRecipeKwargs,
        TERecipeKwargs,
    )
    from accel_state.kwargs import InitProcessGroupKwargs
    from accel_torch.profile import ProfileKwargs

__all__ = ("AttributesMixin",)

H = TypeVar("H", bound=KwargsHandler)


class _Registered:
    """An attribute of `PreparedObjects`, available on the Accelerator.

    Args:
        name: the attribute's name in `PreparedObjects`.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance.session.prepared, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.session.prepared, self._name, value)


class _Handler(Generic[H]):
    """The settings object of one class that was given, or None. An assigned one replaces it for later use.

    Args:
        module: the module of the class; imported at the first use.
        name: the name of the class.
        then: called with the Accelerator and the assigned object.
    """

    def __init__(self, module: str, name: str, then: Callable[[Facade, H | None], None] | None = None) -> None:
        self._module, self._name, self._then = module, name, then
        self.__doc__ = f"The `{name}` that was given, or None. An assigned one applies to objects created afterwards."

    def _kind(self) -> type[H]:
        kind: type[H] = getattr(importlib.import_module(self._module), self._name)
        return kind

    @overload
    def __get__(self, instance: None, owner: type) -> _Handler[H]: ...
    @overload
    def __get__(self, instance: Facade, owner: type) -> H | None: ...
    def __get__(self, instance: Facade | None, owner: type) -> _Handler[H] | H | None:
        return self if instance is None else instance.session.options.handler(self._kind())

    def __set__(self, instance: Facade, handler: H | None) -> None:
        kind, options, strategy = self._kind(), instance.session.options, instance.session.strategy
        if handler is not None and not isinstance(handler, kind):
            raise UnknownKind(
                f"Cannot set an attribute of the Accelerator to {handler!r}.",
                f"It must be None or of type {kind.__name__}.",
                f"Assign a {kind.__name__}(...) or None.",
            )
        others = [other for other in options.handlers if not isinstance(other, kind)]
        instance.session.options = options._replace(handlers=(*others, *([] if handler is None else [handler])))
        if isinstance(strategy.config, kind):
            strategy.config = handler or kind()
        if self._then is not None:
            self._then(instance, handler)


class AttributesMixin(Facade):
    """Prepared objects, registered objects and settings."""

    _models = _Registered("models")
    _optimizers = _Registered("optimizers")
    _schedulers = _Registered("schedulers")
    _dataloaders = _Registered("loaders")
    _custom_objects = _Registered("custom")
    _save_model_state_pre_hook = _Registered("save_hooks")
    _load_model_state_pre_hook = _Registered("load_hooks")

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The engine that was assigned here, otherwise the strategy's engine, or None."""
        assigned = self.session.prepared.engine
        return assigned if assigned is not None else getattr(self.session.strategy, "engine", None)

    @deepspeed_engine_wrapped.setter
    def deepspeed_engine_wrapped(self, engine: Any) -> None:
        self.session.prepared.engine = engine

    @property
    def deepspeed_plugin(self) -> Any:
        """The active DeepSpeed configuration, or None."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The dict that DeepSpeed reads, with the values that `prepare` filled in.

        Raises:
            NoState: the run does not use DeepSpeed.
        """
        plugin = self.deepspeed_plugin
        if plugin is None:
            raise NoState(
                "Cannot read Accelerator.deepspeed_config.",
                "The run does not use DeepSpeed.",
                "Give DeepSpeedPlugin(...) to the Accelerator, or launch with --use_deepspeed.",
            )
        table: dict[str, Any] = plugin.deepspeed_config
        return table

    @property
    def native_amp(self) -> bool:
        """Whether prepared models run their forward pass under autocast."""
        return self.session.precision.autocasts

    @native_amp.setter
    def native_amp(self, autocasts: bool) -> None:
        self.session.precision.switch_autocast(autocasts)

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How DataLoaders are prepared.

        Raises:
            SettingError: the assigned value is not a `DataLoaderConfiguration`.
        """
        return self.session.options.loader

    @dataloader_config.setter
    def dataloader_config(self, configuration: DataLoaderConfiguration) -> None:
        if not isinstance(configuration, DataLoaderConfiguration):
            raise SettingError(
                f"Cannot set Accelerator.dataloader_config to {configuration!r}.",
                "The attribute must be a DataLoaderConfiguration.",
                "Assign a DataLoaderConfiguration(...).",
            )
        self.session.options = self.session.options._replace(loader=configuration)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The folders of checkpoints and logs.

        Raises:
            SettingError: the assigned value is not a `ProjectConfiguration`.
        """
        return self.session.options.project

    @project_configuration.setter
    def project_configuration(self, configuration: ProjectConfiguration) -> None:
        if not isinstance(configuration, ProjectConfiguration):
            raise SettingError(
                f"Cannot set Accelerator.project_configuration to {configuration!r}.",
                "The attribute must be a ProjectConfiguration.",
                "Assign a ProjectConfiguration(project_dir=...).",
            )
        self.session.options = self.session.options._replace(project=configuration)

    autocast_handler: _Handler[AutocastKwargs] = _Handler(
        "accel_plugins.precision.config",
        "AutocastKwargs",
        lambda accelerator, handler: accelerator.session.precision.autocast_by(handler),
    )
    scaler_handler: _Handler[GradScalerKwargs] = _Handler("accel_plugins.precision.config", "GradScalerKwargs")
    ddp_handler: _Handler[DistributedDataParallelKwargs] = _Handler(
        "accel_plugins.ddp.config", "DistributedDataParallelKwargs"
    )
    init_handler: _Handler[InitProcessGroupKwargs] = _Handler("accel_state.kwargs", "InitProcessGroupKwargs")
    profile_handler: _Handler[ProfileKwargs] = _Handler("accel_torch.profile", "ProfileKwargs")
    fp8_recipe_handler: _Handler[FP8RecipeKwargs] = _Handler("accel_plugins.precision.config", "FP8RecipeKwargs")
    ao_recipe_handler: _Handler[AORecipeKwargs] = _Handler("accel_plugins.precision.config", "AORecipeKwargs")
    te_recipe_handler: _Handler[TERecipeKwargs] = _Handler("accel_plugins.precision.config", "TERecipeKwargs")
    msamp_recipe_handler: _Handler[MSAMPRecipeKwargs] = _Handler("accel_plugins.precision.config", "MSAMPRecipeKwargs")

    @property
    def has_fp8_handler(self) -> bool:
        """Whether the Accelerator has a settings object for fp8."""
        return any((self.ao_recipe_handler, self.te_recipe_handler, self.msamp_recipe_handler))

    @property
    def fp8_enabled(self) -> bool:
        """Whether the run computes in fp8."""
        return self.session.precision.name == PrecisionType.FP8.value
