"""The axes along which the processes of a run divide the work, their sizes and options, and the device mesh.

Reading the configuration never loads torch; building the mesh does.

Axes, outermost first: `dp_replicate` (copies of the model), `dp_shard` (sharded parameters), `cp` (the sequence sharded
by torch), `sp` (the sequence sharded, and in attention the heads), `tp` (sharded tensors of a layer). If DeepSpeed
shards the sequence over `sp`, it uses its own groups and there is no mesh. Backends may have axes of their own, such as
`pp` for the stages of a pipeline; they are outside of these.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from accel_state.errors import Conflict, SettingError
from accel_state.settings.environ import fill_from_environment, from_environment
from accel_state.settings.run import MeshSettings
from accel_state.settings.schema import BOOLEAN, TEXT, ValueType, choice, int_at_least, setting, settings_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = (
    "AXES",
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "FLATTENED",
    "MESH_GROUP",
    "DeepSpeedSequenceParallelConfig",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
)

BETA_CP_AVAILABLE_PYTORCH_VERSION: Final = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION: Final = "0.18.2"
BETA_TP_AVAILABLE_PYTORCH_VERSION: Final = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION: Final = "4.52.0"

MESH_GROUP: Final = "ParallelismConfig"
"""Heading of these settings in `--help` and the reference."""

_mesh: Final = partial(
    setting,
    variable="PARALLELISM_CONFIG_{NAME}",
    flag="--parallelism_config_{name}",
    key="parallelism_config.parallelism_config_{name}",
    group=MESH_GROUP,
)

AXES: Final = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Axes of the device mesh, outermost first; further axes of a backend are outside of them."""

FLATTENED: Final[Mapping[str, tuple[str, ...]]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp", "sp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp", "sp"),
}
"""Names of flattened axes: those with different data, those that shard parameters, those that average gradients."""


_AXIS_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


def _parse_axes(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, size = part.partition("=")
        if name in axes or not _AXIS_NAME.fullmatch(name) or name in AXES or name in FLATTENED or int(size) < 1:
            raise ValueError(text)
        axes[name] = int(size)
    return axes


def _format_axes(axes: Any) -> str:
    if not isinstance(axes, Mapping):
        return str(axes)
    return ",".join(f"{name}={size}" for name, size in axes.items())


_AXES_OF_BACKENDS: Final = ValueType(
    "names of other axes with their sizes, such as pp=2", _parse_axes, _format_axes, metavar="NAME=N,..."
)

_ATTENTION_IMPLEMENTATIONS: Final = ("sdpa", "flash_attention_2", "flash_attention_3")


def _length(text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    length = int(text)
    if length < 1:
        raise ValueError(text)
    return length


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism by torch.

    Args:
        enable_async_tp: overlap the communication of tensor parallelism with its computation.
    """

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism by torch.

    Args:
        cp_comm_strategy: how processes exchange keys and values: "allgather" (all at once) or "alltoall" (in a ring).

    Raises:
        SettingError: there is no such strategy.
    """

    cp_comm_strategy: str | None = _mesh(
        None,
        type=choice("allgather", "alltoall"),
        help="Collective that exchanges keys and values in context parallelism.",
        unset="allgather",
    )

    def __post_init__(self) -> None:
        fill_from_environment(self)
        self.cp_comm_strategy = settings_of(type(self))["cp_comm_strategy"].parse(
            str(self.cp_comm_strategy), "argument"
        )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of sequence parallelism by DeepSpeed.

    Args:
        sp_seq_length: tokens of a full sequence; required when all sequences have the same length.
        sp_seq_length_is_variable: whether the lengths of sequences differ.
        sp_attn_implementation: "sdpa", "flash_attention_2", "flash_attention_3", or a FlashAttention kernel of the
            Hub such as "kernels-community/flash-attn2"; None keeps the model's own.

    Raises:
        SettingError: the attention does not work on a sharded sequence.
        Conflict: all sequences have the same length, and `sp_seq_length` is missing.
    """

    sp_seq_length: int | None = _mesh(
        None,
        type=ValueType("an integer of at least 1", _length, metavar="N"),
        help="Tokens of a full sequence, if all sequences have the same length.",
    )
    sp_seq_length_is_variable: bool | None = _mesh(
        None,
        type=BOOLEAN,
        help="Whether sequences differ in length.",
        unset=True,
    )
    sp_attn_implementation: str | None = _mesh(
        None,
        type=TEXT,
        help="Implementation of attention for sharded sequences.",
    )

    def __post_init__(self) -> None:
        fill_from_environment(self)
        name = self.sp_attn_implementation
        if name is not None and name not in _ATTENTION_IMPLEMENTATIONS and not ("/" in name and "flash-attn" in name):
            raise SettingError(
                f"Cannot use DeepSpeedSequenceParallelConfig(sp_attn_implementation={name!r}).",
                "This attention does not support a sharded sequence.",
                f"Pass one of {', '.join(_ATTENTION_IMPLEMENTATIONS)}, or a FlashAttention kernel such as "
                "'kernels-community/flash-attn2'.",
            )
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise Conflict(
                "Cannot use DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False).",
                "It requires the length of the sequences, and sp_seq_length is missing.",
                "Pass sp_seq_length, or set PARALLELISM_CONFIG_SP_SEQ_LENGTH.",
            )


def _size(what: str) -> Any:
    return _mesh(type=int_at_least(1), help=f"Number of processes over which {what}; 1 for none.", unset=1)


def _backend(what: str, *libraries: str) -> Any:
    return _mesh(type=choice(*libraries), help=f"Library that shards {what}.", unset=libraries[0])


@dataclass
class ParallelismConfig:
    """The sizes of the axes along which processes divide the work; their product is the world size.

    Each defaults to its variable `PARALLELISM_CONFIG_...`, else to 1.

    Args:
        dp_replicate_size: number of replicas of the model.
        dp_shard_size: processes over which parameters, gradients and optimizer states are sharded.
        tp_size: processes over which each tensor of a layer is sharded.
        cp_size: processes over which torch shards the sequence.
        cp_backend: "torch".
        sp_size: processes over which the sequence is sharded, and in attention the heads (Ulysses).
        sp_backend: "deepspeed", or "torch" for collectives of torch without DeepSpeed.
        tp_handler: options of tensor parallelism.
        cp_handler: options of context parallelism.
        sp_handler: options of sequence parallelism.
        axes: sizes of further axes by name, which the backend declares in its manifest; outermost first, and outside of
            all others. Processes along them read the same samples.

    Raises:
        SettingError: a size, backend, handler or the name of an axis is invalid.
        Conflict: two of them exclude each other.

    Example:
        >>> config = ParallelismConfig(dp_shard_size=4, tp_size=2)
        >>> config.total_size, config.active_mesh_dims
        (8, ['dp_shard', 'tp'])
        >>> ParallelismConfig(dp_replicate_size=2, axes={"pp": 2}).active_mesh_dims
        ['pp', 'dp_replicate']
    """

    dp_replicate_size: int | None = _size("the model is replicated")
    dp_shard_size: int | None = _size("parameters are sharded")
    tp_size: int | None = _size("each tensor of a layer is sharded")
    cp_size: int | None = _size("torch shards the sequence")
    cp_backend: str | None = _backend("the sequence over `cp`", "torch")
    sp_size: int | None = _size("the sequence, and in attention the heads, are sharded")
    sp_backend: str | None = _backend("the sequence over `sp`", "deepspeed", "torch")
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    axes: Mapping[str, int] | None = _mesh(
        None,
        type=_AXES_OF_BACKENDS,
        help="Sizes of further axes that the backend has, such as pp=2.",
        unset={},
    )
    device_mesh: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)
    _flattened: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fill_from_environment(self)
        for name, definition in settings_of(type(self)).items():
            _check(name, getattr(self, name), definition)
        self._fill_handlers()
        if self.cp_enabled and self.sp_enabled:
            raise Conflict(
                f"Cannot use ParallelismConfig(cp_size={self.cp_size}, sp_size={self.sp_size}).",
                "Both shard the sequence.",
                "Set one of them to 1.",
            )
        sharded = self.tp_enabled or (self.cp_enabled and not from_environment(MeshSettings).allow_cp_standalone)
        if sharded and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise Conflict(
                f"Cannot use ParallelismConfig(dp_replicate_size={self.dp_replicate_size}, tp_size={self.tp_size}, "
                f"cp_size={self.cp_size}).",
                "Tensor and context parallelism support replicas of the model only if parameters are sharded too.",
                "Set dp_shard_size above 1, or dp_replicate_size to 1. For context parallelism without sharded "
                "parameters, set ACCELERATE_ALLOW_CP_STANDALONE=true.",
            )

    def _fill_handlers(self) -> None:
        kinds = {
            "tp": TorchTensorParallelConfig,
            "cp": TorchContextParallelConfig,
            "sp": DeepSpeedSequenceParallelConfig,
        }
        for axis, kind in kinds.items():
            handler = getattr(self, f"{axis}_handler")
            if handler is None and self.size(axis) > 1:
                setattr(self, f"{axis}_handler", kind())
            elif handler is not None and not isinstance(handler, kind):
                raise SettingError(
                    f"Cannot use ParallelismConfig({axis}_handler={handler!r}).",
                    f"The handler must be a {kind.__name__}.",
                    f"Pass {axis}_handler={kind.__name__}(...).",
                )

    def size(self, axis: str) -> int:
        """Number of processes along an axis, such as "tp"."""
        assert self.axes is not None
        return self.axes[axis] if axis in self.axes else int(getattr(self, f"{axis}_size"))

    def _enabled(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self.size(axis) > 1]

    @property
    def _of_backend(self) -> tuple[str, ...]:
        return tuple(self.axes or ())

    @property
    def sp_by_engine(self) -> bool:
        """Whether an engine shards the sequence over `sp` with its own groups, outside the mesh."""
        return self.sp_enabled and self.sp_backend != "torch"

    def _get_mesh(self) -> tuple[tuple[Any, ...], ...]:
        """Names and sizes of the axes with more than one process, outermost first; empty when there are none."""
        return tuple(zip(*((name, self.size(name)) for name in self._enabled(*self._of_backend, *AXES)), strict=True))

    def _in_mesh(self, *axes: str) -> list[str]:
        return [axis for axis in self._enabled(*axes) if axis != "sp" or not self.sp_by_engine]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the model is replicated."""
        return self.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded."""
        return self.size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether tensors of a layer are sharded."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether torch shards the sequence."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether the sequence is sharded, and in attention the heads."""
        return self.size("sp") > 1

    @property
    def dp_dim_names(self) -> list[str]:
        """Axes along which processes read different samples."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes along which processes read the same samples."""
        return self._enabled("tp", "cp", "sp", *self._of_backend)

    @property
    def active_mesh_dims(self) -> list[str]:
        """Axes with more than one process."""
        return self._enabled(*self._of_backend) + self.dp_dim_names + self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes along which parameters are sharded."""
        return self._in_mesh(*FLATTENED["dp_shard_cp"])

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes along which gradients are averaged."""
        return self._in_mesh(*FLATTENED["dp_cp"])

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes of fully sharded data parallelism: the replicas, then the flattened axis that shards parameters."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def total_size(self) -> int:
        """Number of all processes."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that read different samples."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that read the same samples."""
        return math.prod(map(self.size, ("tp", "cp", "sp", *self._of_backend)))

    def check_world(self, world_size: int) -> None:
        """Raise unless the product of the sizes is the world size.

        Raises:
            Conflict: they differ.
        """
        if self.total_size != world_size:
            sizes = " x ".join(f"{axis}={self.size(axis)}" for axis in self.active_mesh_dims) or "nothing"
            raise Conflict(
                f"Cannot use a ParallelismConfig of {sizes}: it requires {self.total_size} processes.",
                f"The world size is {world_size}.",
                f"Launch {self.total_size} processes, or change the sizes.",
            )

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """A new mesh of the axes with more than one process, or None when there is none to build.

        Args:
            device_type: such as "cuda".

        Raises:
            Conflict: the world size is not the product of the sizes.
        """
        named_sizes = self._get_mesh()
        if not named_sizes or self.sp_by_engine:
            return None
        names, sizes = named_sizes
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if dist.is_initialized():
            self.check_world(dist.get_world_size())
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        for name, axes in FLATTENED.items():
            enabled = self._in_mesh(*axes)
            if enabled:
                self._flattened[name] = mesh[enabled]._flatten(name)  # type: ignore[index]
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh; built at the first call.

        Args:
            device_type: such as "cuda"; optional once the mesh is built.

        Raises:
            SettingError: there is no mesh yet, and the device type is missing.
            Conflict: the mesh has another device type, or the world size is not the product of the sizes.
        """
        if self.device_mesh is not None:
            self._check_type(device_type)
        elif device_type is None:
            raise SettingError(
                "Cannot build a device mesh.",
                "No device type was given.",
                'Pass the device type, such as "cuda".',
            )
        else:
            self.device_mesh = self.build_device_mesh(device_type)
        return self.device_mesh  # type: ignore[no-any-return]

    def _check_type(self, device_type: str | None) -> None:
        if device_type is not None and self.device_mesh.device_type != device_type:
            raise Conflict(
                f"Cannot build a device mesh of {device_type!r} devices.",
                f"This run has a mesh of {self.device_mesh.device_type!r} devices.",
                "Use one device type in a run.",
            )

    def submesh(self, name: str) -> DeviceMesh | None:
        """The submesh along an axis or a name of `FLATTENED`; None if it has one process."""
        if self.device_mesh is None:
            return None
        if name in FLATTENED:
            return self._flattened.get(name)
        return self.device_mesh[name] if name in self.device_mesh.mesh_dim_names else None

    def to_json(self) -> dict[str, Any]:
        """Sizes, backends and handlers as JSON values."""
        fields = (field.name for field in dataclasses.fields(self) if field.init)
        return {name: _plain(getattr(self, name)) for name in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value if value is None or isinstance(value, (int, str)) else dataclasses.asdict(value)


def _check(name: str, value: object, definition: Any) -> None:
    """Raise for a value from code that its type would refuse as text."""
    as_text = definition.type.format(value)
    if isinstance(value, bool) or definition.parse(as_text, "argument") != value:
        raise definition.refusal(value, "argument")
