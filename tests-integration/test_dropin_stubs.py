"""Type checkers see through the stubs of the drop-in, and every way to install it has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from accelerate.names import NAMES, stub_path
from accelerate.names.stubs import stub, write_stubs

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "packages" / "accelerate"

SCRIPT = """
from __future__ import annotations

import accelerate
import torch
from accelerate import Accelerator, DistributedType
from accelerate.commands.launch import main
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, DistributedType as Kind
from accelerate.utils import MODEL_NAME, ProjectConfiguration, gather, set_seed, tqdm
from accelerate.utils import gather as again

reveal_type(Accelerator().device)
reveal_type(accelerate.utils.operations.find_batch_size)
reveal_type(AcceleratorState().mixed_precision)
reveal_type(ProjectConfiguration().total_limit)
reveal_type(Kind.NO is DistributedType.NO)
reveal_type(main())
accelerate.utils.no_such_name
from accelerate.utils import no_such_name
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the package, without the stubs that an installation may have written beside the original."""
    left = shutil.ignore_patterns("__pycache__", "*.pyi", "*.egg-info", "build")
    return Path(shutil.copytree(PACKAGE, tmp_path / "package", ignore=left))


def stubs_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.pyi")}


def build(folder: Path, *arguments: str) -> None:
    """Run a command of the package's build, with nothing of ours but the folder to import from."""
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "build", "--no-isolation", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stubs_in_this_checkout_are_those_of_the_table() -> None:
    source = PACKAGE / "src"
    texts = {source / stub_path(address): stub(address) for address in NAMES}
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    assert stale == [], "type checkers read old stubs; write them again with: python -m accelerate.names.stubs"


def test_stubs_of_modules_that_are_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "accelerate" / "utils").mkdir(parents=True)
    (tmp_path / "accelerate" / "utils" / "gone.pyi").touch()
    write_stubs(tmp_path)
    assert stubs_below(tmp_path) == {stub_path(address) for address in NAMES}


def test_a_wheel_has_the_stubs_and_the_sdist_builds_the_same_wheel(source: Path, tmp_path: Path) -> None:
    (source / "src" / "accelerate" / "stale.pyi").touch()
    build(source, "--wheel", "--outdir", str(tmp_path / "direct"))
    build(source, "--outdir", str(tmp_path / "dist"))
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert [name for name in archive.getnames() if name.endswith(".pyi")] == []
    held = []
    for folder in ("direct", "dist"):
        (wheel,) = (tmp_path / folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            held.append({name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")})
    assert held[0] == held[1]
    assert {name for name in held[0] if name.endswith(".pyi")} == {stub_path(address) for address in NAMES}


def test_an_editable_install_has_the_stubs_beside_the_sources(source: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert stubs_below(source / "src") == {stub_path(address) for address in NAMES}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mypy_follows_every_name(source: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    write_stubs(source / "src")
    # The stubs are part of what is checked, instead of those in the checkout.
    settings = tmp_path / "mypy.toml"
    written = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    here = written.replace("$MYPY_CONFIG_FILE_DIR/packages/accelerate/src", (source / "src").as_posix())
    settings.write_text(here.replace("$MYPY_CONFIG_FILE_DIR", ROOT.as_posix()), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(settings), str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=850, check=False)
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()[:-1]] == [
        'note: Revealed type is "torch._C.device"',
        'note: Revealed type is "def (data: Any) -> int"',
        'note: Revealed type is "str"',
        'note: Revealed type is "int | None"',
        'note: Revealed type is "bool"',
        'note: Revealed type is "int"',
        'error: Module has no attribute "no_such_name"  [attr-defined]',
        'error: Module "accelerate.utils" has no attribute "no_such_name"  [attr-defined]',
    ], done.stdout + done.stderr


@pytest.mark.slow
def test_pyright_follows_every_name(source: Path, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("pyright")
    if subprocess.run([program, "--version"], capture_output=True, check=False, timeout=300).returncode:
        pytest.skip("pyright does not start on this machine (it needs Node.js)")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    write_stubs(source / "src")
    settings = {"extraPaths": [str(source / "src")], "include": ["script.py"], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [str(program), "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500)
    told = json.loads(done.stdout)["generalDiagnostics"]
    assert [one["message"].partition(' is "')[2] for one in told if one["severity"] == "information"] == [
        'device"',
        '(data: Any) -> int"',
        'str"',
        'int | None"',
        'bool"',
        'int"',
    ]
    errors = [one["message"] for one in told if one["severity"] == "error"]
    assert len(errors) == 2
    assert all("no_such_name" in message for message in errors)
