from __future__ import annotations

import subprocess
import sys

import pytest

from accel_testing.public_names import check_public_names

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
    "accel_plugins.transforms.config",
    "accel_plugins.fsdp.manifest",
    "accel_plugins.fsdp.config",
)


@pytest.mark.parametrize("package", ["accel_plugins", "accel_plugins.precision", "accel_testing.backends"])
def test_public_names_of_accel_plugins(package: str) -> None:
    check_public_names(package)


def test_manifests_settings_and_the_list_of_backends_load_no_torch() -> None:
    code = (
        f"import sys, {', '.join(TORCH_FREE)}; from accel_plugins.resolve import BACKENDS; "
        "names = {manifest.name for manifest in BACKENDS.values()}; "
        "assert {'single', 'ddp'} <= names, names; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=250, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
