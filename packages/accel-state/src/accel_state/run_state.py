"""`AcceleratorState`: the process together with its run.

The configurations of engines (`fsdp_plugin`, ...) are opaque here: the run stores the objects by parameter name. If
there are several DeepSpeed configurations, it calls `select` on the one in use and `deselect` on the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_state import current
from accel_state.current import Run, SharedState
from accel_state.data_shards import parallelism_config_from_environment
from accel_state.errors import Conflict, NoState, NotOffered, NotReady, SettingError
from accel_state.labels import DistributedType, PrecisionType
from accel_state.process import PartialState
from accel_state.settings.environ import resolve
from accel_state.settings.run import RunSettings
from accel_state.settings.schema import settings_of

if TYPE_CHECKING:
    from accel_state.mesh import ParallelismConfig

__all__ = (
    "AcceleratorState",
    "check_options",
    "is_initialized",
    "precision_name",
)


PLUGINS: Final = ("dynamo_plugin", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin")
"""Parameters of `AcceleratorState` with configurations of engines."""

_UNNAMED_CONFIGURATION: Final = "default"
"""Name of a DeepSpeed configuration that was passed without a name."""


def precision_name(mixed_precision: PrecisionType | str | None) -> str:
    """The precision mode: the argument, else that of the environment, else "no".

    Raises:
        SettingError: there is no such mode.
    """
    if mixed_precision is None:
        return str(resolve(RunSettings, {})["mixed_precision"].value)
    return str(settings_of(RunSettings)["mixed_precision"].parse(str(mixed_precision), "argument"))


def is_initialized() -> bool:
    """Whether an Accelerator or an AcceleratorState has created a run; a PartialState creates none."""
    return current.run_or_none() is not None


def check_options(options: dict[str, Any]) -> None:
    """Compare options with those with which the run was created; options that are None are not compared.

    Raises:
        Conflict: one of them differs.
        NotOffered: configurations of an engine differ.
    """
    run = current.run_or_none()
    if run is None:
        return
    made_with = {
        **run.options,
        "mixed_precision": run.mixed_precision,
        "parallelism_config": run.parallelism_config,
    }
    for name, value in options.items():
        before = made_with.get(name)
        if value is not None and before != value:
            error = NotOffered if name in PLUGINS else Conflict
            raise error(
                f"Cannot use {name}={value!r} in this run.",
                f"The run was created with {name}={before!r}, and all Accelerators of a process share one run.",
                f"Pass the same {name} to every Accelerator, or only to the first one.",
            )


def _content() -> dict[str, Any]:
    run = current.run_or_none()
    if run is None:
        return {}
    return {
        **PartialState._shared_state,
        **{name: run.options[name] for name in PLUGINS if name in run.options},
        "distributed_type": run.distributed_type,
        "_mixed_precision": run.mixed_precision,
        "mixed_precision": run.mixed_precision,
        "parallelism_config": run.parallelism_config,
        "device_mesh": run.mesh,
    }


def _mesh(config: ParallelismConfig, world_size: int, device_type: str) -> Any:
    config.check_world(world_size)
    return config.get_device_mesh(device_type)


def _show(name: str, plugin: Any) -> None:
    run = current.require_run()
    current.set_run(run._replace(options={**run.options, name: plugin}))


def _plugin(name: str) -> Any:
    """The configuration that was passed or assigned under a name.

    Raises:
        NoState: there is none. Other libraries use `hasattr` to find out whether a run has such a configuration.
    """
    options = current.require_run().options
    if name not in options:
        raise NoState(
            f"Cannot read AcceleratorState.{name}.",
            f"The run was created without a {name}.",
            f"Pass a {name} to the Accelerator, or check first with hasattr(state, {name!r}).",
        )
    return options[name]


class _RunPlugins:
    """The properties of a state for the configurations of engines.

    Without a configuration `fsdp_plugin` and `megatron_lm_plugin` raise AttributeError, and the others are None.

    Other libraries assign to them. Then all states return the assigned object; the strategy still uses its own.
    """

    @property
    def dynamo_plugin(self) -> Any:
        """Configuration of torch.compile."""
        return current.require_run().options.get("dynamo_plugin")

    @dynamo_plugin.setter
    def dynamo_plugin(self, plugin: Any) -> None:
        _show("dynamo_plugin", plugin)

    @property
    def fsdp_plugin(self) -> Any:
        """Configuration of FSDP; AttributeError without one."""
        return _plugin("fsdp_plugin")

    @fsdp_plugin.setter
    def fsdp_plugin(self, plugin: Any) -> None:
        _show("fsdp_plugin", plugin)

    @property
    def torch_tp_plugin(self) -> Any:
        """Configuration of PyTorch's tensor parallelism."""
        return current.require_run().options.get("torch_tp_plugin")

    @torch_tp_plugin.setter
    def torch_tp_plugin(self, plugin: Any) -> None:
        _show("torch_tp_plugin", plugin)

    @property
    def megatron_lm_plugin(self) -> Any:
        """Configuration of Megatron-LM; AttributeError without one."""
        return _plugin("megatron_lm_plugin")

    @megatron_lm_plugin.setter
    def megatron_lm_plugin(self, plugin: Any) -> None:
        _show("megatron_lm_plugin", plugin)

    @property
    def is_fsdp2(self) -> bool:
        """Whether the run uses version 2 of FSDP."""
        return getattr(current.require_run().options.get("fsdp_plugin"), "fsdp_version", None) == 2

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The DeepSpeed configurations by name."""
        configured = current.require_run().options.get("deepspeed_plugin")
        return (
            configured
            if configured is None or isinstance(configured, Mapping)
            else {_UNNAMED_CONFIGURATION: configured}
        )

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed configuration in use: the selected one, or the first one before a selection."""
        plugins = self.deepspeed_plugins
        return plugins[current.require_run().selected or next(iter(plugins))] if plugins else None

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, plugin: Any) -> None:
        _show("deepspeed_plugin", plugin)
        current.set_run(current.require_run()._replace(selected=None))

    def get_deepspeed_plugin(self, name: str) -> Any:
        """The DeepSpeed configuration of this name.

        Raises:
            NotReady: the run has no DeepSpeed configuration.
            SettingError: no configuration has this name.
        """
        return self._named(name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Use the DeepSpeed configuration of this name.

        Args:
            name: the key under which it was passed.

        Raises:
            NotReady: the run has no DeepSpeed configuration.
            SettingError: no configuration has this name.
        """
        chosen = self._named(name)
        for plugin in (self.deepspeed_plugins or {}).values():
            if plugin is not chosen:
                plugin.deselect()
        chosen.select(_from_accelerator_state=True)
        current.set_run(current.require_run()._replace(selected=name))

    def _named(self, name: str | None) -> Any:
        plugins = self.deepspeed_plugins
        if not plugins:
            raise NotReady(
                f"Cannot select the DeepSpeed configuration {name!r}.",
                "The run was created without DeepSpeed.",
                "Pass deepspeed_plugin to the Accelerator: one configuration, or a dictionary of several.",
            )
        if name is None or name not in plugins:
            raise SettingError(
                f"Cannot select the DeepSpeed configuration {name!r}.",
                "No configuration has this name.",
                f"Use one of {', '.join(map(repr, plugins))}.",
            )
        return plugins[name]


class AcceleratorState(_RunPlugins, PartialState):
    """The process and its run: mixed precision, strategy, mesh.

    An Accelerator creates the run; without one, this class creates a run without a strategy.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8"; from the environment when None.
        cpu: use the CPU even if another device is present.
        dynamo_plugin: how models are compiled.
        deepspeed_plugin: configuration of DeepSpeed, or several by name.
        fsdp_plugin: configuration of FSDP.
        torch_tp_plugin: configuration of PyTorch's tensor parallelism.
        megatron_lm_plugin: configuration of Megatron-LM.
        parallelism_config: the sizes of the axes of the mesh; from the environment when None.
        _from_accelerator: whether an Accelerator is the caller; ignored.
        kwargs: fields of `InitProcessGroupKwargs`.

    Raises:
        Conflict: the run was created with other options, or the world size is not the product of the axes.
        SettingError: there is no such precision mode.
    """

    _shared_state = SharedState(_content, current.end_run)

    def __init__(
        self,
        mixed_precision: PrecisionType | str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(cpu, **kwargs)
        values = (dynamo_plugin, deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin)
        plugins = {name: plugin for name, plugin in zip(PLUGINS, values, strict=True) if plugin is not None}
        precision = None if mixed_precision is None else precision_name(mixed_precision)
        if current.run_or_none() is None:
            current.set_run(self._new_run(mixed_precision, parallelism_config, plugins))
        check_options({"mixed_precision": precision, "parallelism_config": parallelism_config, **plugins})

    def _new_run(
        self,
        mixed_precision: PrecisionType | str | None,
        parallelism_config: ParallelismConfig | None,
        plugins: dict[str, Any],
    ) -> Run:
        config = parallelism_config or parallelism_config_from_environment()
        mesh = None if config is None else _mesh(config, self.num_processes, self.device.type)
        label = super().distributed_type
        return Run(precision_name(mixed_precision), label, options=plugins, mesh=mesh, parallelism_config=config)

    def __repr__(self) -> str:
        return super().__repr__() + f"\nMixed precision type: {self.mixed_precision}\n"

    @property
    def initialized(self) -> bool:
        """Whether there is a run."""
        return current.run_or_none() is not None

    @property
    def distributed_type(self) -> DistributedType:
        """The label of the strategy, else that of the process; or the value that was assigned to any state.

        Raises:
            SettingError: an assigned value is not a `DistributedType`.
        """
        return current.require_run().distributed_type

    @distributed_type.setter
    def distributed_type(self, label: DistributedType | str) -> None:
        if label not in list(DistributedType):
            raise SettingError(
                f"Cannot set AcceleratorState.distributed_type to {label!r}.",
                "There is no such distributed type.",
                f"Assign one of {', '.join(map(str, DistributedType))}.",
            )
        current.set_run(current.require_run()._replace(distributed_type=DistributedType(label)))

    @property
    def mixed_precision(self) -> str:
        """Precision mode of the run."""
        return current.require_run().mixed_precision

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The sizes of the axes of the mesh, or None."""
        return current.require_run().parallelism_config

    @property
    def device_mesh(self) -> Any:
        """The device mesh of the run, or None."""
        return current.require_run().mesh

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        if reset_partial_state:
            current.clear()
        else:
            current.end_run()
