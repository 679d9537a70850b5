"""Inference with a model cut into stages, one for each process, by torch.distributed.pipelining."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from accel_bigmodel.budget import Budget
from accel_bigmodel.device_map import infer_auto_device_map
from accel_bigmodel.pipeline_stage import Stage
from accel_bigmodel.placement import pieces_of
from accel_ops.collectives import broadcast
from accel_ops.objects import broadcast_object_list
from accel_ops.shape import slice_tensors
from accel_ops.tree import find_batch_size, get_data_structure, initialize_tensors, leaves_with_paths, recursively_apply
from accel_state import current
from accel_state.errors import AccelError, SettingError

__all__ = ("build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy")

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
    """Cut a model into one stage for each process and have its forward run through them, for inference.

    Every process builds the whole model, calls this, and then calls the model with the same inputs, of which those of
    the first process count. A batch may have any size: it is padded to whole chunks, and the padding is taken off the
    output again. With one process the model runs as it is.

    Args:
        model: one that `torch.export` can trace, in evaluation mode.
        split_points: names of the modules with which the second and later stages begin; "auto" makes stages of about
            the same size.
        no_split_module_classes: names of classes whose modules stay in one stage.
        example_args: positional inputs for tracing, of the sizes that will come; what is no tensor is fixed by them.
        example_kwargs: the same by keyword.
        num_chunks: parts of a batch that are on their way at once; as many as there are processes when None.
        gather_output: give the output to every process; otherwise only the last has one, and the others get None.

    Returns:
        The model, with its split points in the attribute `hf_split_points`.

    Raises:
        SettingError: inputs without a batch dimension, or split points that are not one fewer than the processes.

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
        raise SettingError(f"Prepare a pipeline with num_chunks={chunks}.", "There is no part of a batch.", "Give 1.")
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
    """The first module of each stage but the first."""
    modules = {name for name, _ in model.named_modules()}
    first: dict[Any, str] = {}
    for name, stage in generate_device_map(model, count, whole).items():
        if name in modules:
            first.setdefault(stage, name)
    return [first[stage] for stage in range(1, count) if stage in first]


def _check_points(model: nn.Module, points: Sequence[str], world: int) -> None:
    asked = f"Cut {type(model).__name__} into stages at {list(points)} for {world} processes."
    unknown = [point for point in points if point not in dict(model.named_modules())]
    if unknown:
        raise SettingError(asked, f"It has no module {unknown[0]!r}.", "Name modules of the model.")
    if len(points) != world - 1:
        raise SettingError(
            asked,
            f"{world} stages need {world - 1} split points, one where each but the first begins.",
            "Name as many, or start another number of processes.",
        )


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Budget | None = None,
) -> dict[str, Any]:
    """Name of a module or tensor to the stage it lies in: stages of about the same size, in the order of the model.

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
        # A piece belongs where its middle lies; no stage is left out, and enough pieces remain for those that follow.
        wanted = int((before + piece.size / 2) / total * num_processes)
        stage = min(max(wanted, stage, num_processes - len(pieces) + number), stage + 1) if number else 0
        device_map.update(dict.fromkeys(piece.names, stage))
        before += piece.size
    return device_map


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Size of the first dimension of the first tensor among the inputs; None when there is none."""
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
) -> Stage:
    """The stage of this process, on its device; its method `step` runs a batch together with the other processes.

    Args:
        split_points: names of the modules with which the second and later stages begin.
        args: example of the positional inputs of a whole batch.
        kwargs: the same by keyword.
        num_chunks: parts of a batch that are on their way at once.

    Raises:
        SettingError: the inputs have no batch dimension in common.
    """
    rows = find_pippy_batch_size(args, kwargs)
    if rows is None:
        raise SettingError(
            f"Trace {type(model).__name__} for a pipeline.",
            "The example has no tensor with a batch dimension.",
            "Give inputs as example_args= or example_kwargs=.",
        )
    return Stage(model, split_points, args, kwargs, -(-rows // num_chunks), num_chunks)


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Run one batch through the stages of all processes.

    Args:
        forward: the step of the stage of this process.
        num_chunks: parts of a batch that are on their way at once; the stage knows them too.
        gather_output: give the output to every process, not to the last alone.
        args: positional inputs; those of the first process count.
        kwargs: the same by keyword.

    Returns:
        What the model returns; None on all processes but the last unless `gather_output`.
    """
    process = current.process_or_start()
    rows = find_pippy_batch_size(args, kwargs)
    shared: list[Any] = [rows]
    broadcast_object_list(shared)
    if shared[0] is None:
        raise SettingError(
            "Run a batch through a pipeline.", "The inputs have no tensor with a batch dimension.", "Give some."
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
