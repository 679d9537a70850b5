"""Settings of `torch.compile` and of tensor parallelism: plain data, without torch."""

# ruff: noqa: RUF009 - `setting` makes the fields of every settings class

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields
from functools import partial
from typing import Any, Final

from accel_state.choices import DynamoBackend
from accel_state.errors import Conflict, SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.environ import read_setting
from accel_state.settings.integers import as_int
from accel_state.settings.run import COMPILE_VARIABLE
from accel_state.settings.schema import SWITCH, ObjectField, choice, given_value, object_fields, setting, settings_of

__all__ = (
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
)

_COMPILE_MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_MODES_WITH_CUDA_GRAPHS: Final = ("reduce-overhead", "max-autotune")
_DEFAULT_SETTINGS: Final = {
    "backend": "NO",
    "mode": "default",
    "fullgraph": False,
    "dynamic": None,
}


_dynamo: Final = partial(
    setting,
    variable="ACCELERATE_DYNAMO_{NAME}",
    flag="--dynamo_{name}",
    key="dynamo_config.dynamo_{name}",
    group="Resources",
)
"""A setting; its variable, flag and key are derived from the field name."""


@object_fields(
    use_regional_compilation=ObjectField(
        keep=lambda settings, value: value, make=lambda settings, kept: kept, fallback=lambda settings: False
    )
)
@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How models are compiled. A field that is None is read from the environment, else it has torch's default.

    Args:
        backend: a member of `DynamoBackend` or its name; NO compiles nothing.
        mode: as in `torch.compile`.
        fullgraph: as in `torch.compile`.
        dynamic: as in `torch.compile`.
        options: as in `torch.compile`.
        disable: as in `torch.compile`.
        use_regional_compilation: compile a model's repeated blocks, once for all of them, which takes less time. If
            unset, the field reads as False, and the backend decides: FSDP 2 compiles blocks.

    Raises:
        SettingError: no such backend or mode exists.
    """

    backend: DynamoBackend = _dynamo(
        type=choice(*map(str, DynamoBackend), fold=str.upper),
        variable=COMPILE_VARIABLE,
        question="Which dynamo backend would you like to use?",
        help="Compile models with this torch.compile backend.",
    )
    mode: str = _dynamo(
        type=choice(*_COMPILE_MODES),
        question="Which mode of torch.compile would you like to use?",
        help="Mode of torch.compile.",
    )
    fullgraph: bool = _dynamo(
        type=SWITCH,
        variable="ACCELERATE_DYNAMO_USE_{NAME}",
        flag="--dynamo_use_{name}",
        key="dynamo_config.dynamo_use_{name}",
        question="Do you want an error for a model that does not compile as one graph?",
        help="Require that each model compiles as one graph.",
    )
    dynamic: bool = _dynamo(
        type=SWITCH,
        variable="ACCELERATE_DYNAMO_USE_{NAME}",
        flag="--dynamo_use_{name}",
        key="dynamo_config.dynamo_use_{name}",
        question="Should models be compiled for dynamic shapes?",
        help="Compile for dynamic shapes.",
    )
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool = _dynamo(
        type=SWITCH,
        question="Should only the repeated blocks of a model be compiled instead of the whole model?",
        help="Compile the repeated blocks of a model instead of the whole model.",
    )

    def __post_init__(self) -> None:
        settings = settings_of(type(self))
        for name, default in {**_DEFAULT_SETTINGS, "use_regional_compilation": None}.items():
            value = given_value(self, name)
            if value is None:
                variable = read_setting(settings[name])
                setattr(self, name, default if variable is None else variable.value)
            elif isinstance(value, str):
                setattr(self, name, settings[name].parse(str(value), "argument"))
        self.backend = DynamoBackend(self.backend)
        if self.options is not None and self.mode != "default":
            raise SettingError(
                f"Cannot use TorchDynamoPlugin(mode={self.mode!r}, options=...).",
                "torch.compile accepts only one of the two.",
                "Remove one of them.",
            )

    @property
    def captures_cuda_graphs(self) -> bool:
        """Whether the compiler captures CUDA graphs on a GPU, whose replays write to the same memory."""
        if self.backend is not DynamoBackend.INDUCTOR or self.disable:
            return False
        options = self.options or {}
        return self.mode in _MODES_WITH_CUDA_GRAPHS or bool(options.get("triton.cudagraphs"))

    def to_dict(self) -> dict[str, Any]:
        """All fields by name; the backend under torch's name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile` that differ from its defaults."""
        own = {**_DEFAULT_SETTINGS, "backend": "no", "options": None, "disable": False}
        arguments = self.to_dict()
        del arguments["use_regional_compilation"]
        return {name: value for name, value in arguments.items() if value != own[name]}


@dataclass
class TorchTensorParallelPlugin:
    """How the weights of layers are sharded among processes.

    Args:
        tp_size: number of processes over which each tensor is sharded; 1: use that of `ParallelismConfig`.
        torch_device_mesh: the mesh; its axis "tp", or its only axis, is used. None: created from the sizes.
        parallelize_plan: maps module names, with `*` for any part of a name, to a style: "colwise", "rowwise",
            "colwise_rep", "rowwise_rep", "sequence_parallel" or a `ParallelStyle` of torch. None: the model's own plan
            (`tp_plan`).
        tensor_parallel_degree: another name for `tp_size`.

    Raises:
        SettingError: the size is not a positive int, or the plan is not a mapping.
        Conflict: both names of the size were passed with different values.

    Example:
        >>> plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        >>> plugin = TorchTensorParallelPlugin(tp_size=2, parallelize_plan=plan)
    """

    tp_size: int = 1
    torch_device_mesh: Any = None
    parallelize_plan: Mapping[str, Any] | None = None
    tensor_parallel_degree: InitVar[int | None] = None

    def __post_init__(self, tensor_parallel_degree: int | None) -> None:
        if tensor_parallel_degree is not None:
            if self.tp_size not in (1, tensor_parallel_degree):
                raise Conflict(
                    f"Cannot use TorchTensorParallelPlugin(tp_size={self.tp_size!r}, "
                    f"tensor_parallel_degree={tensor_parallel_degree!r}).",
                    "Both are names of the same setting, and the values differ.",
                    "Pass only one of them.",
                )
            self.tp_size = tensor_parallel_degree
        size = as_int(self.tp_size)
        if size is None or size < 1:
            raise SettingError(
                f"Cannot use TorchTensorParallelPlugin(tp_size={self.tp_size!r}).",
                "The value must be a number of processes.",
                "Pass an int of at least 1.",
            )
        self.tp_size = size
        if self.parallelize_plan is not None and not isinstance(self.parallelize_plan, Mapping):
            raise SettingError(
                f"Cannot use TorchTensorParallelPlugin(parallelize_plan={self.parallelize_plan!r}).",
                "A plan maps module names to sharding styles.",
                "Pass a dict such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}.",
            )
