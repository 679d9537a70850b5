"""Write the modules of the drop-in `accelerate` from its table of names.

    python tools/gen_alias.py              write them
    python tools/gen_alias.py --check      exit 1 when a file is not what would be written
    python tools/gen_alias.py --missing    names of the original that the table does not have yet, and who may own them

A module names what it has twice: in imports that only type checkers and editors read, and in `__all__`. While a program
runs, `accelerate.address` serves the names by the same table, so that importing an old module imports nothing else.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "packages" / "accelerate" / "src"
FACTS = ROOT / "tests-integration" / "reference" / "api.json"

NOTE = "Written by tools/gen_alias.py from accelerate/names: change that table, not this file."


def load_table(source: Path = SOURCE) -> ModuleType:
    """The table, loaded by its path: the package around it may not be written yet."""
    folder = source / "accelerate" / "names"
    spec = importlib.util.spec_from_file_location(
        "accelerate_names", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"gen_alias: there is no table in {folder}")
    table = importlib.util.module_from_spec(spec)
    sys.modules["accelerate_names"] = table
    spec.loader.exec_module(table)
    return table


# ---------------------------------------------------------------- what is written
def modules(table: ModuleType) -> dict[str, str]:
    """Path relative to the source folder -> content, of every module that is written."""
    texts = {address: module_text(address, table) for address in table.NAMES}
    texts |= {address: refusal_text(address) for address in table.NOT_PROVIDED}
    return tidied({path_of(address, table): text for address, text in texts.items()})


def path_of(address: str, table: ModuleType) -> str:
    """Where a module lies; one with modules below it is a folder."""
    name = address.replace(".", "/")
    return f"{name}/__init__.py" if below(address, table) else f"{name}.py"


def below(address: str, table: ModuleType) -> list[str]:
    """Names of the modules directly below one."""
    return [other.rpartition(".")[2] for other in table.NAMES if other.rpartition(".")[0] == address]


def refusal_text(address: str) -> str:
    """A module that says why it cannot be had."""
    lines = ["from __future__ import annotations", "from accelerate.address import refuse", "", "refuse(__name__)"]
    return "\n".join([described(f"The old address `{address}`, which is not provided."), *lines])


def module_text(address: str, table: ModuleType) -> str:
    """A module that shows the names that the table has for it."""
    root = address == "accelerate"
    what = "What scripts and libraries find" if root else "What is found"
    return "\n".join(
        [
            described(f"{what} at the old address `{address}`."),
            *(("# ruff: noqa: F403, F405",) if gathered(address, table) else ()),
            "from __future__ import annotations",
            "from typing import TYPE_CHECKING",
            "from accelerate.address import serve",
            *(ROOT_IMPORTS if root else ()),
            "if TYPE_CHECKING:",
            *(f"    {line}" for line in imports(address, table)),
            "",
            f"__all__ = {tuple(sorted(table.owners(address)))}",
            "",
            *((f"__version__ = {table.VERSION!r}", "", *ROOT_START) if root else ()),
            *start(address, table),
            "serve(__name__)",
        ]
    )


def described(what: str) -> str:
    """A docstring."""
    return f'"""{what}\n\n{NOTE}\n"""\n'


ROOT_IMPORTS = (
    "from accelerate.installation import check_files",
    "from accelerate.loggers import join_loggers",
)
ROOT_START = ("check_files(__path__[0])", "join_loggers()")


def imports(address: str, table: ModuleType) -> Iterator[str]:
    """What type checkers are told."""
    yield from (f"from {source} import *" for source in gathered(address, table))
    whole = {name for source in gathered(address, table) for name in table.owners(source)}
    for name, owner in table.owners(address).items():
        if name not in whole:
            yield f"from {owner.module} import {owner.name}{'' if name == owner.name else f' as {name}'}"
    for name, owner in table.borrowed(address).items():
        yield f"from {owner.module} import {owner.name} as {name}"
    for name in below(address, table):
        if name not in table.owners(address):
            yield f"from {address} import {name} as {name}"
    yield "pass"


def gathered(address: str, table: ModuleType) -> list[str]:
    """The old modules of which a module has everything."""
    return [source for source, names in table.NAMES[address].items() if names == "*"]


def start(address: str, table: ModuleType) -> list[str]:
    """What makes a command of the original run as `python -m accelerate.commands.<command>`."""
    owner = table.owners(address).get("main")
    if owner is None or not address.startswith("accelerate.commands."):
        return []
    return [
        'if __name__ == "__main__":',
        f"    from {owner.module} import {owner.name}",
        f"    raise SystemExit({owner.name}())",
        "",
    ]


def tidied(texts: Mapping[str, str]) -> dict[str, str]:
    """The same files as ruff sorts and lays them out."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in texts.items():
            place = Path(folder) / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        ruff = [sys.executable, "-m", "ruff"]
        settings = ["--quiet", "--no-cache", "--config", str(ROOT / "pyproject.toml"), folder]
        for step in (["check", "--fix", "--select", "F401,I,PIE790,RUF022"], ["format"]):
            subprocess.run([*ruff, *step, *settings], check=True)
        return {path: (Path(folder) / path).read_text(encoding="utf-8") for path in texts}


# ---------------------------------------------------------------- comparing
def drift(texts: Mapping[str, str], source: Path) -> list[str]:
    """Files that are not what would be written, and written files that nothing asks for any more."""
    present = {
        path.relative_to(source).as_posix(): path.read_text(encoding="utf-8")
        for path in source.glob("accelerate/**/*.py")
    }
    changed = [path for path, text in texts.items() if present.get(path) != text]
    return changed + [path for path, text in present.items() if NOTE in text and path not in texts]


def missing(table: ModuleType, facts: Path = FACTS, packages: Path = ROOT / "packages") -> list[str]:
    """Names of the original, in the tiers that are provided, that the table does not have.

    Behind a name stand the modules of ours that define one like it.
    """
    described = json.loads(facts.read_text(encoding="utf-8"))["modules"]
    homes = definitions(packages)
    everywhere = {name for address in table.NAMES for name in table.owners(address)}
    lines = []
    for address, module in sorted(described.items()):
        if module["tier"] == "test_utils":
            continue
        known = table.served(address) if address in table.NAMES else {}
        absent = sorted(set(module["names"]) - set(known))
        imported = module.get("incidental", ()) if known and module["tier"] == "core" else ()
        lendable = sorted(everywhere.intersection(imported) - set(known))
        if absent or lendable or address not in table.NAMES:
            lines.append(f"{address}:{'' if absent or lendable else ' the module itself'}")
            lines += [f"    {name}  {' '.join(homes.get(name, ()))}".rstrip() for name in absent]
            lines += [f"    could borrow: {' '.join(lendable)}"] if lendable else []
    return lines


def definitions(packages: Path) -> dict[str, list[str]]:
    """Every public name that a module of ours defines at its top level, and those modules."""
    homes: dict[str, list[str]] = {}
    for path in sorted(packages.glob("accel-*/src/**/*.py")):
        module = ".".join(path.relative_to(packages).parts[2:]).removesuffix(".py").removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for name in defined(node):
                homes.setdefault(name, []).append(module)
    return homes


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement at the top level of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def main(arguments: list[str]) -> int:
    """Writes, checks or lists, and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    parser.add_argument("--missing", action="store_true", help="list names of the original that are not there yet")
    given = parser.parse_args(arguments)
    table = load_table()
    if given.missing:
        print("\n".join(missing(table)))
        return 0
    texts = modules(table)
    changed = drift(texts, SOURCE)
    if given.check:
        for path in changed:
            print(f"gen_alias: {path} is not what the table says; run: python tools/gen_alias.py", file=sys.stderr)
        return 1 if changed else 0
    for path in changed:
        write(SOURCE / path, texts.get(path))
        print(path)
    return 0


def write(place: Path, text: str | None) -> None:
    """Write a file; with None, remove it."""
    if text is None:
        place.unlink()
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
