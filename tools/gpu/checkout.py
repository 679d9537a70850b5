"""Makes the packages of a checkout importable without installing them, including their entry points.

A machine that is rented for minutes has torch in some Python, and nothing may be installed there. The sources go on
`PYTHONPATH`; the entry points and versions that an installation would record go into a folder of metadata beside them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

__all__ = ("LEFT_OUT", "ROOT", "declared_modules", "write_metadata")

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = "accelerate"
"""Has the name of the original library, which such a machine often has, to be measured beside ours."""

_IMPORT_NAMES = {"pyyaml": "yaml"}


def _toml() -> Any:
    """A reader of TOML: Python's own since 3.11, else one that is installed, such as pip's."""
    for name in ("tomllib", "tomli", "pip._vendor.tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise SystemExit(f"{sys.executable} has no reader of TOML; install tomli, or use Python 3.11 or newer.")


def _projects() -> dict[Path, dict[str, Any]]:
    reader = _toml()
    return {
        path.parent: reader.loads(path.read_text(encoding="utf-8"))["project"]
        for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
        if path.parent.name != LEFT_OUT
    }


def write_metadata(folder: Path) -> list[str]:
    """Write what importlib.metadata reads of each package.

    Args:
        folder: where; anything else in it stays.

    Returns:
        The folders for `PYTHONPATH`, this one first.
    """
    paths = [str(folder)]
    for package, project in _projects().items():
        name = project["name"].replace("-", "_")
        version = project.get("version", "0.0")
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        lines = []
        for group, offers in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{offer} = {target}" for offer, target in offers.items()), ""]
        (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        paths.append(str(package / "src"))
    return paths


def declared_modules() -> list[str]:
    """Import names of the libraries that the packages and their tests need."""
    needed = {"pytest", "psutil"}
    for project in _projects().values():
        for requirement in project.get("dependencies", []):
            name = requirement
            for end in "<>=!~[; ":
                name = name.partition(end)[0]
            if not name.startswith("accel-"):
                needed.add(name)
    return sorted(_IMPORT_NAMES.get(name, name.replace("-", "_")) for name in needed)
