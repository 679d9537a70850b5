"""`accel env`: versions and settings for a bug report."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from accel_cli.command import spelled
from accel_cli.config.file import default_path
from accel_state.errors import AccelError, SettingError
from accel_state.plugins import plugins_of
from accel_state.redaction import redact
from accel_state.untrusted import printable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "Env")

_OWN_PREFIX: Final = "accel"
"""Prefixes of the names of this project's distributions and of its plugins."""

_CLIENT_PACKAGES: Final = ("datasets", "transformers", "peft", "trl", "diffusers")
_VARIABLE_PREFIXES: Final = (
    "ACCEL",
    "CUDA_",
    "DS_",
    "GLOO_",
    "GROUP_",
    "LOCAL_",
    "MASTER_",
    "NCCL_",
    "NUM_REPLICA_",
    "OMP_",
    "PARALLELISM_CONFIG_",
    "PET_",
    "PJRT_",
    "PYTORCH_",
    "REPLICA_",
    "SLURM_",
    "TORCH",
)
_VARIABLE_NAMES: Final = ("FORK_LAUNCHED", "HF_HOME", "NODE_RANK", "RANK", "WORLD_SIZE", "XDG_CACHE_HOME")


class Env:
    """The command; see `accel_cli.command.Command`."""

    help = "show versions and settings for a bug report"
    examples = ("", "--json")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the config file to show, and the output options."""
        parser.add_argument(
            *spelled("--config_file"),
            metavar="PATH",
            help="Config file to show; by default the one that `accel config` writes.",
        )
        parser.add_argument("--light", action="store_true", help="Show only what does not need torch.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, arguments: Namespace) -> int:
        """Print the report."""
        found = describe(os.environ, arguments.config_file, light=arguments.light)
        if arguments.json:
            import json

            print(json.dumps(found, indent=2))
        else:
            print("\n".join(_lines(found)))
        return 0


def describe(environ: Mapping[str, str], config_file: str | None, light: bool) -> dict[str, Any]:
    """Collect everything that a bug report needs, by heading.

    Raises:
        SettingError: the given config file does not exist.
    """
    found: dict[str, Any] = {
        "system": _system(),
        "packages": _packages(),
        "backends": {backend.name: backend.origin for backend in plugins_of("accel.backends")},
    }
    if not light:
        found["devices"] = _devices()
    found["config file"] = _config(config_file, environ)
    found["variables"] = redact({name: value for name, value in sorted(environ.items()) if _concerns_us(name)})
    return found


def _packages() -> dict[str, str]:
    """Versions of this project's packages and its plugins, then of their requirements and extras, then of clients."""
    from importlib import metadata

    # Each access to `metadata` reads and parses the file again.
    read = [distribution.metadata for distribution in metadata.distributions()]
    # Python imports the first on its path; a folder that an installation left behind may have no name.
    installed = {_normal(fields["Name"]): fields for fields in reversed(read) if fields and "Name" in fields}
    own = sorted(name for name in installed if name.startswith(_OWN_PREFIX))
    requirements = (line for name in own for line in installed[name].get_all("Requires-Dist", ()))
    needed = sorted(_normal(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in requirements)
    names = dict.fromkeys((*own, *needed, *_CLIENT_PACKAGES))
    return {installed[name]["Name"]: installed[name]["Version"] for name in names if name in installed}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _system() -> dict[str, Any]:
    usable = getattr(os, "sched_getaffinity", None)
    system: dict[str, Any] = {
        "platform": " ".join((os.uname().sysname, os.uname().release, os.uname().machine))
        if hasattr(os, "uname")
        else sys.platform,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "processors": len(usable(0)) if usable is not None else os.cpu_count(),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        system["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    return system


def _devices() -> dict[str, Any]:
    from accel_cli.launch.devices import describe_devices

    try:
        answer = describe_devices("Cannot list the devices of this machine.")
    except AccelError as error:
        return {"unknown": error.obstacle}
    silent = {f"{name} devices": f"did not answer: {error}" for name, error in answer["silent"].items()}
    if answer["undescribed"]:
        silent["devices"] = f"did not answer: {answer['undescribed']}"
    known = {**answer["families"], **answer["described"], **answer["software"]}
    return {"torch": answer["torch"], **known, **answer["failed"], **silent}


def _config(config_file: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    path = config_file or default_path(environ)
    if not os.path.isfile(path):
        if config_file is None:
            return {"path": f"{path} (there is none)"}
        asked = f"Cannot show the config file {path}."
        raise SettingError(asked, "There is no such file.", "Check the path.")
    from accel_cli.config.file import read_document

    try:
        values = {entry.key: entry.value for entry in read_document(path)}
    except SettingError as error:
        return {"path": path, "not valid": error.obstacle}
    return {"path": path, **values}


def _concerns_us(name: str) -> bool:
    return name.startswith((*_VARIABLE_PREFIXES, *_of_plugins())) or name in _VARIABLE_NAMES


@lru_cache(maxsize=1)
def _of_plugins() -> tuple[str, ...]:
    """Prefixes of the variables of backends and launchers: their names without a version; no setting is loaded."""
    plugins = (*plugins_of("accel.backends"), *plugins_of("accel.launchers"))
    return tuple({plugin.name.rstrip("0123456789").upper() for plugin in plugins})


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for heading, rows in found.items():
        cells = [(printable(name), printable(value)) for name, value in rows.items()]
        width = max((len(name) for name, _ in cells), default=0)
        lines += [f"{heading}:", *(f"  {name:<{width}}  {value}" for name, value in cells)]
    return lines


COMMAND: Final = Env()
