"""The device mesh of a run: the submesh of each axis, and which axes can be combined.

One table lists the supported combinations; it is checked at the start of a run and printed in the docs. Other
combinations raise an error, with the reason if it is known. A backend supports those combinations of which its manifest
declares all axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from accel_plugins.manifest import Axis, Manifest
from accel_state.errors import Conflict

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.mesh import ParallelismConfig

__all__ = (
    "DATA_AXES",
    "EXCLUSIONS",
    "PERMITTED",
    "SEQUENCE_AXES",
    "SHARDING_AXES",
    "Combination",
    "Exclusion",
    "active_axes",
    "as_markdown",
    "check_mesh",
    "check_precision",
    "flattened",
    "named",
    "present_axes",
    "sequence_submesh",
    "submesh",
    "takes",
)

DATA_AXES: Final = (Axis.REPLICATE, Axis.SHARD)
"""Axes along which processes read different samples, outermost first."""

SEQUENCE_AXES: Final = (Axis.CONTEXT, Axis.SEQUENCE)
"""Axes along which processes read different parts of the same samples."""


def present_axes(mesh: DeviceMesh, axes: Iterable[str]) -> list[str]:
    """The names of `axes` that the mesh has, in the mesh's order."""
    wanted = set(axes)
    return [name for name in mesh.mesh_dim_names or () if name in wanted]


def submesh(mesh: DeviceMesh | None, axis: str) -> DeviceMesh | None:
    """This process's submesh along one axis, or None when the mesh lacks the axis."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return next((mesh[name] for name in names if mesh is not None and name == axis), None)


def sequence_submesh(mesh: DeviceMesh | None) -> tuple[Axis, DeviceMesh] | None:
    """The axis along which the sequence is sharded, with its submesh; None when it is not sharded."""
    for axis in SEQUENCE_AXES:
        neighbours = submesh(mesh, axis)
        if neighbours is not None:
            return axis, neighbours
    return None


def flattened(mesh: DeviceMesh, axes: Iterable[str]) -> DeviceMesh | None:
    """A 1-dimensional mesh over the `axes` that the mesh has, or None when it has none of them."""
    names = present_axes(mesh, axes)
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))


# ---------------------------------------------------------------------- combinations of axes

SHARDING_AXES: Final = frozenset({Axis.SHARD, Axis.CONTEXT, Axis.SEQUENCE})
"""Axes over which a sharding backend shards parameters."""


class Combination(NamedTuple):
    """Axes that can be combined.

    Args:
        axes: the axes with more than one process.
        meaning: what is replicated or sharded.
    """

    axes: frozenset[str]
    meaning: str


class Exclusion(NamedTuple):
    """Axes that exclude each other, and why."""

    axes: frozenset[str]
    reason: str
    remedy: str


def _of(*axes: Axis) -> frozenset[str]:
    return frozenset(axes)


PERMITTED: Final = (
    Combination(_of(), "the backend decides"),
    Combination(_of(Axis.REPLICATE), "copies of the model"),
    Combination(_of(Axis.SHARD), "parameters sharded"),
    Combination(_of(Axis.REPLICATE, Axis.SHARD), "replicated groups that shard the parameters (HSDP)"),
    Combination(_of(Axis.TENSOR), "tensors of a layer sharded"),
    Combination(
        _of(Axis.SHARD, Axis.TENSOR),
        "tensors of a layer sharded, and each shard again over the data-parallel processes",
    ),
    Combination(_of(Axis.REPLICATE, Axis.SHARD, Axis.TENSOR), "the same, in replicated groups"),
    Combination(_of(Axis.CONTEXT), "the sequence sharded; a sharding backend shards parameters over the same axis"),
    Combination(_of(Axis.REPLICATE, Axis.CONTEXT), "replicas of the model, the sequence sharded"),
    Combination(_of(Axis.SHARD, Axis.CONTEXT), "parameters sharded over both axes, the sequence over one"),
    Combination(_of(Axis.SEQUENCE), "the sequence sharded, and in attention the heads"),
    Combination(_of(Axis.REPLICATE, Axis.SEQUENCE), "replicas of the model, the sequence sharded"),
    Combination(_of(Axis.SHARD, Axis.SEQUENCE), "parameters sharded over both axes, the sequence over one"),
)
"""Every supported combination; tests compare each with the losses of a single process."""

EXCLUSIONS: Final = (
    Exclusion(
        _of(Axis.CONTEXT, Axis.SEQUENCE),
        "Both shard the sequence.",
        "Set one of cp_size and sp_size to 1.",
    ),
    Exclusion(
        _of(Axis.SEQUENCE, Axis.TENSOR),
        "Both shard the heads of attention.",
        "Set one of sp_size and tp_size to 1.",
    ),
    Exclusion(
        _of(Axis.CONTEXT, Axis.TENSOR),
        "Attention over a sharded sequence accepts plain tensors only, and tensor parallelism passes DTensors.",
        "Set one of cp_size and tp_size to 1.",
    ),
    Exclusion(
        _of(Axis.REPLICATE, Axis.TENSOR),
        "DistributedDataParallel synchronises the replicas, and it does not accept sharded tensors.",
        "Set dp_shard_size instead of dp_replicate_size, or both above 1.",
    ),
    Exclusion(
        _of(Axis.REPLICATE, Axis.SHARD, Axis.CONTEXT),
        "Copies of groups that shard both parameters and the sequence are not tested.",
        "Set dp_replicate_size=1, or dp_shard_size=1: parameters are sharded over the axis of the sequence too.",
    ),
    Exclusion(
        _of(Axis.REPLICATE, Axis.SHARD, Axis.SEQUENCE),
        "Copies of groups that shard both parameters and the sequence are not tested.",
        "Set dp_replicate_size=1, or dp_shard_size=1: parameters are sharded over the axis of the sequence too.",
    ),
)
"""Reasons why other combinations do not work; an error has the first that applies."""


def active_axes(parallelism_config: ParallelismConfig) -> frozenset[str]:
    """The axes with more than one process: members of `Axis`, and names of axes that a backend has."""
    return frozenset(parallelism_config.active_mesh_dims)


def _axes_of_table(axes: frozenset[str]) -> frozenset[str]:
    """The axes of the table. A backend that has others says itself what they can be combined with."""
    return axes & frozenset(Axis)


def check_mesh(manifest: Manifest, parallelism_config: ParallelismConfig) -> None:
    """Raise if a backend does not support the axes of a run.

    Called at the start of a run, before `prepare`.

    Raises:
        Conflict: the combination is not in the table, or the backend does not support it.
    """
    axes = active_axes(parallelism_config)
    failure = f"Cannot use a ParallelismConfig with {named(axes)} with the backend {manifest.name!r}."
    if _axes_of_table(axes) not in {combination.axes for combination in PERMITTED}:
        exclusion = next((one for one in EXCLUSIONS if one.axes <= axes), None)
        obstacle = "This combination of axes is not tested." if exclusion is None else exclusion.reason
        remedy = "Use a combination of `accel_plugins.mesh.PERMITTED`."
        raise Conflict(failure, obstacle, remedy if exclusion is None else exclusion.remedy)
    _check_backend(failure, axes, manifest)
    _check_engine(failure, parallelism_config, manifest)


def check_precision(name: str, excludes: frozenset[str], parallelism_config: ParallelismConfig) -> None:
    """Raise if a precision does not work with an axis of the run.

    Args:
        name: name of the precision.
        excludes: axes that it does not work with.
        parallelism_config: the axes of the run.

    Raises:
        Conflict: the precision does not work with an axis.
    """
    foreign = excludes & active_axes(parallelism_config)
    if foreign:
        raise Conflict(
            f"Cannot use mixed_precision={name!r} with {named(active_axes(parallelism_config))}.",
            f"The layers of that precision do not work with {named(foreign)}.",
            "Use mixed_precision='bf16', or set the size of that axis to 1.",
        )


def _check_backend(failure: str, axes: frozenset[str], manifest: Manifest) -> None:
    foreign = axes - manifest.axes
    if foreign:
        sharding = Axis.SHARD in foreign
        raise Conflict(
            failure,
            f"That backend supports {named(manifest.axes)}, not {named(foreign)}.",
            "Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)."
            if sharding
            else "Choose another backend, or set the size of that axis to 1.",
        )
    if axes and not _suits_sharding(axes, manifest):
        raise Conflict(
            failure,
            "That backend shards parameters, and no axis specifies over how many processes.",
            "Set dp_shard_size above 1, or use the backend 'ddp'.",
        )


def _suits_sharding(axes: frozenset[str], manifest: Manifest) -> bool:
    return Axis.SHARD not in manifest.axes or bool(axes & (SHARDING_AXES | {Axis.TENSOR}))


def _check_engine(failure: str, parallelism_config: ParallelismConfig, manifest: Manifest) -> None:
    if parallelism_config.sp_by_engine and not manifest.capabilities.own_sequence_parallelism:
        raise Conflict(
            failure,
            f"sp_backend={parallelism_config.sp_backend!r} requires an engine that shards the sequence; this backend "
            "has none.",
            "Set sp_backend='torch' (PARALLELISM_CONFIG_SP_BACKEND=torch), or pass deepspeed_plugin.",
        )


def named(axes: frozenset[str]) -> str:
    """Axes as users write them: "dp_shard x tp"."""
    own = sorted(axes - frozenset(Axis))
    return " x ".join([*own, *(axis.value for axis in Axis if axis in axes)]) or "no axis"


def takes(manifest: Manifest, axes: frozenset[str]) -> bool:
    """Whether a backend supports a combination of axes."""
    permitted = any(combination.axes == _axes_of_table(axes) for combination in PERMITTED)
    return permitted and axes <= manifest.axes and (not axes or _suits_sharding(axes, manifest))


def as_markdown(manifests: tuple[Manifest, ...]) -> str:
    """The table as Markdown, with a column for the backends that support each combination."""
    lines = ["| axes | what is replicated or sharded | backends |", "|---|---|---|"]
    for combination in PERMITTED:
        backends = ", ".join(manifest.name for manifest in manifests if takes(manifest, combination.axes))
        lines.append(f"| {named(combination.axes)} | {combination.meaning} | {backends} |")
    lines += ["", "| axes that exclude each other | why | what to do |", "|---|---|---|"]
    lines += [f"| {named(one.axes)} | {one.reason} | {one.remedy} |" for one in EXCLUSIONS]
    return "\n".join(lines) + "\n"
