"""Weights and optimizer states of sharded models: load them into models, and read and write files.

Weights come from the first process, from a mapping, from the meta device or from files: one file, a folder of shards,
or a file per process. Folders of shards are those of `torch.distributed.checkpoint`: they can be loaded on another
number of processes, and `merge_weights` merges them into one file without a process group. Files per process need the
same number of processes in the same order. Files of backends that do not shard are loaded too.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_bigmodel.load import load_checkpoint_in_model
from accel_bigmodel.loading import load_guard
from accel_bigmodel.tensors import holds_sharded_weights
from accel_bigmodel.weight_files import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, load_weights_file, save_weights_file
from accel_ops.dtensors import write_full_tensor
from accel_ops.objects import broadcast_object_list
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    optimizer_name,
    sharded_model_name,
    shards_name,
    weights_name,
)
from accel_plugins.checkpoint.shards import SavePlans, names_in, read_into, read_whole, write_shards
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.sharding import is_built_in_shards
from accel_plugins.manifest import ObjectKind
from accel_plugins.parameters import (
    by_name,
    canonical_name,
    names_parameters,
    preserved_ties,
    restart,
    unstepped,
    with_tied_names,
)
from accel_state import current
from accel_state.errors import CheckpointError, Conflict, SettingError

__all__ = (
    "check_weights",
    "distribute",
    "load_model",
    "load_optimizer",
    "merge_weights",
    "merged_state",
    "model_state",
    "optimizer_state",
    "place_values",
    "put_full_weights",
    "put_model",
    "put_optimizer",
    "read_rank_file",
    "reshard",
    "send_from_first",
    "to_device",
    "train_in_fp32",
    "weights_of_first",
    "write",
    "write_rank_file",
)

_logger: Final = logging.getLogger(__name__)

_PACKET_BYTES: Final = 1 << 20
"""Up to this size, tensors are sent in one broadcast: for small ones, a broadcast costs more than two copies."""

# ---------------------------------------------------------------------- into a model


def check_weights(model: Module, config: FullyShardedDataParallelPlugin, rank: int) -> None:
    """Raise for a model on the meta device that would get no weights."""
    if is_built_in_shards(model):
        return
    empty = next((name for name, tensor in _tensors(model) if tensor.is_meta), None)
    if empty is not None and config.param_init_fn is None and (rank == 0 or not config.cpu_ram_efficient_loading):
        raise Conflict(
            f"Cannot prepare {type(model).__name__}.",
            f"{empty!r} is on the meta device of process {rank} and has no weights.",
            "Load its weights at least on the first process, and set cpu_ram_efficient_loading=True.",
        )


def _tensors(model: Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def to_device(model: Module, device: torch.device, initialise: Callable[[Module], None] | None = None) -> None:
    """Move a model to the device; meta tensors get memory there, and ties are kept.

    Args:
        model: the model.
        device: the target device.
        initialise: allocates and initialises the meta tensors of one module.
    """
    if initialise is not None:
        for module in list(model.modules()):
            if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                initialise(module)
    tensors = [tensor for _, tensor in _tensors(model)]
    if not any(tensor.is_meta for tensor in tensors):
        # Where torch moves DTensors, it exchanges objects, which fails if something holds a weak reference to one.
        if any(tensor.device != device for tensor in tensors):
            model.to(device)
        return
    with preserved_ties(model):
        model.to_empty(device=device)


def place_values(model: Module, device: torch.device) -> Module:
    """Move tensors with values to the device, in place; parameters built in shards remain meta tensors."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model


def train_in_fp32(model: Module) -> None:
    """Convert trainable parameters to fp32, so that the optimizer steps in fp32; forward gathers 16-bit copies.

    Small updates would be lost in 16 bits, and FSDP shards parameters of one dtype only. Frozen parameters and buffers
    keep their dtype.
    """
    changed = 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
            changed += 1
    if changed:
        _logger.info(
            "%s: %d parameters train in fp32, and checkpoints contain them in fp32.", type(model).__name__, changed
        )


def weights_of_first(model: Module, rank: int) -> dict[str, Tensor]:
    """All weights and buffers by name, on the first process; empty on others."""
    if rank != 0:
        return {}
    kept = {**dict(model.named_buffers()), **model.state_dict()}
    return {name: value.detach().cpu().clone() for name, value in kept.items()}


def send_from_first(model: Module, device: torch.device, mesh: DeviceMesh | None = None) -> None:
    """Broadcast the weights and buffers of the first process in place, small ones together.

    Args:
        model: unsharded on every process, or sharded over a mesh axis by tensor parallelism. Processes with the same
            shard receive it from the first of them.
        device: the device of the process groups; other tensors are copied there for the broadcast.
        mesh: the mesh of the run, or None without axes.
    """
    tensors: dict[tuple[ProcessGroup | None, torch.dtype], list[Tensor]] = {}
    for _, tensor in _tensors(model):
        value = tensor.detach()
        if not isinstance(value, DTensor):
            tensors.setdefault((None, value.dtype), []).append(value)
        elif mesh is not None:
            for axis in mesh.mesh_dim_names or ():
                if axis not in (value.device_mesh.mesh_dim_names or ()):
                    tensors.setdefault((mesh[axis].get_group(), value.dtype), []).append(value.to_local())
    for (group, _), values in tensors.items():
        for packet in _packets(values):
            _send(packet, device, group)


def _packets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that are sent together; a larger one alone."""
    packet: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if packet and size + tensor.nbytes > _PACKET_BYTES:
            yield packet
            packet, size = [], 0
        packet.append(tensor)
        size += tensor.nbytes
    if packet:
        yield packet


def _send(packet: list[Tensor], device: torch.device, group: ProcessGroup | None) -> None:
    """Broadcast tensors of one dtype of the first process of a group."""
    if len(packet) == 1 and packet[0].device.type == device.type and packet[0].is_contiguous():
        torch.distributed.broadcast(packet[0], group=group, group_src=0)
        return
    sent = torch.cat([tensor.reshape(-1).to(device) for tensor in packet])
    torch.distributed.broadcast(sent, group=group, group_src=0)
    if torch.distributed.get_rank(group) != 0:
        for tensor, values in zip(packet, torch.split(sent, [tensor.numel() for tensor in packet]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def distribute(model: Module, source: Mapping[str, Tensor]) -> None:
    """Send every process its shards of the first process's weights, and the buffers, one full tensor at a time.

    Raises:
        CheckpointError: the first process does not have the weights of the model.
    """
    reshard(model)
    device = current.process().device
    buffers = {canonical_name(name): buffer for name, buffer in model.named_buffers()}
    targets = {**buffers, **get_model_state_dict(model)}
    values = {canonical_name(name): value for name, value in source.items()}
    (sent,) = broadcast_object_list([sorted(values)])
    # Not all buffers are part of a state dict.
    _check_names(model, dict.fromkeys(name for name in sent if name not in buffers), ignored=buffers)
    for name, target in targets.items():
        if name not in sent or not isinstance(target, Tensor):
            continue
        full = torch.empty(target.shape, dtype=target.dtype, device=device)
        if name in values:
            full.copy_(values[name])
        torch.distributed.broadcast(full, src=0)
        put_full(target, full)


def put_full(target: Tensor, value: Tensor) -> None:
    """Overwrite a tensor, or this process's shard of it, by the full tensor `value`."""
    if isinstance(target, DTensor):
        write_full_tensor(target, value)
    else:
        with torch.no_grad():
            target.copy_(value)


def reshard(model: Module) -> None:
    """Free the parameters that the last forward gathered; torch loads full weights only into sharded ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def put_full_weights(model: Module, weights: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load full weights, which every process has, into a sharded model; needs no communication with FSDP 2.

    Raises:
        CheckpointError: names or shapes do not agree.
    """
    reshard(model)
    if strict:
        _check_names(model, weights)
    try:
        if holds_sharded_weights(model):
            shards = get_model_state_dict(model)
            put_model(model, {**shards, **_cut(weights, shards)}, strict=strict)
        else:
            set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True, strict=strict))
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"Cannot load weights into {type(model).__name__}.",
            str(error),
            "Create the model with the configuration of the saved one.",
        ) from error


def _cut(weights: Mapping[str, Any], shards: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of known names; full ones are written to the shards, whose shapes must agree.

    torch's own functions let the first process scatter full tensors, and fail where a dimension does not divide.
    """
    wrong = [
        f"{name} has shape {tuple(value.shape)} and not {tuple(shards[name].shape)}"
        for name, value in weights.items()
        if isinstance(shards.get(name), Tensor) and value.shape != shards[name].shape
    ]
    if wrong:
        raise ValueError(f"{'; '.join(wrong[:3])}.")
    cut = {name: value for name, value in weights.items() if name in shards}
    for name, shard in shards.items():
        if isinstance(shard, DTensor) and name in cut:
            write_full_tensor(shard, cut[name])
            cut[name] = shard
    return cut


def _check_names(model: Module, weights: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Raise on every process if names do not agree; torch raises on the first only."""
    names = get_model_state_dict(model).keys() - set(ignored)
    missing, unexpected = sorted(names - weights.keys()), sorted(weights.keys() - names)
    if missing or unexpected:
        raise CheckpointError(
            f"Cannot load weights into {type(model).__name__}.",
            f"Missing keys: {', '.join(missing[:3]) or 'none'}; "
            f"unexpected ones: {', '.join(unexpected[:3]) or 'none'}.",
            "Create the model with the configuration of the saved one, or pass strict=False to load what agrees.",
        )


# ---------------------------------------------------------------------- as files

_FILE_STEMS = {ObjectKind.MODEL: FSDP_MODEL_NAME, ObjectKind.OPTIMIZER: OPTIMIZER_NAME}


def model_state(
    model: Module, *, full: bool, to_host: bool = True, ties: Iterable[Sequence[str]] = ()
) -> dict[str, Any]:
    """Weights by name: full ones in host memory of the first process, or the shards of this process.

    Args:
        model: a sharded model.
        full: whether to assemble full weights.
        to_host: False keeps full weights on their device, on every process.
        ties: groups of names of tied parameters; in the full weights they are one tensor too.
    """
    options = StateDictOptions(full_state_dict=full, cpu_offload=full and to_host)
    state = dict(get_model_state_dict(model, options=options))
    for names in ties if full else ():
        # torch gathers a tied parameter once for each of its names.
        state.update({name: state[names[0]] for name in names if name in state})
    return state


def optimizer_state(model: Module, optimizer: Optimizer, *, full: bool, to_host: bool = True) -> dict[str, Any]:
    """The state of an optimizer by parameter names; see `model_state`."""
    if not _any_has_state(optimizer):
        # torch would make the optimizer step once to create its state, which would change the training.
        return unstepped(optimizer, [model])
    options = StateDictOptions(full_state_dict=full, cpu_offload=full and to_host)
    with _stateless_as_it_is(optimizer):
        return dict(get_optimizer_state_dict(model, optimizer, options=options))


def _any_has_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer has stepped on any process.

    With FSDP 1 the shard of a process may contain only frozen parameters. Its optimizer then has no state, but the
    process must take part in gathering the state of others.
    """
    process = current.process()
    has_state = torch.tensor(bool(optimizer.state), dtype=torch.int32, device=process.device)
    process.transport.all_reduce(has_state).wait()
    return bool(has_state.item())


@contextmanager
def _stateless_as_it_is(optimizer: Optimizer) -> Iterator[None]:
    """Prevent torch from stepping an optimizer without state: it does not step if a parameter has a gradient."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    first = None if optimizer.state else next(parameters, None)
    if first is None or first.grad is not None:
        yield
        return
    first.grad = torch.zeros_like(first)
    try:
        yield
    finally:
        first.grad = None


def write(
    kind: ObjectKind,
    state: dict[str, Any],
    folder: Path,
    index: int,
    *,
    full: bool,
    first: bool,
    plans: SavePlans,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Write the result of `model_state` or `optimizer_state`; called on every process.

    Args:
        kind, state, folder, index: as in `Strategy.save`.
        full: the state is full, and the first process writes it.
        first: whether this is the first process.
        plans: the plans of the last save of this object.
        group: a separate process group for planning.
    """
    if full:
        if first:
            pickled.write(state, folder / _full_name(kind, index))
        return
    write_shards({kind.value: state}, folder / shards_name(_FILE_STEMS[kind], index), plans, group)


def load_model(model: Module, folder: Path, index: int, *, strict: bool = True) -> None:
    """Load the weights of a model, from shards or from one file, whichever exists.

    From a safetensors file each process reads the ranges of its shards.
    """
    sharded, whole = folder / shards_name(FSDP_MODEL_NAME, index), folder / sharded_model_name(index)
    if sharded.is_dir():
        with load_guard(model, sharded) as guard:
            state = model_state(model, full=False)
            if not strict:
                saved = frozenset(names_in(sharded))
                state = {name: value for name, value in state.items() if f"{ObjectKind.MODEL.value}.{name}" in saved}
            read_into({ObjectKind.MODEL.value: state}, sharded, guard=guard)
            put_model(model, state, strict=strict)
        return
    plain = next((path for safe in (True, False) if (path := folder / weights_name(safe, index)).is_file()), None)
    if plain is not None and holds_sharded_weights(model):
        load_checkpoint_in_model(model, plain, strict=strict)
        return
    # Memory-mapped, so that each process reads only the pages of its shards.
    weights = pickled.read(whole, mapped=True) if plain is None else with_tied_names(model, load_weights_file(plain))
    put_full_weights(model, weights, strict=strict)


def put_model(model: Module, shards: dict[str, Any], *, strict: bool = True) -> None:
    """Load this process's shards into a model."""
    set_model_state_dict(model, shards, options=StateDictOptions(strict=strict))


def load_optimizer(model: Module, optimizer: Optimizer, folder: Path, index: int) -> None:
    """Load the state of an optimizer, from shards or from one file, whichever exists."""
    sharded = folder / shards_name(OPTIMIZER_NAME, index)
    full = not sharded.is_dir()
    if full:
        state = pickled.read(folder / optimizer_name(index))
        state = state if names_parameters(state) else by_name(state, optimizer, [model])
    elif any(name.startswith(f"{ObjectKind.OPTIMIZER.value}.state.") for name in names_in(sharded)):
        state = dict(get_optimizer_state_dict(model, optimizer))
        _leave_out_unsaved(state, names_in(sharded))
        read_into({ObjectKind.OPTIMIZER.value: state}, sharded)
    else:
        state = {"state": {}, **read_whole(sharded)[ObjectKind.OPTIMIZER.value]}
    put_optimizer(model, optimizer, state, full=full)


def put_optimizer(model: Module, optimizer: Optimizer, state: dict[str, Any], *, full: bool = False) -> None:
    """Load an optimizer's state by parameter names: the full state, or this process's shards."""
    if not state["state"]:
        restart(optimizer, state)
        return
    if full and holds_sharded_weights(model):
        state, full = {**state, "state": _divided(model, state["state"])}, False
    # A parameter that had no gradient before the save has no state, and starts afresh.
    options = StateDictOptions(full_state_dict=full, strict=False)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    # Of the others torch may have made states, as after a step.
    named = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    unsaved = [parameter for name, parameter in named.items() if name not in state["state"]]
    for parameter in unsaved if len(unsaved) < len(named) else ():
        optimizer.state.pop(parameter, None)


def _leave_out_unsaved(state: dict[str, Any], saved: Sequence[str]) -> None:
    """Remove the states of parameters that have none in a checkpoint, because they had no gradient before the save."""
    prefix = f"{ObjectKind.OPTIMIZER.value}.state."
    with_state = {name.removeprefix(prefix).rpartition(".")[0] for name in saved if name.startswith(prefix)}
    for name in list(state["state"]):
        if name not in with_state:
            del state["state"][name]


def _divided(model: Module, states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Full optimizer states by parameter names as states of shards; see `_cut`."""
    parameters = {canonical_name(name): parameter for name, parameter in model.named_parameters()}

    def divided(value: Any, parameter: Tensor | None) -> Any:
        if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
            return value
        shard = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        write_full_tensor(shard, value)
        return shard

    return {
        name: {key: divided(value, parameters.get(canonical_name(name))) for key, value in state.items()}
        for name, state in states.items()
    }


def _full_name(kind: ObjectKind, index: int) -> str:
    return optimizer_name(index) if kind is ObjectKind.OPTIMIZER else sharded_model_name(index)


# ---------------------------------------------------------------------- one file per process


def write_rank_file(kind: ObjectKind, state: dict[str, Any], folder: Path, index: int) -> None:
    """Write the shards of this process: `pytorch_model_fsdp_0_rank1.bin`, `optimizer_0_rank1.bin`, ...

    Raises:
        CheckpointError: writing to disk failed.
    """
    pickled.write(state, folder / _rank_file_name(kind, index, current.process().rank))


def read_rank_file(kind: ObjectKind, folder: Path, index: int) -> dict[str, Any]:
    """The state that `write_rank_file` wrote on this process.

    Raises:
        CheckpointError: another number of processes wrote the files, or this process's file is damaged.
    """
    process = current.process()
    writers = len(list(folder.glob(_rank_file_name(kind, index, "[0-9]*"))))
    if writers not in (0, process.world_size):
        raise CheckpointError(
            f"Cannot read the {kind.value} {index} from {folder}, one file per process.",
            f"{writers} processes wrote it, and this run has {process.world_size}.",
            "Start the same number of processes, or save with use_dcp=True, which can be loaded on any number.",
        )
    state: dict[str, Any] = pickled.read(folder / _rank_file_name(kind, index, process.rank))
    return state


def _rank_file_name(kind: ObjectKind, index: int, rank: int | str) -> str:
    return f"{_FILE_STEMS[kind]}_{index}_rank{rank}.bin"


# ---------------------------------------------------------------------- merged into one file


def merge_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> Path:
    """Write the weights of a sharded checkpoint into one file, and return its path.

    Args:
        checkpoint_dir: a folder of shards such as `pytorch_model_fsdp_0`, or the checkpoint with one such folder.
        output_path: the folder in which to write.
        safe_serialization: write `model.safetensors`; False: `pytorch_model.bin`.
        remove_checkpoint_dir: remove the folder of shards after the file is written.

    Raises:
        SettingError: the folder has no shards, or shards of several models.
        CheckpointError: the shards are damaged, or the file cannot be written; the shards are not removed then.
    """
    shards = _shards_in(Path(checkpoint_dir))
    state = merged_state(shards)
    target = Path(output_path) / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write merged weights to {target}.", f"The system reported: {error}.", "Use another folder."
        ) from error
    save_weights_file(state, target)
    if remove_checkpoint_dir:
        shutil.rmtree(shards)
    return target


def merged_state(shards: Path) -> dict[str, Tensor]:
    """Full weights by name from a folder of shards.

    Raises:
        CheckpointError: a shard is missing or damaged.
    """
    state = read_whole(shards)
    # In the files, all weights are under one key.
    root = state.get(ObjectKind.MODEL.value)
    return root if len(state) == 1 and isinstance(root, dict) else state


def _shards_in(folder: Path) -> Path:
    failure = f"Cannot merge the shards in {folder}."
    if (folder / ".metadata").is_file():
        return folder
    inside = sorted(path.parent for path in folder.glob(f"{FSDP_MODEL_NAME}_*/.metadata"))
    if len(inside) == 1:
        return inside[0]
    if inside:
        names = ", ".join(path.name for path in inside)
        raise SettingError(
            failure, f"The folder has the shards of several models: {names}.", "Use the folder of one of them."
        )
    obstacle = "The folder has no shards (no file .metadata)." if folder.is_dir() else "The folder does not exist."
    remedy = f"Use a folder such as {FSDP_MODEL_NAME}_0, which state_dict_type='SHARDED_STATE_DICT' writes."
    raise SettingError(failure, obstacle, remedy)
