"""The modules of the drop-in are what the table says, and type checkers see through them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gen_alias

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
from __future__ import annotations

import accelerate
import torch
from accelerate import Accelerator, DistributedType
from accelerate.commands.launch import main
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, DistributedType as Kind
from accelerate.utils import MODEL_NAME, ProjectConfiguration, gather, set_seed
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


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return gen_alias.load_table()


@pytest.fixture(scope="module")
def texts(table: ModuleType) -> dict[str, str]:
    return gen_alias.modules(table)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    # Whoever imports the package meanwhile makes and renames files beside the modules.
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(gen_alias.SOURCE / "accelerate", tmp_path / "accelerate", ignore=compiled)
    return tmp_path


def test_the_files_are_what_the_table_says(texts: dict[str, str]) -> None:
    assert gen_alias.drift(texts, gen_alias.SOURCE) == []


def test_a_changed_a_lost_and_a_forgotten_file_are_noticed(texts: dict[str, str], source: Path) -> None:
    package = source / "accelerate"
    with (package / "state.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    (package / "utils" / "tqdm.py").unlink()
    shutil.copy(package / "logging.py", package / "left_over.py")
    assert sorted(gen_alias.drift(texts, source)) == [
        "accelerate/left_over.py",
        "accelerate/state.py",
        "accelerate/utils/tqdm.py",
    ]


def test_a_file_is_written_and_removed(tmp_path: Path) -> None:
    place = tmp_path / "new" / "module.py"
    gen_alias.write(place, "text")
    assert place.read_text(encoding="utf-8") == "text"
    gen_alias.write(place, None)
    assert not place.exists()


def test_names_that_the_table_lacks_are_listed(table: ModuleType, tmp_path: Path) -> None:
    facts = tmp_path / "api.json"
    facts.write_text(
        """{"modules": {
            "accelerate.state": {"tier": "core", "names": {"PartialState": {}, "NeverSeen": {}, "AlsoNever": {}}},
            "accelerate.nowhere": {"tier": "core", "names": {}},
            "accelerate.logging": {"tier": "core", "names": {"get_logger": {}}, "incidental": ["gather", "os"]},
            "accelerate.test_utils": {"tier": "test_utils", "names": {"anything": {}}}
        }}""",
        encoding="utf-8",
    )
    owner = tmp_path / "accel-data" / "src" / "accel_data" / "loader.py"
    owner.parent.mkdir(parents=True)
    owner.write_text("def NeverSeen(): ...\n", encoding="utf-8")
    assert gen_alias.missing(table, facts, tmp_path) == [
        "accelerate.logging:",
        "    could borrow: gather",
        "accelerate.nowhere: the module itself",
        "accelerate.state:",
        "    AlsoNever",
        "    NeverSeen  accel_data.loader",
    ]


@pytest.mark.timeout(400)
def test_a_type_checker_follows_every_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    told = [line.partition(": ")[2] for line in done.stdout.splitlines() if "script.py:" in line]
    assert told == [
        'note: Revealed type is "torch._C.device"',
        'note: Revealed type is "def (data: Any) -> int"',
        'note: Revealed type is "str"',
        'note: Revealed type is "int | None"',
        'note: Revealed type is "bool"',
        'note: Revealed type is "int"',
        'error: Module has no attribute "no_such_name"  [attr-defined]',
        'error: Module "accelerate.utils" has no attribute "no_such_name"  [attr-defined]',
    ], done.stdout
