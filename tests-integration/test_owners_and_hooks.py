"""Every package and backend has an owner, and every hook before a commit leads to something."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "packages" / "accel-plugins"
OWNED = [
    line.split()
    for line in (ROOT / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    if line.startswith(("/", "*"))
]
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]


def test_every_package_and_backend_folder_has_one_line() -> None:
    folders = [path.parent for path in ROOT.glob("packages/*/pyproject.toml")]
    backends = tomli.loads((PLUGINS / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["accel.backends"]
    folders += {PLUGINS / "src" / Path(*address.partition(".manifest")[0].split(".")) for address in backends.values()}
    expected = {"*", *(f"/{folder.relative_to(ROOT).as_posix()}/" for folder in folders)}
    assert sorted(line[0] for line in OWNED) == sorted(expected)


def test_every_line_names_an_owner() -> None:
    assert all(len(line) >= 2 and all(owner.startswith("@") for owner in line[1:]) for line in OWNED)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_a_hook_runs_what_the_environment_has(hook: dict[str, Any]) -> None:
    program, *arguments = shlex.split(hook["entry"])
    assert Path(program).parts[:2] == (".venv", "bin")
    assert (ROOT / program).exists()
    assert all((ROOT / argument).exists() for argument in arguments if argument.startswith("tools/"))
    assert hook["stages"] in (["pre-commit"], ["pre-push"])
