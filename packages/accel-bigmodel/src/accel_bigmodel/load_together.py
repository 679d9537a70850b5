"""Loading a checkpoint as one of several processes: read by the first alone, or into weights sharded over all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.load_names import LoadReport, compare_names, own_tensors
from accel_bigmodel.place import set_module_tensor_to_device
from accel_bigmodel.sizes import Dtype, torch_dtype
from accel_bigmodel.tied import find_tied_parameters, retie_parameters
from accel_bigmodel.weight_files.reading import WeightSource
from accel_ops.collectives import broadcast
from accel_ops.objects import broadcast_object_list, gather_object
from accel_state import current
from accel_state.errors import AccelError, CheckpointError
from accel_state.protocol import HeaderCall, barrier
from accel_state.transport.base import Transport

__all__ = ("holds_sharded_weights", "load_together")


def holds_sharded_weights(model: nn.Module) -> bool:
    """Whether weights of the model are spread over processes by torch, as FSDP and tensor parallelism do."""
    # Whoever sharded them has imported this; importing it only to ask takes a third of a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters())


def load_together(
    model: nn.Module,
    find: Callable[[], Iterable[WeightSource]],
    dtype: Dtype | None,
    strict: bool,
    full_state_dict: bool,
) -> LoadReport:
    """Load on every process what the first one reads.

    Args:
        find: finds the files; called by the first process only.
        dtype: dtype that floating-point weights are given; that of the model when None.
        strict: missing and unexpected names are an error.
        full_state_dict: the files hold whole weights, not this process's part of them.

    Raises:
        CheckpointError: on every process, what the first one, or any that reads, met with the files. Any other failure
            of one process, such as a lack of memory, is raised there, and is a CheckpointError or ShapeMismatch on
            the others.
    """
    if holds_sharded_weights(model):
        return _into_shards(model, find, dtype, strict, full_state_dict)
    process = current.process_or_start()
    tied = find_tied_parameters(model)
    weights, outcome, failure = _read(model, find, strict) if process.rank == 0 else ({}, None, None)
    shared: list[Any] = [outcome]
    broadcast_object_list(shared)
    if isinstance(shared[0], AccelError):
        raise failure or shared[0]
    told: tuple[LoadReport, list[str]] = shared[0]
    report, present = told
    tensors = own_tensors(model)
    for name in present:
        own = tensors[name]
        with _failing_together(process.transport):
            target = torch.device("cpu") if own.is_meta else own.device
            wanted = torch_dtype(dtype) if dtype is not None and own.is_floating_point() else own.dtype
            weight = weights[name].to(wanted) if name in weights else torch.empty(own.shape, dtype=wanted)
            weight = weight.to(process.device).contiguous()
        weight = broadcast(weight)
        with _failing_together(process.transport):
            _assign(model, name, own, weight.to(target))
    with _failing_together(process.transport):
        retie_parameters(model, tied)
    # Who fails after the last weight has to find the others here.
    barrier(process.transport, "load_checkpoint_in_model")
    return report


@contextmanager
def _failing_together(transport: Transport) -> Iterator[None]:
    """Tell the processes that wait in the next checked call when the block fails here, so that they raise as well."""
    try:
        yield
    except BaseException as error:
        if transport.world_size > 1:
            with suppress(AccelError), HeaderCall(transport, "load_checkpoint_in_model"):
                raise _as_told(error) from error
        raise


def _as_told(error: BaseException) -> AccelError:
    """What the processes raise on which a failure did not happen."""
    if isinstance(error, AccelError):
        return error
    return CheckpointError(
        "Load a checkpoint on several processes.",
        f"One of them failed: {type(error).__name__}: {error}",
        "See the traceback of that process.",
    )


def _read(
    model: nn.Module, find: Callable[[], Iterable[WeightSource]], strict: bool
) -> tuple[dict[str, Tensor], Any, BaseException | None]:
    """The weights; what the other processes receive: report and names, or an error; and the failure itself."""
    try:
        weights: dict[str, Tensor] = {}
        shapes: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for source in find():
            held = {name: weight for name, weight in source.load().items() if isinstance(weight, Tensor)}
            weights.update(held)
            shapes.update({name: (source.path, tuple(weight.shape)) for name, weight in held.items()})
        tensors = own_tensors(model)
        report = compare_names(model, tensors, shapes, find_tied_parameters(model), strict)
        return weights, (report, [name for name in tensors if name in weights]), None
    except BaseException as error:
        # Raised again by the caller, once the others have been told.
        return {}, _as_told(error), error


def _assign(model: nn.Module, name: str, own: Tensor, weight: Tensor) -> None:
    if not own.is_meta and own.dtype == weight.dtype:
        with torch.no_grad():
            own.copy_(weight)
    else:
        set_module_tensor_to_device(model, name, weight.device, value=weight, dtype=weight.dtype, clear_cache=False)


def _into_shards(
    model: nn.Module, find: Callable[[], Iterable[WeightSource]], dtype: Dtype | None, strict: bool, full: bool
) -> LoadReport:
    """Let torch hand each process its part; with whole weights only the first process reads them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    reads = not full or current.process_or_start().rank == 0
    weights, outcome, failure = _read(model, find, strict) if reads else ({}, None, None)
    outcomes = gather_object([outcome])
    _raise_first(outcomes, failure)
    given: dict[str, Any] = {}
    try:
        if dtype is not None:
            wanted = torch_dtype(dtype)
            model.to(wanted)
            weights = {name: w.to(wanted) if w.is_floating_point() else w for name, w in weights.items()}
        own = own_tensors(model)
        given = {name: weight for name, weight in weights.items() if name in own}
    except BaseException as error:
        failure = error
    _raise_first(gather_object([failure and _as_told(failure)]), failure)
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full, strict=False)
    set_model_state_dict(model, given, options=options)
    report: LoadReport = outcomes[0][0]
    return report


def _raise_first(outcomes: Iterable[Any], own: BaseException | None) -> None:
    """Raise what failed on any process; on the one that failed itself, its own failure."""
    told = next((met for met in outcomes if isinstance(met, AccelError)), None)
    if told is not None:
        raise own or told
