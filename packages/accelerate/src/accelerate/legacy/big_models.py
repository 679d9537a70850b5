"""Functions for models larger than memory that only scripts for the original call."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

from accel_bigmodel.align import AlignDevicesHook, align_module_device, has_offloaded_params
from accel_bigmodel.device_map import DISK, Device, DeviceMap, device_of_name, matching_entries, resolve_device
from accel_bigmodel.dispatch import Place, attach_to_blocks, own_state
from accel_bigmodel.hooks import add_hook_to_module
from accel_bigmodel.offload import load_offloaded_weight, weight_file
from accel_bigmodel.prefetch import BlockReader
from accel_bigmodel.sizes import Dtype, compute_module_sizes, convert_file_size_to_int, get_max_layer_size
from accel_bigmodel.tensors import TiedParameters, set_module_tensor_to_device
from accel_bigmodel.weight_files import load_weights_file
from accel_state.errors import SettingError
from accel_state.labels import HOOK

__all__ = (
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "compute_module_total_buffer_size",
    "extract_submodules_state_dict",
    "fallback_allocate",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_state_dict_from_offload",
    "load_offloaded_weights",
    "load_state_dict",
)

_log = logging.getLogger(__name__)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParameters | None = None,
    reader: BlockReader | None = None,
) -> None:
    """Attach align hooks to the blocks that `execution_device` and `offload` name.

    Args:
        execution_device: a device for all, or name of a module or tensor (relative to `module`) to its device; names
            that `module` lacks are ignored, with a warning.
        offload: for all, or by name; a block that is not named is not offloaded.
        module_name: full name of `module`.

    The other arguments are those of `attach_align_device_hook`. The outermost module moves outputs to the device of
    the inputs.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {"": execution_device}
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    matching = matching_entries(module, {**devices, **offloads})
    attach_to_blocks(
        module,
        {name: Place(devices[name], offloads.get(name, False)) for name in matching if name in devices},
        weights_map,
        offload_buffers,
        preload_module_classes or (),
        {"skip_keys": skip_keys, "tied_params_map": tied_params_map, "reader": reader or BlockReader()},
        module_name,
    )


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """Compute every module with weights on `execution_device`, except modules that already have a hook.

    Args:
        module: the model, or the part of it, that gets hooks.
        execution_device: device on which its modules compute.
        skip_keys: keyword arguments with values that are not moved.
        preload_module_classes: names of classes whose instances get one hook for all their submodules.
        tied_params_map: copies of tied weights by device.
    """
    children = list(module.children())
    preloads = bool(children) and type(module).__name__ in (preload_module_classes or ())
    if not hasattr(module, HOOK) and (preloads or module._parameters or module._buffers):
        hook = AlignDevicesHook(
            execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map, place_submodules=preloads
        )
        add_hook_to_module(module, hook)
    for child in () if preloads else children:
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the model, and bytes and names of its largest layers; its own `_no_split_modules` count as layers."""
    sizes = compute_module_sizes(model)
    modules = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes[""], get_max_layer_size(modules, sizes, getattr(model, "_no_split_modules", None) or [])


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Any] | None = None
) -> int:
    """Bytes of all buffers of a model.

    Args:
        model: the model, which may be on the meta device.
        dtype: the dtype in which it will be loaded; by default that of each buffer.
        special_dtypes: dtypes of single buffers by name, in place of `dtype`.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Names in the result of `compute_module_sizes` without names below them: the tensors."""
    parents = {name.rpartition(".")[0] for name in module_sizes if name}
    return [name for name in module_sizes if name not in parents]


def fallback_allocate(
    modules: list[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | None, list[tuple[str, nn.Module]]]:
    """The first module, or part of a module, that is small enough, and the list without it.

    Args:
        modules: names and modules, in the order of the search.
        module_sizes: bytes by name, as `compute_module_sizes` returns them.
        size_limit: bytes, or text such as "1GB".
        no_split_module_classes: names of classes of modules that are never split.
        tied_parameters: groups of names of shared parameters, counted with the module that is taken.
    """
    limit, ties = convert_file_size_to_int(size_limit), tied_parameters or ()
    for number, (name, module) in enumerate(modules):
        before, after = modules[:number], modules[number + 1 :]
        if _size_with_ties(name, [*before, *after], module_sizes, ties) <= limit:
            return name, module, [*before, *after]
        if isinstance(module, nn.Module) and type(module).__name__ not in (no_split_module_classes or ()):
            parts = [(f"{name}.{child}", inner) for child, inner in module.named_children()]
            found, part, left = fallback_allocate(parts, module_sizes, limit, no_split_module_classes, ties)
            if found is not None:
                return found, part, [*before, *left, *after]
    return None, None, modules


def _size_with_ties(
    name: str,
    others: Sequence[tuple[str, nn.Module]],
    sizes: Mapping[str, int],
    groups: Sequence[Sequence[str]],
) -> int:
    shared = [
        tied
        for group in groups
        if any(one.startswith(f"{name}.") for one in group)
        for tied in group
        if not tied.startswith(f"{name}.") and any(tied.startswith(f"{other}.") for other, _ in others)
    ]
    return get_module_size_with_ties(shared, sizes[name], sizes, others)[0]


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Bytes of a module together with the modules that share its weights, and the names and modules of these.

    Args:
        tied_params: names of parameters of other modules that the module shares.
        module_size: bytes of the module itself.
        module_sizes: bytes by name, as `compute_module_sizes` returns them.
        modules_to_treat: names and modules to search for the others.

    Raises:
        SettingError: none of them has one of the parameters.
    """
    names, modules = list[str](), list[nn.Module]()
    for tied in tied_params:
        found = next(((name, module) for name, module in modules_to_treat if tied.startswith(f"{name}.")), None)
        if found is None:
            raise SettingError(
                f"Cannot count the parameter {tied!r} with the module that shares it.",
                "None of the given modules has it.",
                "Pass the modules that have no device yet.",
            )
        module_size += module_sizes[found[0]] - module_sizes[tied]
        names.append(found[0])
        modules.append(found[1])
    return module_size, names, modules


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the model's `config` ties its embeddings, as in models of transformers."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    words = bool(getattr(decoder, "tie_word_embeddings", False)) and bool(
        getattr(model, "get_output_embeddings", lambda: None)() is not None
    )
    both = bool(getattr(config, "is_encoder_decoder", False)) and bool(getattr(config, "tie_encoder_decoder", False))
    return words or both or any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn about each group of tied names that a device map puts on different devices.

    Args:
        tied_params: groups of names, as `find_tied_parameters` returns them.
        device_map: devices by the names of modules and tensors.
    """
    for names in tied_params:
        devices = {name: device_of_name(name, device_map) for name in names}
        if len(set(map(str, devices.values()))) > 1:
            _log.warning(
                "Tied parameters are on different devices: %s. Put them on one, or let device_map='auto' do it.",
                devices,
            )


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None) -> dict[str, Any]:
    """The weights of one file by name.

    Args:
        checkpoint_file: a safetensors file, or one that `torch.save` wrote.
        device_map: devices by the names of modules and weights; weights for "disk", and all without a map, go to the
            CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or contains Python objects other than weights.
        SettingError: the map names a device that does not exist.
    """
    weights = load_weights_file(checkpoint_file)
    if device_map is None:
        return weights
    devices = {name: device_of_name(name, device_map) for name in weights}
    away = {
        name: resolve_device(device) for name, device in devices.items() if device is not None and str(device) != DISK
    }
    return {name: weight.to(away[name]) if name in away else weight for name, weight in weights.items()}


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]], offload_folder: str | os.PathLike[str]
) -> None:
    """Load weights that `offload_weight` wrote into a model, on the CPU.

    Args:
        model: the model; its other weights are not changed.
        index: the entries of the weights by name, as `offload_weight` wrote them.
        offload_folder: folder of their files.

    Raises:
        CheckpointError: a file is missing or shorter than its entry says.
    """
    for name, entry in index.items():
        weight = load_offloaded_weight(weight_file(offload_folder, name), entry)
        set_module_tensor_to_device(model, name, "cpu", value=weight)


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, Any],
    device_to_put_offload: Device = "cpu",
) -> MutableMapping[str, Any]:
    """Put the offloaded weights of one module into a state dict.

    Args:
        module_name: full name of one of its weights, such as "blocks.0.weight".
        state_dict: changed and returned.
        device_to_put_offload: device of the added weights.
    """
    if has_offloaded_params(module):
        prefix = module_name[: module_name.rfind(".") + 1]
        with align_module_device(module, device_to_put_offload):
            state_dict.update(own_state(module, prefix, None))
    return state_dict


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Sequence[str]
) -> dict[str, Tensor]:
    """The part of a state dict for some modules or tensors.

    Args:
        state_dict: weights by name.
        submodule_names: names of modules, with everything in them, and of weights; "" is the whole model.
    """
    wanted = set(submodule_names)
    return {
        name: weight for name, weight in state_dict.items() if "" in wanted or any(p in wanted for p in _above(name))
    }


def _above(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
