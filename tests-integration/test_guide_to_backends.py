"""The guide to backends, followed literally, leads to a package that passes the kit."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from accel_cli.main import main
from accel_testing.processes import run_command

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "how-to" / "write-a-backend.md"

TESTS = """
from accel_testing.backends import BackendSuite


class TestFancy(BackendSuite):
    target = "accel_backend_fancy.manifest:MANIFEST"
"""


def block_with(text: str) -> str:
    """The block of Python in the guide that contains a text."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if text in block)
    return str(found)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package of the guide: created by the command, then changed as its sections say."""
    assert main(["new-backend", "fancy", "--into", str(tmp_path)]) == 0
    package = tmp_path / "accel-backend-fancy"
    source = package / "src" / "accel_backend_fancy"
    (source / "manifest.py").write_text(block_with("MANIFEST = Manifest("), encoding="utf-8")
    (source / "config.py").write_text(block_with("class FancyConfig"), encoding="utf-8")
    strategy = block_with("class FancyStrategy").partition("state = PartialState")[0]
    (source / "strategy.py").write_text(strategy, encoding="utf-8")
    (package / "tests" / "test_fancy_conformance.py").write_text(TESTS, encoding="utf-8")
    return package


@pytest.fixture
def environment(package: Path, tmp_path: Path) -> dict[str, str]:
    """Variables with which Python finds the package, installed."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-build-isolation"]
    placed = run_command([*pip, "--no-deps", "--target", str(site), str(package)])
    assert placed.returncode == 0, placed.stderr
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_the_package_of_the_guide_is_listed(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "accel_cli.main", "backends", "--json", "--no_probe"]
    listed = run_command(command, env=environment)
    assert {"fancy": ""}.items() <= {row["name"]: row["failure"] for row in json.loads(listed.stdout)}.items()


@pytest.mark.slow
def test_the_package_of_the_guide_passes_the_kit(environment: dict[str, str], package: Path, tmp_path: Path) -> None:
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-q"]
    tested = run_command(
        [sys.executable, "-m", "pytest", "-n", "0", *settings, str(package / "tests")], timeout=900, env=environment
    )
    assert tested.returncode == 0, tested.stdout
