"""`AcceleratorState`: the process together with the run it takes part in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_state import current
from accel_state.arranged import arrangement_of_environment
from accel_state.current import Run
from accel_state.errors import Conflict, NotOffered, SettingError
from accel_state.labels import DistributedType, PrecisionType
from accel_state.process import PartialState
from accel_state.run_plugins import PLUGINS, RunPlugins
from accel_state.settings.environ import resolve
from accel_state.settings.run import RunSettings
from accel_state.settings.schema import settings_of
from accel_state.shared import SharedState

if TYPE_CHECKING:
    from accel_state.mesh import ParallelismConfig

__all__ = ("AcceleratorState", "check_given", "is_initialized", "precision_name")


def precision_name(mixed_precision: PrecisionType | str | None) -> str:
    """The precision mode that was asked for, else that of the environment, else "no".

    Raises:
        SettingError: there is no such mode.
    """
    if mixed_precision is None:
        return str(resolve(RunSettings, {})["mixed_precision"].value)
    return str(settings_of(RunSettings)["mixed_precision"].parse(str(mixed_precision), "argument"))


def is_initialized() -> bool:
    """Whether a run was made, by an Accelerator or an AcceleratorState; a PartialState alone makes none."""
    return current.run_or_none() is not None


def check_given(asked: dict[str, Any]) -> None:
    """Compare options given by argument with those that the run was made with.

    Raises:
        Conflict: one of them differs; options that are None were not given.
        NotOffered: settings of an engine differ.
    """
    run = current.run_or_none()
    for name, value in asked.items():
        if run is None or value is None:
            continue
        before = getattr(run, name) if hasattr(run, name) else run.given.get(name)
        if before != value:
            kind = NotOffered if name in PLUGINS else Conflict
            raise kind(
                f"{name}={value!r} was asked for.",
                f"The run of this process was made with {name}={before!r}, and all Accelerators share the run.",
                f"Give the same {name} to every Accelerator, or give it to the first one only.",
            )


def _facts() -> dict[str, Any]:
    run = current.run_or_none()
    if run is None:
        return {}
    return {
        **PartialState._shared_state,
        **{name: run.given[name] for name in PLUGINS if name in run.given},
        "distributed_type": run.distributed_type,
        "mixed_precision": run.mixed_precision,
        "parallelism_config": run.parallelism_config,
        "device_mesh": run.mesh,
    }


def _mesh(arranged: ParallelismConfig, world_size: int, device_type: str) -> Any:
    arranged.check_world(world_size)
    return arranged.get_device_mesh(device_type)


class AcceleratorState(RunPlugins, PartialState):
    """The process and its run: mixed precision, strategy, mesh.

    An Accelerator makes the run; made alone, this makes one without a strategy.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8"; from the environment when None.
        cpu: work on the CPU even if another device is present.
        dynamo_plugin: how models are compiled.
        deepspeed_plugin: configuration of DeepSpeed, or several by name.
        fsdp_plugin: configuration of FSDP.
        torch_tp_plugin: configuration of PyTorch's tensor parallelism.
        megatron_lm_plugin: configuration of Megatron-LM.
        parallelism_config: how the processes are arranged; from the environment when None.
        _from_accelerator: whether an Accelerator asks; it makes no difference here.
        kwargs: fields of `InitProcessGroupKwargs`.

    Raises:
        Conflict: the run was made with another of these options, or the processes are too few or too many.
        SettingError: there is no such precision mode.
    """

    _shared_state = SharedState(_facts)

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
        given = (dynamo_plugin, deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin)
        plugins = {name: plugin for name, plugin in zip(PLUGINS, given, strict=True) if plugin is not None}
        asked = None if mixed_precision is None else precision_name(mixed_precision)
        if current.run_or_none() is None:
            current.set_run(self._new_run(mixed_precision, parallelism_config, plugins))
        check_given({"mixed_precision": asked, "parallelism_config": parallelism_config, **plugins})

    def _new_run(
        self,
        mixed_precision: PrecisionType | str | None,
        parallelism_config: ParallelismConfig | None,
        plugins: dict[str, Any],
    ) -> Run:
        arranged = parallelism_config or arrangement_of_environment()
        mesh = None if arranged is None else _mesh(arranged, self.num_processes, self.device.type)
        label = super().distributed_type
        return Run(precision_name(mixed_precision), label, given=plugins, mesh=mesh, parallelism_config=arranged)

    def __repr__(self) -> str:
        return super().__repr__() + f"\nMixed precision type: {self.mixed_precision}\n"

    @property
    def initialized(self) -> bool:
        """Whether the run is known."""
        return current.run_or_none() is not None

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of the run: the label of its strategy, else that of the process; or what was assigned to any state.

        Raises:
            SettingError: the value is not a kind of run.
        """
        return current.run().distributed_type

    @distributed_type.setter
    def distributed_type(self, kind: DistributedType | str) -> None:
        if kind not in list(DistributedType):
            raise SettingError(
                f"AcceleratorState.distributed_type = {kind!r}",
                "There is no such kind of run.",
                f"Assign one of {', '.join(map(str, DistributedType))}.",
            )
        current.set_run(current.run()._replace(distributed_type=DistributedType(kind)))

    @property
    def mixed_precision(self) -> str:
        """Precision mode of the run."""
        return current.run().mixed_precision

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How the processes of the run are arranged, or None."""
        return current.run().parallelism_config

    @property
    def device_mesh(self) -> Any:
        """The mesh that the devices of the run form, or None."""
        return current.run().mesh

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        if reset_partial_state:
            current.clear()
        else:
            current.end_run()
