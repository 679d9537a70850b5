"""Tensor parallelism: shard the weights of layers among the processes of one mesh axis, as DTensors."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import Module

from accel_plugins.manifest import Axis
from accel_plugins.mesh import submesh
from accel_plugins.parameters import find_tied_parameters
from accel_plugins.sharded_optimizers import check_shardable
from accel_plugins.transform import Stage, Transform
from accel_state.errors import Conflict, SettingError
from accel_state.settings.schema import closest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context

__all__ = ("STYLES", "TensorParallel")

STYLES: Final[Mapping[str, Callable[[], ParallelStyle]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}
"""The sharding styles of layers, by their names in plans."""


class TensorParallel(Transform):
    """Shards the weights of layers along the mesh axis "tp".

    Processes of that axis read the same samples. A model that already has DTensor weights is not changed.

    Args:
        plan: maps module names, with `*` for any part of a name, to one of `STYLES` or a `ParallelStyle` of torch.
            None: the model's own plan.
        mesh: the mesh to shard along; None: the axis "tp" of the run.
    """

    name: ClassVar[str] = "tensor parallelism"
    stage: ClassVar[Stage] = Stage.SPLIT_WEIGHTS

    def __init__(self, plan: Mapping[str, Any] | None = None, mesh: DeviceMesh | None = None) -> None:
        self._plan = plan
        self._given_mesh = mesh

    def check(self, bundle: Bundle, context: Context) -> None:
        mesh = self._mesh(context)
        for model in bundle.models:
            if not _is_divided(model):
                _check_sizes(model, self._styles(model), mesh.size())
        for optimizer in bundle.optimizers:
            check_shardable(optimizer)

    def apply(self, model: Module, context: Context) -> Module:
        if _is_divided(model):
            return model
        ties = _ties(model)
        sharded: Module = parallelize_module(model, self._mesh(context), self._styles(model))
        for places in ties:
            _tie(places)
        return sharded

    def _mesh(self, context: Context) -> DeviceMesh:
        if self._given_mesh is not None:
            return _axis_of(self._given_mesh)
        mesh = submesh(context.mesh, Axis.TENSOR)
        if mesh is None:
            raise Conflict(
                "Cannot apply tensor parallelism.",
                "This run has no ParallelismConfig with an axis 'tp'.",
                "Pass parallelism_config=ParallelismConfig(tp_size=...).",
            )
        return mesh

    def _styles(self, model: Module) -> dict[str, ParallelStyle]:
        """The style of each module of the plan.

        Raises:
            SettingError: there is no plan, or it names a module or style that does not exist.
        """
        # transformers sets both; the property has the plan of the whole model.
        plan = self._plan or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        if not plan:
            raise SettingError(
                f"Cannot prepare {type(model).__name__} with tensor parallelism.",
                "The model has no tensor-parallel plan, and none was passed.",
                "Pass torch_tp_plugin=TorchTensorParallelPlugin(parallelize_plan={'layers.*.up': 'colwise', ...}).",
            )
        names = [name for name, _ in model.named_modules()]
        for pattern in plan:
            _check_pattern(pattern, names, model)
        return {pattern: _style(pattern, style) for pattern, style in plan.items()}


def _axis_of(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    along = submesh(mesh, Axis.TENSOR)
    if along is None:
        raise SettingError(
            f"Cannot use a device mesh with the axes {mesh.mesh_dim_names} for tensor parallelism.",
            "The mesh has several axes, and none has the name 'tp'.",
            "Name its axes, or pass the submesh to shard along.",
        )
    return along


def _check_pattern(pattern: str, names: list[str], model: Module) -> None:
    if any(_matches(pattern, name) for name in names):
        return
    near = closest(pattern, names)
    raise SettingError(
        f"The plan of tensor parallelism shards {pattern!r}.",
        f"{type(model).__name__} has no module of that name.",
        f"Did you mean {near!r}?" if near else "Use names from model.named_modules().",
    )


def _check_sizes(model: Module, styles: Mapping[str, ParallelStyle], processes: int) -> None:
    """Raise for a layer whose processes would pass on parts of different sizes: the next layer takes equal ones."""
    for pattern, style in styles.items():
        if not (isinstance(style, ColwiseParallel) and style.use_local_output):
            continue
        if not any(isinstance(layout, Shard) for layout in style.output_layouts):
            continue
        for name, module in model.named_modules():
            size = getattr(module, "out_features", None)
            if size is not None and size % processes and _matches(pattern, name):
                raise SettingError(
                    f"The plan of tensor parallelism shards the {size} outputs of {name!r} over {processes} processes.",
                    f"{size} is not a multiple of {processes}, and the next layer takes parts of equal sizes.",
                    "Choose a tp_size that divides it, use the style 'colwise_rep', or take the layer out of the plan.",
                )


def _matches(pattern: str, name: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatch.fnmatch(name, pattern)


def _style(pattern: str, style: Any) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        near = closest(str(style), STYLES)
        raise SettingError(
            f"The plan of tensor parallelism shards {pattern!r} by {style!r}.",
            f"The names of styles are {', '.join(STYLES)}.",
            f"Did you mean {near!r}?"
            if near
            else "Use one of these, or a ParallelStyle of torch.distributed.tensor.parallel.",
        )
    return STYLES[style]()


def _is_divided(model: Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


Place = tuple[Module, str]


def _ties(model: Module) -> list[list[Place]]:
    """For each parameter with several names: its modules, with the parameter's name in each."""
    split = ((name.rpartition(".") for name in names) for names in find_tied_parameters(model))
    return [[(model.get_submodule(module), name) for module, _, name in names] for names in split]


def _tie(places: list[Place]) -> None:
    """Tie parameters again that sharding has separated."""
    now: list[Tensor] = [getattr(module, name) for module, name in places]
    if len({getattr(parameter, "placements", None) for parameter in now}) > 1:
        raise Conflict(
            f"Tensor parallelism sharded a parameter of the shape {tuple(now[0].shape)} in several ways.",
            f"{' and '.join(type(module).__name__ for module, _ in places)} share it.",
            "Let the tensor-parallel plan shard all of them along the same dim, or none.",
        )
    for module, name in places[1:]:
        setattr(module, name, now[0])
