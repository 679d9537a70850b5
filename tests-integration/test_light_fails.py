"""The check for a start without torch names the module at fault and the way torch came in."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_light

# One file for each rule, all light.
TREE = {
    "accel-state": [
        *("__init__", "choices", "creation", "errors", "labels", "lazy", "library", "network", "plugins", "proc"),
        *("clusters/__init__", "topology"),
        *(
            "watch/__init__",
            "watch/calls",
            "watch/goodput",
            "watch/processes",
            "watch/record",
            "watch/report",
            "watch/runs",
        ),
        *("watch/stacks", "watch/status", "settings/__init__", "settings/schema"),
    ],
    "accel-plugins": [
        *(
            "__init__",
            "checkpoint/__init__",
            "checkpoint/save_policy",
            "commands/__init__",
            "ddp/__init__",
            "ddp/manifest",
        ),
        *("ddp/manifest", "ddp/config", "shards"),
    ],
    "accel-tracking": ["__init__", "registry"],
    "accel-check": ["__init__", "check_parity", "report", "runs"],
    "accel-cli": ["__init__", "main"],
    "accel-megatron": ["__init__", "config", "manifest"],
    "accel-ray": ["__init__", "manifest"],
    "accel-torchft": ["__init__", "config", "launcher", "launcher_manifest", "manifest"],
}


ASKS_FOR_TORCH = """
import importlib.util

def main(arguments):
    assert importlib.util.find_spec("torch")
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A packages folder in which everything is light, with a torch and a numpy that are imported in no time."""
    for package, modules in TREE.items():
        for module in modules:
            write(tmp_path, package, module, "def main(arguments):\n    print(arguments)")
    for heavy in check_light.HEAVY:
        (tmp_path / "accel-state" / "src" / f"{heavy}.py").touch()
    return tmp_path


def write(packages: Path, package: str, module: str, text: str) -> None:
    path = packages / package / "src" / package.replace("-", "_") / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def test_a_light_tree_passes(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_light.main([str(packages)]) == 0
    assert "46 modules and 5 commands start without numpy and torch" in capsys.readouterr().out


def test_torch_in_a_manifest_is_named(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(packages, "accel-plugins", "ddp/manifest", "import torch")
    assert check_light.main([str(packages)]) == 1
    told = capsys.readouterr().err
    assert "accel_plugins.ddp.manifest loads torch" in told
    assert "manifest.py:1" in told
    assert "accel_cli" not in told


def test_what_an_init_brings_along_is_seen(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(packages, "accel-state", "settings/__init__", "import importlib\nimportlib.import_module('numpy')")
    assert check_light.main([str(packages)]) == 1
    assert "accel_state.settings.schema loads numpy" in capsys.readouterr().err


def test_a_command_that_loads_torch_is_named(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(packages, "accel-cli", "main", "def main(arguments):\n    if 'launch' in arguments:\n        import torch")
    assert check_light.main([str(packages)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert any(line.startswith("light: accel launch --help loads torch, by way of ") for line in told)
    assert all(line.startswith("light: accel launch --help ") for line in told)


def test_asking_whether_torch_is_installed_does_not_load_it(packages: Path) -> None:
    write(packages, "accel-cli", "main", ASKS_FOR_TORCH)
    assert check_light.main([str(packages)]) == 0


def test_a_module_that_cannot_be_imported_is_an_error(packages: Path) -> None:
    write(packages, "accel-cli", "main", "raise RuntimeError('broken on purpose')")
    with pytest.raises(SystemExit, match="broken on purpose"):
        check_light.main([str(packages)])


def test_a_rule_that_covers_nothing_is_an_error(packages: Path) -> None:
    (packages / "accel-plugins/src/accel_plugins/ddp/manifest.py").unlink()
    with pytest.raises(SystemExit, match="matches no file"):
        check_light.main([str(packages)])
