"""Loading a checkpoint as one of several processes: read by the first alone, or into weights sharded over all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
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
from accel_state.errors import AccelError

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
        CheckpointError: on every process, what the first one, or any that reads, met with the files.
    """
    if holds_sharded_weights(model):
        return _into_shards(model, find, dtype, strict, full_state_dict)
    process = current.process_or_start()
    tied = find_tied_parameters(model)
    weights, outcome = _read(model, find, strict) if process.rank == 0 else ({}, None)
    shared: list[Any] = [outcome]
    broadcast_object_list(shared)
    if isinstance(shared[0], AccelError):
        raise shared[0]
    told: tuple[LoadReport, list[str]] = shared[0]
    report, present = told
    tensors = own_tensors(model)
    for name in present:
        own = tensors[name]
        target = torch.device("cpu") if own.is_meta else own.device
        wanted = torch_dtype(dtype) if dtype is not None and own.is_floating_point() else own.dtype
        weight = weights[name].to(wanted) if name in weights else torch.empty(own.shape, dtype=wanted)
        weight = broadcast(weight.to(process.device).contiguous())
        _assign(model, name, own, weight.to(target))
    retie_parameters(model, tied)
    return report


def _read(model: nn.Module, find: Callable[[], Iterable[WeightSource]], strict: bool) -> tuple[dict[str, Tensor], Any]:
    """The weights, and what the other processes are told: report and names, or the error."""
    try:
        weights: dict[str, Tensor] = {}
        shapes: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for source in find():
            held = {name: weight for name, weight in source.load().items() if isinstance(weight, Tensor)}
            weights.update(held)
            shapes.update({name: (source.path, tuple(weight.shape)) for name, weight in held.items()})
        tensors = own_tensors(model)
        report = compare_names(model, tensors, shapes, find_tied_parameters(model), strict)
        return weights, (report, [name for name in tensors if name in weights])
    except AccelError as error:
        return {}, error


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
    weights, outcome = _read(model, find, strict) if reads else ({}, None)
    outcomes = gather_object([outcome])
    error = next((met for met in outcomes if isinstance(met, AccelError)), None)
    if error is not None:
        raise error
    if dtype is not None:
        wanted = torch_dtype(dtype)
        model.to(wanted)
        weights = {name: w.to(wanted) if w.is_floating_point() else w for name, w in weights.items()}
    own = own_tensors(model)
    given: dict[str, Any] = {name: weight for name, weight in weights.items() if name in own}
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full, strict=False)
    set_model_state_dict(model, given, options=options)
    report: LoadReport = outcomes[0][0]
    return report
