from __future__ import annotations

import subprocess
import sys

import pytest

from accel_testing.public_names import check_public_names


@pytest.mark.parametrize("package", ["accel_bigmodel", "accel_bigmodel.weight_files"])
def test_public_names_of_accel_bigmodel(package: str) -> None:
    check_public_names(package)


def test_the_package_and_the_names_of_files_load_no_torch() -> None:
    code = "import sys, accel_bigmodel, accel_bigmodel.weight_files.names;sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=250, check=False).returncode == 0
