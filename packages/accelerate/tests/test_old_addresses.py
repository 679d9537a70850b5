"""The names at the old addresses: each is there, is the same object as ours, and costs nothing before it is used."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from itertools import combinations

import pytest

import accel_torch
import accelerate
from accelerate.names import LENDERS, NAMES, PACKAGES, owner_of, owners

# Worked out by its module each time it is read.
COMPUTED = {"USE_TORCH_XLA"}


@pytest.mark.parametrize("address", sorted(NAMES))
def test_a_name_is_the_object_that_its_owner_holds(address: str) -> None:
    module = importlib.import_module(address)
    assert sorted(module.__all__) == sorted(owners(address))
    for name, owner in owners(address).items():
        home = importlib.import_module(owner.module)
        assert getattr(module, name) is getattr(home, owner.name)
        # A name that a package only shows, in place of the module that has it, would be patched in vain.
        assert owner.name in vars(home) or owner.name in COMPUTED, owner
        assert name in dir(module)


def test_the_table_names_no_module_twice() -> None:
    for address, sources in NAMES.items():
        whole = [set(owners(source)) for source, names in sources.items() if names == "*"]
        assert not any(first & second for first, second in combinations(whole, 2)), address


def test_a_module_lends_its_names_to_the_others_but_not_to_packages() -> None:
    assert accelerate.accelerator.DistributedType is accelerate.utils.DistributedType
    assert accelerate.hooks.PartialState is accelerate.PartialState
    assert set(LENDERS) <= set(NAMES)
    for address in sorted(NAMES):
        lent = owner_of(address, "attach_align_device_hook")
        assert (lent is None) == (address in PACKAGES), address
    assert owner_of("accelerate.state", "launch_command") is None


def test_names_that_both_have_are_the_same_objects() -> None:
    shared = {(address, name) for address in NAMES for name in owners(address) if name in accel_torch.__all__}
    # That engine prepares loaders by a function of its own, which is called as the general one is.
    shared -= {("accelerate.utils.megatron_lm", "prepare_data_loader")}
    # The texts of the errors, or the names of the arguments, differ.
    others = {"broadcast", "broadcast_object_list", "recursively_apply", "reduce", "set_module_tensor_to_device"}
    shared = {(address, name) for address, name in shared if name not in others}
    assert len({name for _, name in shared}) > 50
    for address, name in shared:
        assert getattr(importlib.import_module(address), name) is getattr(accel_torch, name), (address, name)


def test_everything_can_be_imported_with_a_star() -> None:
    found: dict[str, object] = {}
    exec("from accelerate.utils import *", found)
    assert set(owners("accelerate.utils")) <= set(found)


def test_a_submodule_of_the_same_name_does_not_hide_a_function() -> None:
    submodule = importlib.import_module("accelerate.utils.tqdm")
    assert accelerate.utils.tqdm is submodule.tqdm


def test_a_module_can_be_reloaded() -> None:
    before = accelerate.utils.gather
    assert importlib.reload(accelerate.utils).gather is before


def run_fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_submodules_are_attributes_without_being_imported_first() -> None:
    code = "import accelerate; print(accelerate.utils.operations.gather.__module__, accelerate.state.__name__)"
    assert run_fresh(code).split() == ["accel_ops.collectives", "accelerate.state"]


def test_importing_old_modules_loads_no_torch() -> None:
    code = (
        f"import importlib, json, sys\nfor address in {sorted(NAMES)}: importlib.import_module(address)\n"
        "print(json.dumps(sorted(name for name in sys.modules if name in ('torch', 'numpy') or name[:6] == 'accel_')))"
    )
    loaded = json.loads(run_fresh(code))
    assert "torch" not in loaded
    assert "numpy" not in loaded
    # The errors alone, and the packages around them.
    assert [name for name in loaded if not name.startswith("accel_state")] == []
