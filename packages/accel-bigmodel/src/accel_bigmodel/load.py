"""Loads a checkpoint into a model: each weight is mapped from its file, or read once directly into its final memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from accel_bigmodel.align import take_new_weights
from accel_bigmodel.device_map import DeviceMap
from accel_bigmodel.dispatch import dispatch_layout
from accel_bigmodel.load_together import load_together
from accel_bigmodel.loading import Loading, LoadReport, refuse_empty
from accel_bigmodel.placement import MaxMemory, device_map_by_policy
from accel_bigmodel.sizes import Dtype, torch_dtype
from accel_bigmodel.tensors import holds_sharded_weights
from accel_bigmodel.weight_layout import layout_of
from accel_state.errors import SettingError

__all__ = ("load_checkpoint_and_dispatch", "load_checkpoint_in_model")

M = TypeVar("M", bound=nn.Module)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: Dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> LoadReport:
    """Load a checkpoint into a model, which may be on the meta device.

    The weights of a model that was offloaded replace the offloaded ones, and are offloaded as they were.

    Weights that go to the CPU in the dtype of their safetensors file are mapped from it. All others are read by several
    threads, directly into their final memory if the dtype is the same. Weights for the disk stay in their safetensors
    file; the index of `offload_folder` lists them. Every file is checked before the first weight is written.

    A model whose parameters are sharded over processes, as FSDP2 and tensor parallelism do, is loaded by all of them:
    each process reads its own ranges of the files. If only the first process has the files, it sends the weights.

    Args:
        checkpoint: a weight file, an index, a folder, or "org/name" on the Hub if huggingface_hub is installed.
        device_map: name to device; without one, each weight goes to the current device of the model's weight (to the
            CPU from meta).
        offload_folder: folder in which weights for "disk" are listed or written.
        dtype: dtype of floating-point weights; if None, that of the model.
        offload_state_dict: accepted without effect; mapping the files already saves this memory.
        offload_buffers: leave buffers for the disk there; otherwise they are loaded to the CPU.
        keep_in_fp32_modules: parts of names whose weights stay in float32 when `dtype` is float16.
        offload_8bit_bnb: accepted without effect; weights for the disk are stored as in the checkpoint.
        strict: raise an error for missing and unexpected names.
        full_state_dict: for models with sharded weights: the checkpoint contains whole weights.
        broadcast_from_rank0: only the first process reads the files, and sends the weights to the others.

    Raises:
        CheckpointError: files are missing or damaged, or names differ with `strict=True`. If a file cannot be read to
            its end, the model is partly written: using it raises an error until a load succeeds.
        ShapeMismatch: a weight and the model's weight have different shapes; nothing was loaded.
        SettingError: the device map does not fit the model, or names the disk without an offload folder; or a device
            has too little memory for its weights; the error states the missing bytes and the nearest map that fits.
            Nothing was read.
    """
    if broadcast_from_rank0 or holds_sharded_weights(model):
        if device_map is not None:
            raise SettingError(
                "Cannot use a device map with broadcast_from_rank0 or with sharded weights.",
                "A device map is only for a model in a single process.",
                "Remove one of them.",
            )
        wanted = None if dtype is None else torch_dtype(dtype)
        return load_together(model, checkpoint, wanted, strict, full_state_dict, broadcast_from_rank0)
    loading = _loading(model, device_map, offload_folder, offload_buffers, dtype, keep_in_fp32_modules)
    report = loading.run(checkpoint, strict)
    take_new_weights(model)
    return report


def _loading(
    model: nn.Module,
    device_map: DeviceMap | None,
    offload_folder: str | os.PathLike[str] | None,
    offload_buffers: bool,
    dtype: Dtype | None,
    keep_in_fp32_modules: Sequence[str] | None = None,
) -> Loading:
    """Load in a single process."""
    wanted, kept = None if dtype is None else torch_dtype(dtype), frozenset(keep_in_fp32_modules or ())

    def dtype_of(name: str) -> torch.dtype | None:
        return torch.float32 if wanted == torch.float16 and any(part in name for part in kept) else wanted

    return Loading(model, layout_of(model, device_map), offload_folder, offload_buffers, dtype_of)


def load_checkpoint_and_dispatch(
    model: M,
    checkpoint: str | os.PathLike[str],
    device_map: str | DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: Dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    max_prefetch_bytes: int | None = None,
) -> M:
    """Load a checkpoint and spread the model over devices, memory and disk.

    Args:
        device_map: name to device; or "auto" or "balanced" (evenly over the accelerators), "balanced_low_0" (the first
            one as empty as possible), "sequential" (one after the other).
        max_memory: bytes, or text such as "10GB", by device, for a device map that is created here.
        no_split_module_classes: names of classes whose modules stay on one device.

    The other arguments are those of `load_checkpoint_in_model` and `dispatch_model`.

    Raises:
        CheckpointError: also if weights are missing in the checkpoint, and the model's own are on the meta device, or
            if a buffer that no checkpoint holds is there.

    Example:
        with init_empty_weights():
            model = Model(config)
        model = load_checkpoint_and_dispatch(model, "checkpoint", device_map="auto", offload_folder="offload")
    """
    chosen = device_map_by_policy(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    if chosen is None or broadcast_from_rank0 or holds_sharded_weights(model):
        report = load_checkpoint_in_model(
            model,
            checkpoint,
            device_map=chosen,
            dtype=dtype,
            strict=strict,
            full_state_dict=full_state_dict,
            broadcast_from_rank0=broadcast_from_rank0,
        )
        refuse_empty(model, report, checkpoint)
        return model
    loading = _loading(model, chosen, offload_folder, offload_buffers, dtype)
    refuse_empty(model, loading.run(checkpoint, strict), checkpoint)
    return dispatch_layout(
        model,
        loading.layout,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        max_prefetch_bytes=max_prefetch_bytes,
    )
