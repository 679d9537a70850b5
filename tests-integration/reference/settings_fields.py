"""What the fields of public settings hold after construction, as text; runs with this library and with the original.

    python settings_fields.py > settings_fields.json      # with a Python that has the original

Each case is the text of an expression. A value is described as "module.Type: repr"; a case that raises is left out.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

FSDP = "P(fsdp_version={version}, {given})"
GIVEN = (
    "",
    "sharding_strategy='1'",
    "sharding_strategy='full_shard'",
    "sharding_strategy='HYBRID_SHARD_ZERO2'",
    "sharding_strategy=ShardingStrategy.NO_SHARD",
    "backward_prefetch='BACKWARD_PRE'",
    "backward_prefetch='2'",
    "backward_prefetch=1",
    "backward_prefetch='NO_PREFETCH'",
    "backward_prefetch=BackwardPrefetch.BACKWARD_POST",
    "state_dict_type='sharded_state_dict'",
    "state_dict_type='1'",
    "state_dict_type=StateDictType.FULL_STATE_DICT",
    "state_dict_type=StateDictType.LOCAL_STATE_DICT",
    "state_dict_config=FullStateDictConfig(offload_to_cpu=False)",
    "cpu_offload=True",
    "cpu_offload=False",
    "cpu_offload=CPUOffload(offload_params=True)",
    "cpu_offload=CPUOffloadPolicy(pin_memory=False)",
    "auto_wrap_policy='transformer_based_wrap'",
    "auto_wrap_policy='SIZE_BASED_WRAP', min_num_params=5",
    "auto_wrap_policy='NO_WRAP'",
    "auto_wrap_policy=len",
    "transformer_cls_names_to_wrap='A,B'",
    "mixed_precision_policy='bf16'",
    "mixed_precision_policy='fp8'",
    "mixed_precision_policy=MixedPrecision(param_dtype=torch.bfloat16)",
    "mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    "reshard_after_forward='false'",
    "activation_checkpointing=True",
    "cpu_ram_efficient_loading=False",
    "ignored_modules='a.*'",
)
CALLS = (
    "set_mixed_precision('bf16')",
    "set_mixed_precision('fp16', buffer_autocast=True)",
    "set_mixed_precision('fp32', override=True)",
    "set_mixed_precision('fp8')",
    "set_mixed_precision(torch.bfloat16, override=True)",
    "set_mixed_precision(torch.float16)",
    "set_mixed_precision(None)",
    "set_mixed_precision('half')",
    "set_auto_wrap_policy(model)",
    "set_state_dict_type(None)",
)
VARIABLES = (
    {"FSDP_SHARDING_STRATEGY": "2"},
    {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"},
    {"FSDP_BACKWARD_PREFETCH": "backward_pre"},
    {"FSDP_BACKWARD_PREFETCH": "NO_PREFETCH"},
    {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"},
    {"FSDP_OFFLOAD_PARAMS": "true"},
    {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"},
    {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "77"},
)


def names() -> dict[str, Any]:
    """The names that the expressions use."""
    import torch
    from torch.distributed import fsdp

    from accelerate import FullyShardedDataParallelPlugin

    class Model(torch.nn.Sequential):
        _no_split_modules = ("Linear",)

    model = Model(torch.nn.Linear(2, 2), torch.nn.ReLU())
    return {**vars(fsdp), "torch": torch, "P": FullyShardedDataParallelPlugin, "model": model}


def cases() -> dict[str, tuple[str, str, dict[str, str]]]:
    """By label: the expression that constructs, what is called then, and the variables that are set."""
    found: dict[str, tuple[str, str, dict[str, str]]] = {}
    for version in (1, 2):
        for given in GIVEN:
            constructed = FSDP.format(version=version, given=given)
            found[constructed] = (constructed, "", {})
        plain = FSDP.format(version=version, given="")
        by_class = FSDP.format(version=version, given="auto_wrap_policy='TRANSFORMER_BASED_WRAP'")
        for call in CALLS:
            made = by_class if "wrap" in call else plain
            found[f"{made}.{call}"] = (made, call, {})
        for variables in VARIABLES:
            found[f"{plain} {variables}"] = (plain, "", dict(variables))
    return found


def describe(value: Any) -> str:
    """Type and text of a value, without addresses; classes and functions by name."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}: {re.sub(' at 0x[0-9a-f]+', '', repr(value))}"


def fields(settings: Any) -> dict[str, str]:
    """Every field of an instance."""
    return {field.name: describe(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def of_fsdp() -> dict[str, dict[str, str]]:
    """Fields of the sharding settings in every case that does not raise; only those that differ from the default."""
    known = names()
    found: dict[str, dict[str, str]] = {}
    for label, (constructed, call, variables) in cases().items():
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            settings = eval(constructed, known)
            if call:
                eval(f"settings.{call}", {**known, "settings": settings})
            shown, plain = fields(settings), found.get(FSDP.format(version=settings.fsdp_version, given=""), {})
            found[label] = {name: text for name, text in shown.items() if plain.get(name) != text}
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        finally:
            os.environ.clear()
            os.environ.update(before)
    return found


def of_defaults() -> dict[str, dict[str, str]]:
    """Types of the fields of every public settings class that can be made without arguments."""
    api = json.loads((HERE / "api.json").read_text(encoding="utf-8"))
    homes: dict[str, str] = {}
    for module, public in sorted(api["modules"].items()):
        for name, known in public["names"].items():
            homes.setdefault(known["ref"], f"{module}:{name}")
    found = {}
    for ref, known in api["objects"].items():
        if not known.get("fields") or ref not in homes:
            continue
        module, _, name = homes[ref].partition(":")
        try:
            made = getattr(importlib.import_module(module), name)()
        except Exception:
            continue
        shown = {field["name"]: type(getattr(made, field["name"], None)).__name__ for field in known["fields"]}
        found[ref.rpartition(":")[2].rpartition(".")[2]] = shown
    return found


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    print(json.dumps({"defaults": of_defaults(), "fsdp": of_fsdp()}, indent=1, sort_keys=True))
