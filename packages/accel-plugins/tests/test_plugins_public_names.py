from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

LAZY_PACKAGES = ("accel_plugins", "accel_plugins.precision", "accel_plugins.testing")
TORCH_FREE = (
    "accel_plugins",
    "accel_plugins.manifest",
    "accel_plugins.resolve",
    "accel_plugins.precision.config",
    "accel_plugins.checkpoint.config",
    "accel_plugins.checkpoint.files",
    "accel_plugins.single.manifest",
    "accel_plugins.ddp.manifest",
    "accel_plugins.ddp.config",
    "accel_plugins.transforms.compile_config",
    "accel_plugins.fsdp.manifest",
    "accel_plugins.fsdp.config",
)


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_every_public_name_exists_and_checkers_see_the_same_list(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    seen = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert {name for _, name in seen} == set(module.__all__)
    for owner, name in seen:
        assert getattr(module, name) is getattr(importlib.import_module(str(owner)), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_manifests_settings_and_the_list_of_backends_load_no_torch() -> None:
    code = (
        f"import sys, {', '.join(TORCH_FREE)}; from accel_plugins.resolve import available; "
        "names = {found.name for found in available() if found.manifest}; "
        "assert {'single', 'ddp'} <= names, names; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
