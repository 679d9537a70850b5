"""Private names of the original's classes that the classes here lack: replacing one warns, reading one explains.

A class of this project gets a descriptor for each such name. The descriptor explains why the name cannot be read, and
warns when it is assigned to an object. Assignments to the class and methods of subclasses replace or hide it, which is
noticed when the program next creates a state or an Accelerator, or calls `prepare`. So these classes need no metaclass
of their own, and programs can give their subclasses any.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from accel_state.creation import on_creation
from accel_state.errors import AccelError
from accelerate.unread import warn_of_replaced

__all__ = ("UNREAD", "Absent", "AbsentName", "add_descriptors", "watch")

_PREPARE: Final = "Accelerator.prepare does this, in accel_torch.prepare"
_STRATEGY: Final = "Accelerator.prepare does this in the strategy of the backend"
_LOADER: Final = "accel_data.loader does this"
_OWN_CALLS: Final = "Accelerator.prepare does not call it, so it serves your own calls only"

UNREAD: Final[Mapping[str, Mapping[str, str]]] = {
    "accel_torch.accelerator.Accelerator": {
        "_clip_grad_norm_dtensor_aware": "Accelerator.clip_grad_norm_ does this, in the strategy of the backend",
        "_do_sync": "Accelerator.accumulate does this, in accel_torch.accumulation",
        "_get_devices": _PREPARE,
        "_get_named_parameters": _PREPARE,
        "_prepare_ao": "Accelerator.prepare does this, in accel_plugins.precision.fp8",
        "_prepare_cp": "Accelerator.prepare does this, in accel_plugins.transforms.sequence_sharding",
        "_prepare_deepspeed": f"{_STRATEGY} deepspeed, accel_plugins.deepspeed.strategy",
        "_prepare_device_mesh": "ParallelismConfig.build_device_mesh does this",
        "_prepare_fsdp2": f"{_STRATEGY} fsdp2, accel_plugins.fsdp.fsdp2",
        "_prepare_megatron_lm": f"{_STRATEGY} megatron, accel_megatron.strategy",
        "_prepare_msamp": "Accelerator.prepare does this, in accel_plugins.precision.fp8",
        "_prepare_one": _PREPARE,
        "_prepare_te": "Accelerator.prepare does this, in accel_plugins.precision.fp8",
        "_prepare_tp": "Accelerator.prepare does this, in accel_plugins.transforms.tensor_parallel",
        "prepare_data_loader": _OWN_CALLS,
        "prepare_model": _OWN_CALLS,
        "prepare_optimizer": _OWN_CALLS,
        "prepare_scheduler": _OWN_CALLS,
    },
    "accel_state.process.PartialState": {
        "_cpu": "PartialState(cpu=True) selects the CPU",
        "_goes_first": "PartialState.main_process_first does this",
        "_known_attrs": "dir(PartialState) lists the attributes",
        "_prepare_backend": "accel_state.start does this",
    },
    "accel_state.run_state.AcceleratorState": {
        "_check_initialized": "AcceleratorState() checks its arguments",
        "_mixed_precision": "Accelerator(mixed_precision=...) selects the precision, and `mixed_precision` tells it",
    },
    "accel_state.gradient.GradientState": {
        "_dataloader_references_ref": "`dataloader_references` tells the loaders that are read",
        "_is_xla_gradients_synced": "`is_xla_gradients_synced` tells it",
    },
    "accel_state.mesh.ParallelismConfig": {
        "_set_size": "its fields, such as `tp_size`, set the sizes",
        "_sizes": "its fields, such as `tp_size`, tell the sizes",
        "_validate_accelerator": "the Accelerator checks the sizes when it is created",
    },
    "accel_plugins.wrapped.optimizer.AcceleratedOptimizer": {
        "_accelerate_step_called": "`step_was_skipped` tells whether the last step was skipped",
        "_optimizer_original_step_method": "the optimizer's own `step` is called, and never replaced",
        "_optimizer_patched_step_method": "the optimizer's own `step` is called, and never replaced",
        "_switch_parameters": "the strategy of the backend replaces parameters, in `prepare`",
    },
    "accel_data.adapter.DataLoaderAdapter": {
        "_fetch_batches": "accel_data.dispatch does this",
        "_update_state_dict": _LOADER,
    },
    "accel_data.sharding.BatchSamplerShard": {
        "_iter_with_no_split": "accel_data.sharding.ShardPlan does this",
        "_iter_with_split": "accel_data.sharding.ShardPlan does this",
    },
    "accel_torch.local_sgd.LocalSGD": {"_sync_and_avg_model_params": "LocalSGD.step does this"},
    "accel_torch.profile.ProfileKwargs": {"_get_profiler_activity": "ProfileKwargs.build does this"},
    "accel_plugins.deepspeed.config.DeepSpeedPlugin": {
        "_deepspeed_config_checks": "DeepSpeedPlugin() does this",
        "_set_selected": "DeepSpeedPlugin.select does this",
        "_unselect": "DeepSpeedPlugin.select does this",
    },
    "accel_bigmodel.align.AlignDevicesHook": {"_maybe_get_fp16_statistics": "accel_bigmodel.quantize does this"},
    "accel_bigmodel.casting.LayerwiseCastingHook": {"_is_stateful": "hooks are never asked for it"},
    "accel_tracking.trackers.clearml.ClearMLTracker": {"_get_title_series": "ClearMLTracker.log does this"},
}
"""Class of this project -> names that its namesake in the original has and nothing here reads -> what does it here."""


class AbsentName(AccelError, AttributeError):
    """Raised when a program reads a name of the original that a class here does not have."""


class Absent:
    """A name of the original that a class here does not have.

    Args:
        name: the name.
        instead: what does it here.
    """

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is not None and self._name in vars(instance):
            return vars(instance)[self._name]
        raise AbsentName(
            f"Cannot read {(owner or type(instance)).__name__}.{self._name}.",
            "It is a private name of the original library, and this one does not have it.",
            f"{self._instead[0].upper()}{self._instead[1:]}.",
        )

    def __set__(self, instance: object, value: Any) -> None:
        _warn_once(type(instance), self._name, self._instead)
        vars(instance)[self._name] = value

    def __delete__(self, instance: object) -> None:
        if self._name not in vars(instance):
            raise AttributeError(self._name)
        del vars(instance)[self._name]


_watched: Final[dict[type, Mapping[str, str]]] = {}
"""The classes of the table that have their descriptors -> names."""

_not_imported: Final = set(UNREAD)
"""The addresses of the classes that were not imported yet."""

_warned: Final[set[str]] = set()
"""The replaced names of which a warning has told, each with the address of its class; it names each once."""


def add_descriptors() -> None:
    """Give the classes that were imported since the last call their descriptors."""
    for address in list(_not_imported):
        module, _, name = address.rpartition(".")
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None:
            _not_imported.discard(address)
            _watched[owner] = UNREAD[address]
            for absent, instead in UNREAD[address].items():
                if not hasattr(owner, absent):
                    setattr(owner, absent, Absent(absent, instead))


def watch() -> None:
    """From now on, warn about names that were replaced in classes when a state or an Accelerator is created."""
    on_creation(_warn_of_replaced)


def _warn_of_replaced() -> None:
    add_descriptors()
    for owner, names in list(_watched.items()):
        classes = [owner]
        for kind in classes:
            classes += type.__subclasses__(kind)
            attributes = vars(kind)
            for name in names:
                # Each Accelerator comes here, and nearly every value is a descriptor, so this check is the first.
                if name not in attributes or type(attributes[name]) is Absent:
                    continue
                if not _is_inherited(attributes[name], name, owner):
                    _warn_once(kind, name, names[name])


def _is_inherited(value: Any, name: str, owner: type) -> bool:
    """Whether a value is what a class has from its bases, because the program has restored it."""
    return any(value is vars(base).get(name, Absent) for base in owner.__mro__[1:])


def _warn_once(owner: type, name: str, instead: str) -> None:
    address = f"{owner.__module__}.{owner.__qualname__}.{name}"
    if address not in _warned:
        _warned.add(address)
        reason = "" if instead is _OWN_CALLS else "it is a name of the original library that nothing here reads; "
        warn_of_replaced(f"{owner.__name__}.{name}", f"{reason}{instead}")
