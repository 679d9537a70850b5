"""Inference with a model split into stages, one for each process, by torch.distributed.pipelining."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_bigmodel.placement import MaxMemory, infer_auto_device_map, pieces_of
from accel_ops.collectives import broadcast
from accel_ops.objects import broadcast_object_list
from accel_ops.shape import concatenate, slice_tensors
from accel_ops.tree import find_batch_size, get_data_structure, initialize_tensors, leaves_with_paths, recursively_apply
from accel_state import current
from accel_state.errors import AccelError, Missing, NotOffered, SettingError

__all__ = (
    "PipelineStage",
    "build_pipeline",
    "find_pippy_batch_size",
    "generate_device_map",
    "pippy_forward",
    "prepare_pippy",
)

M = TypeVar("M", bound=nn.Module)

_SPLIT_POINTS = "hf_split_points"
_STAGE = "pippy_stage"


def prepare_pippy(
    model: M,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> M:
    """Split a model into one stage for each process, so that its forward runs through all stages, for inference.

    Every process builds the whole model, calls this function, and then calls the model; only the inputs of the first
    process are used. A batch may have any size: it is padded to whole chunks, and the padding is removed from the
    output. With one process, the model is not changed.

    Args:
        model: one that `torch.export` can trace, in evaluation mode.
        split_points: names of the modules with which the second and later stages begin; "auto" creates stages of about
            the same size.
        no_split_module_classes: names of classes whose modules stay in one stage.
        example_args: positional inputs for tracing, with the sizes of later inputs; values other than tensors become
            constants.
        example_kwargs: keyword inputs for tracing.
        num_chunks: number of micro-batches in flight; if None, the number of processes.
        gather_output: send the output to every process; otherwise the last process returns it, the others None.

    Returns:
        The model, with its split points in the attribute `hf_split_points`.

    Raises:
        SettingError: inputs have no batch dimension, or the number of split points is not one less than the processes.

    Example:
        model = prepare_pippy(model.eval(), example_args=(ids,), gather_output=True)
        logits = model(ids)
    """
    process = current.process_or_start()
    world = process.world_size
    points = _auto_points(model, world, no_split_module_classes) if split_points == "auto" else split_points
    chosen = [points] if isinstance(points, str) else list(points or ())
    _check_points(model, chosen, world)
    chunks = world if num_chunks is None else num_chunks
    if chunks < 1:
        raise SettingError(
            f"Cannot prepare a pipeline with num_chunks={chunks}.",
            "The number of micro-batches must be at least 1.",
            "Set num_chunks to 1 or more.",
        )
    setattr(model, _SPLIT_POINTS, chosen)
    if world == 1:
        return model
    stage = build_pipeline(model, chosen, tuple(example_args or ()), dict(example_kwargs or {}), chunks)
    setattr(model, _STAGE, stage)
    old_forward = model.forward
    run = functools.partial(pippy_forward, stage.step, chunks, gather_output)
    model.forward = functools.update_wrapper(run, old_forward)
    return model


def _auto_points(model: nn.Module, count: int, whole: Sequence[str] | None) -> list[str]:
    """The first module of each stage, except stage 0."""
    modules = {name for name, _ in model.named_modules()}
    first: dict[Any, str] = {}
    for name, stage in generate_device_map(model, count, whole).items():
        if name in modules:
            first.setdefault(stage, name)
    return [first[stage] for stage in range(1, count) if stage in first]


def _check_points(model: nn.Module, points: Sequence[str], world: int) -> None:
    failure = f"Cannot split {type(model).__name__} into stages at {list(points)} for {world} processes."
    unknown = [point for point in points if point not in dict(model.named_modules())]
    if unknown:
        raise SettingError(failure, f"It has no module {unknown[0]!r}.", "Use names of modules of the model.")
    if len(points) != world - 1:
        raise SettingError(
            failure,
            f"{world} stages need {world - 1} split points, the first module of each stage except stage 0.",
            f"Set {world - 1} split points, or start another number of processes.",
        )


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: MaxMemory | None = None,
) -> dict[str, Any]:
    """Name of a module or tensor to its stage: stages of about the same size, in the order of the model.

    Args:
        num_processes: number of stages.
        no_split_module_classes: names of classes whose modules stay in one stage.
        max_memory: bytes by stage, under which stages fill up one after the other instead.
    """
    if num_processes == 1 or max_memory is not None:
        return infer_auto_device_map(model, max_memory, no_split_module_classes, clean_result=False)
    pieces = pieces_of(model, no_split_module_classes)
    total, before, stage = sum(piece.size for piece in pieces) or 1, 0, 0
    device_map: dict[str, Any] = {}
    for number, piece in enumerate(pieces):
        # A piece belongs to the stage that contains its middle. Enough pieces remain for later stages, so none is
        # empty.
        wanted = int((before + piece.size / 2) / total * num_processes)
        stage = min(max(wanted, stage, num_processes - len(pieces) + number), stage + 1) if number else 0
        device_map.update(dict.fromkeys(piece.names, stage))
        before += piece.size
    return device_map


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Size of the first dimension of the first tensor among the inputs; None without a tensor."""
    for value in [*(args or ()), *(kwargs or {}).values()]:
        try:
            return find_batch_size(value)
        except AccelError:
            continue
    return None


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_chunks: int,
) -> PipelineStage:
    """The stage of this process, on its device; its method `step` runs a batch together with the other processes.

    Args:
        split_points: names of the modules with which the second and later stages begin.
        args: example of the positional inputs of a whole batch.
        kwargs: the same by keyword.
        num_chunks: number of micro-batches in flight.

    Raises:
        SettingError: the inputs have no batch dimension in common.
    """
    rows = find_pippy_batch_size(args, kwargs)
    if rows is None:
        raise SettingError(
            f"Cannot trace {type(model).__name__} for a pipeline.",
            "The example has no tensor with a batch dimension.",
            "Pass inputs as example_args= or example_kwargs=.",
        )
    return PipelineStage(model, split_points, args, kwargs, -(-rows // num_chunks), num_chunks)


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Run one batch through the stages of all processes.

    Args:
        forward: the step of the stage of this process.
        num_chunks: number of micro-batches in flight; the stage knows them too.
        gather_output: send the output to every process, not only to the last one.
        args: positional inputs; only those of the first process are used.
        kwargs: the same by keyword.

    Returns:
        The model's output; None on all processes except the last one without `gather_output`.
    """
    process = current.process_or_start()
    rows = find_pippy_batch_size(args, kwargs)
    shared: list[Any] = [rows]
    broadcast_object_list(shared)
    if shared[0] is None:
        raise SettingError(
            "Cannot run a batch through a pipeline.",
            "The inputs have no tensor with a batch dimension.",
            "Pass at least one tensor.",
        )
    with torch.no_grad():
        output = forward(*args, **kwargs) if process.rank == 0 else forward()
    last = process.world_size - 1
    if process.rank == last:
        output = slice_tensors(output, slice(shared[0]))
    if not gather_output:
        return output
    structure: list[Any] = [get_data_structure(output) if process.rank == last else None]
    broadcast_object_list(structure, src=last)
    mine = output if process.rank == last else initialize_tensors(structure[0])
    tensors = [leaf for _, leaf in leaves_with_paths(mine) if isinstance(leaf, torch.Tensor)]
    shared_tensors = iter(broadcast(tensors, src=last))
    return recursively_apply(lambda _: next(shared_tensors), mine)


def _not_installed(error: BaseException) -> str | None:
    """The missing package that caused an error of torch."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__ or cause.__context__
    return None if cause is None else cause.name


def _greet_in_one_dtype(stage: Any) -> None:
    """Make a stage of torch 2.9 send its neighbours the float that they expect, instead of an integer."""
    original = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if original is None:
        return

    def operations() -> list[Any]:
        created: list[Any] = original()
        for operation in created:
            operation.tensor = operation.tensor.float()
        return created

    stage._get_init_p2p_neighbors_ops = operations


@dataclass
class _Form:
    """The structure of inputs or of an output: the nesting and the leaves, with `Tensor` for each tensor."""

    structure: Any = None
    fixed: tuple[Any, ...] = ()

    def take(self, data: Any) -> list[Tensor]:
        """Record the structure of nested data, and return its tensors as a flat sequence."""
        leaves, self.structure = pytree.tree_flatten(data)
        self.fixed = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def give(self, tensors: Iterable[Tensor]) -> Any:
        """Build nested data with this structure from these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if value is Tensor else value for value in self.fixed]
        return pytree.tree_unflatten(leaves, self.structure)


class _Flat(nn.Module):
    """A model with its input tensors as positional arguments, which returns the tensors of its output as a tuple.

    Every tensor is copied first: the tracer passes computed tensors to later stages, but not the model's inputs.
    """

    def __init__(self, model: nn.Module, inputs: _Form, output: _Form) -> None:
        super().__init__()
        self.model = model
        # Stored in separate objects, because the tracer reverts assignments to a module.
        self.inputs, self.output = inputs, output

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.inputs.give(tensor.clone() for tensor in tensors)
        return tuple(self.output.take(self.model(*args, **kwargs)))


class PipelineStage:
    """The stage of the model that this process runs.

    Args:
        model: the whole model.
        split_points: names of the modules with which the second and later stages begin.
        args: example of the positional inputs.
        kwargs: the same by keyword.
        rows: rows of one chunk.
        chunks: chunks of one round.

    Raises:
        SettingError: a tensor of the example has no rows, or fewer rows than a chunk.
        NotOffered: the model cannot be traced.
        Missing: a package that tracing requires is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        split_points: Sequence[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: int,
        chunks: int,
    ) -> None:
        pipelining: Any = importlib.import_module("torch.distributed.pipelining")
        process = current.process_or_start()
        self.name, self.rows, self.chunks = type(model).__name__, rows, chunks
        self.process = process
        self.inputs, self.output = _Form(), _Form()
        self.inputs.take((args, dict(kwargs)))
        flat = _Flat(model, self.inputs, self.output)
        begin = pipelining.SplitPoint.BEGINNING
        example = tuple(leaf[:rows] for leaf in self._tensors(args, kwargs))
        try:
            with torch.no_grad():
                pipe = pipelining.pipeline(flat, example, split_spec={f"model.{p}": begin for p in split_points})
        except Exception as error:  # whatever the tracer meets in the model's code
            failure = f"Cannot split {self.name} into stages."
            if (package := _not_installed(error)) is not None:
                raise Missing(
                    failure, f"Tracing it needs {package!r}, which is not installed.", f"Run: pip install {package}"
                ) from error
            raise NotOffered(
                failure,
                f"torch.export cannot trace it: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                "Pass example inputs like those of the run, and remove branches on values from the model's forward.",
            ) from error
        stage = pipe.build_stage(process.rank, process.device)
        _greet_in_one_dtype(stage)
        self.schedule = pipelining.ScheduleGPipe(stage, chunks)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch together with the other processes; the first gives the inputs, the last returns the output.

        The batch is padded to whole rounds of `chunks` chunks, and so is the output.

        Raises:
            SettingError: on every process, if the inputs do not match those of tracing.
        """
        outputs = [self.schedule.step(*tensors) for tensors in self._rounds(args, kwargs)]
        if self.process.rank != self.process.world_size - 1:
            return None
        return self.output.give(concatenate([out if isinstance(out, (tuple, list)) else (out,) for out in outputs]))

    def _rounds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, ...]]:
        """The inputs of each round; without tensors on processes other than the first."""
        mine: list[tuple[Tensor, ...]] | AccelError = []
        if self.process.rank == 0:
            try:
                mine = self._cut(self._tensors(args, kwargs))
            except AccelError as error:
                mine = error
        outcome: list[Any] = [mine if isinstance(mine, AccelError) else len(mine)]
        broadcast_object_list(outcome)
        if isinstance(outcome[0], AccelError):
            raise outcome[0]
        return mine if isinstance(mine, list) and mine else [()] * outcome[0]

    def _tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of the inputs, which must have the structure of the example and the same number of rows."""
        failure = f"Cannot run {self.name} in stages."
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        if structure != self.inputs.structure:
            raise SettingError(
                failure,
                f"It was traced for inputs like {self.inputs.structure}, not {structure}.",
                "Pass inputs with the same structure.",
            )
        for leaf, fixed in zip(leaves, self.inputs.fixed, strict=True):
            if isinstance(leaf, Tensor) != (fixed is Tensor) or (fixed is not Tensor and leaf != fixed):
                raise SettingError(
                    failure,
                    f"It was traced with {fixed!r}, and the call has {leaf!r} there.",
                    "Prepare the model again with that value.",
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len({tensor.shape[:1] for tensor in tensors}) != 1 or tensors[0].dim() == 0:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise SettingError(
                failure,
                f"Its inputs of shape {shapes} have no first dimension in common.",
                "Pass inputs that all have the batch as first dimension.",
            )
        return tensors

    def _cut(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        size = self.rows * self.chunks
        # There is at least one round; an empty batch is padded to a whole one.
        count = max(1, -(-tensors[0].shape[0] // size))
        padded = [torch.cat([t, t.new_zeros(count * size - t.shape[0], *t.shape[1:])]) for t in tensors]
        parts = [torch.split(tensor.to(self.process.device), size) for tensor in padded]
        return list(zip(*parts, strict=True))
