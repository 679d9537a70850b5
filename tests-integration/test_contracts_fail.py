"""The import contracts hold on a clean tree of packages, and each of them fails on a deliberate violation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
(BACKENDS,) = [contract for contract in CONTRACTS if contract["name"] == "A backend knows no other backend"]

VIOLATIONS = [
    ("Packages form strict layers", "accel_ops/tree.py", "import accel_plugins"),
    ("Packages form strict layers", "accel_state/process.py", "def start():\n    from accel_ops import tree"),
    ("Packages form strict layers", "accel_data/loader.py", "import accel_tracking"),
    ("Packages form strict layers", "accel_torch/step.py", "import accelerate"),
    ("Backends train without loaders and trackers", "accel_plugins/bundle.py", "import accel_data"),
    ("A launcher of a package of its own", "accel_ray/launcher.py", "import accel_plugins"),
    ("A tracker needs the state of the run", "accel_tracking/group.py", "import accel_ops"),
    (
        "Loaders and trackers reach other processes through accel_ops alone",
        "accel_data/loader.py",
        "def send():\n    from accel_state.transport import base",
    ),
    ("A backend knows no other backend", "accel_plugins/ddp/strategy.py", "from accel_plugins.single import strategy"),
    (
        "A tracker knows no other tracker",
        "accel_tracking/trackers/second.py",
        "from accel_tracking.trackers import jsonl",
    ),
    ("Settings never touch torch", "accel_state/settings/schema.py", "def parse():\n    import torch"),
    ("Settings never touch torch", "accel_state/topology.py", "import accel_state.devices"),
    ("A package has no import loops inside", "accel_data/sharding.py", "from accel_data import loader"),
    ("Vendor libraries stay", "accel_plugins/ddp/strategy.py", "import deepspeed"),
    ("Vendor libraries stay", "accel_torch/step.py", "def save():\n    import wandb"),
]

# The modules that the contracts name, and what the violations need to stand on.
TREE = {
    "accel_bigmodel/__init__.py": "",
    "accel_cli/__init__.py": "",
    "accel_data/__init__.py": "",
    "accel_data/loader.py": "from accel_data import sharding",
    "accel_data/sharding.py": "",
    "accel_ops/__init__.py": "",
    "accel_ops/tree.py": "import torch",
    "accel_plugins/__init__.py": "",
    "accel_plugins/deepspeed/__init__.py": "",
    "accel_plugins/deepspeed/strategy.py": "import deepspeed",
    "accel_plugins/single/strategy.py": "import accel_ops.tree",
    "accel_plugins/testing/__init__.py": "",
    "accel_plugins/testing/backend_suite.py": "import accel_data.loader\nimport accel_tracking",
    "accel_ray/__init__.py": "import accel_cli",
    "accel_state/__init__.py": "",
    "accel_state/devices/__init__.py": "import torch",
    "accel_state/errors.py": "",
    "accel_state/labels.py": "",
    "accel_state/lazy.py": "",
    "accel_state/network.py": "",
    "accel_state/protocol/__init__.py": "",
    "accel_state/settings/__init__.py": "",
    "accel_state/topology.py": "import accel_state.errors",
    "accel_state/transport/__init__.py": "",
    "accel_state/transport/base.py": "",
    "accel_torch/__init__.py": "import accel_cli\nimport accel_data",
    "accel_torchft/__init__.py": "import accel_plugins",
    "accel_tracking/__init__.py": "",
    "accel_tracking/trackers/__init__.py": "",
    "accel_tracking/trackers/jsonl.py": "import accel_state",
    "accelerate/__init__.py": "import accel_torch",
}


def lint(folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs the repository's own contracts on a tree of packages in `folder`."""
    backends = {f"{name.replace('.', '/')}/__init__.py": "" for name in BACKENDS["modules"]}
    for name, text in {**backends, **TREE, **changes}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
        package = folder / name.partition("/")[0]
        for parent in path.relative_to(package).parents:
            (package / parent / "__init__.py").touch()
    command = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", command, "--config", str(ROOT / "pyproject.toml"), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def broken(finished: subprocess.CompletedProcess[str]) -> list[str]:
    """The names of the contracts that were reported as broken."""
    return [
        line.rpartition(" BROKEN")[0].strip() for line in finished.stdout.splitlines() if re.search(r" BROKEN\b", line)
    ]


def test_a_clean_tree_keeps_every_contract(tmp_path: Path) -> None:
    finished = lint(tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert broken(finished) == []


@pytest.mark.parametrize(("contract", "file", "text"), VIOLATIONS)
def test_a_violation_breaks_its_contract(tmp_path: Path, contract: str, file: str, text: str) -> None:
    finished = lint(tmp_path, **{file: text})
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert any(name.startswith(contract) for name in broken(finished)), finished.stdout


def test_every_contract_has_a_violation() -> None:
    proven = {
        contract["name"] for contract in CONTRACTS for start, _, _ in VIOLATIONS if contract["name"].startswith(start)
    }
    assert proven == {contract["name"] for contract in CONTRACTS}


def test_every_backend_is_under_its_contract() -> None:
    project = tomli.loads((ROOT / "packages/accel-plugins/pyproject.toml").read_text(encoding="utf-8"))["project"]
    targets = project["entry-points"]["accel.backends"].values()
    folders = {".".join(target.split(".")[:2]) for target in targets}
    assert folders == set(BACKENDS["modules"])
