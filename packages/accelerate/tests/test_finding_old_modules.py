"""Python finds the old modules, which have no files, by the ways in which it finds others."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import accelerate
import accelerate.utils
from accelerate.names import NAMES, PACKAGES

SOURCE = Path(str(accelerate.__file__)).parent


def run(*command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=250, check=False
    )


def test_walking_the_package_meets_every_module_once() -> None:
    met = [module.name for module in pkgutil.walk_packages(accelerate.__path__, "accelerate.")]
    assert len(met) == len(set(met))
    assert set(NAMES) <= {"accelerate", *met}
    assert {module.name for module in pkgutil.iter_modules(accelerate.__path__, "accelerate.") if module.ispkg} >= {
        package for package in PACKAGES if package.count(".") == 1
    }
    assert "accelerate.test_utils" not in met


@pytest.mark.parametrize("address", sorted(set(NAMES) - {"accelerate"}))
def test_a_specification_says_where_a_module_comes_from(address: str) -> None:
    spec = find_spec(address)
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin).relative_to(SOURCE).with_suffix("")
    assert ".".join(("accelerate", *place.parts)).removesuffix(".__init__") == address
    assert (spec.submodule_search_locations is not None) == (address in PACKAGES)


def test_a_specification_is_found_before_anything_is_imported() -> None:
    code = "import sys, importlib.util; print(importlib.util.find_spec('accelerate.utils.fsdp_utils').name); "
    done = run("-c", f"{code} print('accelerate.utils.fsdp_utils' in sys.modules)")
    assert done.stdout.split() == ["accelerate.utils.fsdp_utils", "False"], done.stderr


@pytest.mark.parametrize("name", ["accelerate.utils.rich", "accelerate.utils.gather", "accelerate.__main__"])
def test_what_is_not_a_module_has_no_specification(name: str) -> None:
    assert find_spec(name) is None


def test_the_source_of_a_module_is_its_stub() -> None:
    assert "from accel_ops.collectives import gather as gather" in inspect.getsource(accelerate.utils.operations)
    assert str(inspect.getsourcefile(accelerate.utils)).endswith("__init__.pyi")


def test_a_module_is_imported_after_all_caches_were_dropped() -> None:
    code = "import importlib, sys, accelerate; importlib.invalidate_caches(); sys.path_importer_cache.clear(); "
    done = run("-c", f"{code} import accelerate.utils.memory")
    assert done.returncode == 0, done.stderr


def test_the_package_can_be_imported_anew_and_reloaded() -> None:
    code = "\n".join(
        [
            "import importlib, sys, accelerate, accelerate.utils.memory",
            "hooks = len(sys.path_hooks)",
            "for name in [name for name in sys.modules if name.startswith('accelerate')]: del sys.modules[name]",
            "import accelerate",
            "assert importlib.reload(accelerate).utils.memory.find_executable_batch_size",
            "assert len(set(accelerate.__path__)) == len(accelerate.__path__) == 2, accelerate.__path__",
            "assert len(sys.path_hooks) == hooks",
        ]
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_threads_that_import_at_once_get_the_same_module() -> None:
    code = "\n".join(
        [
            "import importlib, threading",
            "from concurrent.futures import ThreadPoolExecutor",
            "start = threading.Barrier(8)",
            "def get(address):",
            "    start.wait()",
            "    return id(importlib.import_module(address).DistributedType), id(importlib.import_module(address))",
            "with ThreadPoolExecutor(8) as pool:",
            "    for address in ('accelerate.utils.operations', 'accelerate.state'):",
            "        assert len(set(pool.map(get, [address] * 8))) == 1",
        ]
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_package_works_from_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "packed.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for path in SOURCE.rglob("*.py"):
            packed.write(path, Path("accelerate") / path.relative_to(SOURCE))
    code = (
        "import accelerate, inspect, pkgutil; from accelerate.utils import is_rich_available; "
        "print(accelerate.__file__, len(list(pkgutil.walk_packages(accelerate.__path__, 'accelerate.'))), "
        "len(inspect.getsource(accelerate.utils)), hasattr(accelerate, 'no_such_name'))"
    )
    done = run("-c", code, path=archive)
    assert done.returncode == 0, done.stderr
    place, modules, length, unknown = done.stdout.split()
    assert place.startswith(str(archive))
    assert int(modules) >= len(NAMES)
    assert int(length) > 1000
    assert unknown == "False"


@pytest.mark.parametrize(("script", "code"), [("", 0), ("raise SystemExit(3)", 3)])
def test_a_command_runs_as_a_module_and_ends_with_its_exit_code(tmp_path: Path, script: str, code: int) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"print('the script ran')\n{script}\n", encoding="utf-8")
    done = run("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", str(path))
    assert "the script ran" in done.stdout, done.stderr
    assert done.returncode == code


def test_a_module_that_is_not_a_command_runs_and_does_nothing() -> None:
    done = run("-m", "accelerate.utils.operations")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_it_lists_no_folder_and_imports_few_modules() -> None:
    code = "\n".join(
        [
            "import sys",
            "listed = []",
            "def watch(event, arguments):",
            "    if event in ('os.listdir', 'os.scandir'): listed.append(arguments[0])",
            # Python itself lists a folder once when it looks for the first module in it.
            "import accel_state.lazy, accel_state.errors, accelerate.names",
            "for name in [name for name in sys.modules if name.startswith('accelerate')]: del sys.modules[name]",
            "before = set(sys.modules)",
            "sys.addaudithook(watch)",
            "import accelerate",
            "print(listed, sorted(set(sys.modules) - before))",
        ]
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    ours = ["", ".address", ".finder", ".installation", ".names", ".names.homes"]
    assert done.stdout.strip() == f"[] {[f'accelerate{name}' for name in ours]}"


def test_reading_a_module_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.utils.memory", raising=False)
    monkeypatch.delattr(accelerate.utils, "memory", raising=False)
    assert importlib.import_module("accelerate").utils.memory is sys.modules["accelerate.utils.memory"]
