"""The record of a run: `run.json` in its project folder says what ran, so that it can be compared and repeated.

    write_run_record(folder, {"code": describe_code("train.py"), "packages": describe_packages(), ...}, attempt)
    read_run_record(folder)["settings"]["mixed_precision"]["value"]

Nothing here may end a run or wait for long: git has a limit of time and of bytes, and errors become entries of the
record. Secrets are hidden before anything is written (`accel_state.redaction`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from accel_state.errors import NotFound, SettingError
from accel_state.redaction import HIDDEN, is_secret, redact, redact_arguments, redact_text
from accel_state.untrusted import anything, dict_of, list_of, number, parse_json, read_limited, record

__all__ = (
    "RECORD",
    "attempt_entry",
    "describe_code",
    "describe_command",
    "describe_environment",
    "describe_packages",
    "folder_pattern",
    "leaves_by_key",
    "own_folders",
    "read_run_record",
    "write_run_record",
)

RECORD: Final = "run.json"
"""Name of the file in the folder of a run."""

FORMAT: Final = 1

_RECORD_PARTS: Final = ("code", "command", "settings", "packages", "devices", "world", "seeds", "environment")
_MAX_RECORD_BYTES: Final = 16 * 2**20
_MAX_ATTEMPTS: Final = 1000
_RECORD_SHAPE: Final = record(
    {
        **dict.fromkeys(_RECORD_PARTS, dict_of(anything)),
        "format": number(1, 1),
        "data": list_of(dict_of(anything)),
        "attempts": list_of(dict_of(anything)),
    }
)

# ---------------------------------------------------------------------- writing


def write_run_record(folder: str | os.PathLike[str], content: Mapping[str, Any], attempt: Mapping[str, Any]) -> str:
    """Write the record of a run, with the attempts of its earlier starts; return the error, or an empty text.

    Args:
        folder: the project folder, which is created if it is missing.
        content: the parts of the record.
        attempt: this start of the run, as `attempt_entry` describes it; it replaces an earlier entry with its id.
    """
    path = Path(folder, RECORD)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # As a reader sees it, because it is compared with what an earlier start has written.
        # The names of packages say nothing about their versions.
        packages = {name: redact_text(version) for name, version in content.get("packages", {}).items()}
        before = _earlier(path)
        hidden = json.loads(_without_known({**redact(content), "packages": packages}))
        attempts = before.get("attempts", [])
        kept = [one for one in attempts if one.get("id") != attempt["id"]]
        own = next((one for one in attempts if one.get("id") == attempt["id"]), None)
        # A later write of the same start compares with itself; the first one has compared with the start before.
        changed = (
            own["changed"] if own else [key for key in _RECORD_PARTS if kept and before.get(key) != hidden.get(key)]
        )
        entry = {**redact(attempt), "changed": changed}
        text = json.dumps({"format": FORMAT, **hidden, "attempts": [*kept[-_MAX_ATTEMPTS:], entry]}, indent=1)
        partial = path.with_name(f".{RECORD}.{os.getpid()}")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _without_known(content: Mapping[str, Any]) -> str:
    """The record as JSON. A secret of the environment may stand anywhere in it without its name."""
    text = json.dumps(content, default=str)
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET_CHARACTERS and is_secret(name, value) and not os.path.exists(value):
            text = text.replace(json.dumps(value)[1:-1], HIDDEN)
    return text


_MIN_SECRET_CHARACTERS: Final = 8


def _earlier(path: Path) -> dict[str, Any]:
    """The record that is there; empty if there is none that can be read."""
    try:
        earlier: dict[str, Any] = parse_json(read_limited(path, _MAX_RECORD_BYTES), _RECORD_SHAPE)
    except (OSError, ValueError):
        return {}
    return earlier


def attempt_entry(launch: str, restarts: int, host: str) -> dict[str, Any]:
    """The entry for this start of a run: one for each process that is the main one.

    Args:
        launch: name of the launch, which all its attempts share; empty without a launcher.
        restarts: number of restarts of this launch before this start.
        host: name of the machine.
    """
    now, pid = time.time(), os.getpid()
    return {"id": f"{pid}-{now:.3f}", "time": now, "pid": pid, "host": host, "launch": launch, "restarts": restarts}


# ---------------------------------------------------------------------- what ran


def describe_command(words: Sequence[str], folder: str, launched: bool) -> dict[str, Any]:
    """The command that started a run, as the record has it."""
    return {"words": redact_arguments(words), "folder": folder, "launched": launched, "python": sys.executable}


_GIT_TIMEOUT_S: Final = 10.0
"""Longest time of all commands of git together."""

_MAX_DIFFERENCE_BYTES: Final = 100_000
_MAX_HASHED_BYTES: Final = 64 * 2**20
_MAX_UNTRACKED_FILES: Final = 200
_MAX_SOURCE_BYTES: Final = 2**20


def describe_code(script: str) -> dict[str, Any]:
    """The script with its hash; the revision of the repository around it, and what is not committed there.

    Args:
        script: path of the script; the working folder counts if the script is in no repository.
    """
    place = Path(script).resolve()
    described: dict[str, Any] = {"script": str(place) if script else "", "script_sha256": _hash(place)}
    git, top = _Git(""), ""
    for folder in dict.fromkeys((place.parent if place.is_file() else Path.cwd(), Path.cwd())):
        git.folder = str(folder)
        top = top or git.text("rev-parse", "--show-toplevel")
    if not top:
        return {**described, "repository": "", "unknown": git.problem}
    git.folder = top
    difference, size, digest = git.output(
        "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=diff"
    )
    names = [name for name in git.text("ls-files", "--others", "--exclude-standard", "-z").split("\0") if name]
    return {
        **described,
        "repository": top,
        "revision": git.text("rev-parse", "HEAD"),
        "branch": git.text("symbolic-ref", "--short", "-q", "HEAD"),
        "submodules": git.text("submodule", "status", "--recursive"),
        "difference": difference.decode(errors="replace"),
        "difference_bytes": size,
        "difference_sha256": digest if size else "",
        "untracked": {name: _hash(Path(top, name)) for name in names[:_MAX_UNTRACKED_FILES]},
        "untracked_files": len(names),
        "unknown": git.problem,
    }


def _hash(path: Path) -> str:
    """Hash of a source file; empty if it is larger, or not a regular file."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(read_limited(path, _MAX_SOURCE_BYTES)).hexdigest()
    return ""


class _Git:
    """Commands of git in a folder, within a limit of time; `problem` says what did not work."""

    def __init__(self, folder: str) -> None:
        self.folder, self.problem = folder, ""
        self._deadline = time.monotonic() + _GIT_TIMEOUT_S
        # It must not lock the index of the user, nor ask for a password.
        self._environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}

    def text(self, *words: str) -> str:
        return self.output(*words)[0].decode(errors="replace").strip()

    def output(self, *words: str) -> tuple[bytes, int, str]:
        """The first bytes that a command prints, the number of all bytes, and their hash."""
        kept, size, digest = b"", 0, hashlib.sha256()
        command = ("git", "-C", self.folder, "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *words)
        quiet = subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, env=self._environment
            )
        except OSError as error:
            self.problem = f"git cannot be started: {error}"
            return b"", 0, ""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        try:
            while size <= _MAX_HASHED_BYTES:
                chunk = process.stdout.read(2**16)
                if chunk is None:
                    if time.monotonic() > self._deadline:
                        self.problem = f"git {words[0]} took longer than {_GIT_TIMEOUT_S:g} s"
                        return b"", 0, ""
                    time.sleep(0.002)
                    continue
                if not chunk:
                    break
                kept, size = (kept + chunk)[:_MAX_DIFFERENCE_BYTES], size + len(chunk)
                digest.update(chunk)
        finally:
            process.stdout.close()
            process.kill()
            process.wait()
        return kept, size, digest.hexdigest()


def describe_packages() -> dict[str, str]:
    """The version of Python and of each distribution on its path, by name; read from the names of folders alone."""
    versions: dict[str, str] = {}
    for folder in reversed(sys.path):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or os.curdir):
                stem, dot, suffix = name.rpartition(".")
                project, dash, rest = stem.partition("-")
                if dot and dash and suffix in ("dist-info", "egg-info"):
                    versions[project.lower().replace("_", "-")] = rest.partition("-py")[0]
    return {"python": sys.version.split()[0], **dict(sorted(versions.items()))}


_ALLOWED_PREFIXES: Final = (
    *("CUBLAS_", "CUDA_", "CUDNN_", "DS_", "FSDP_", "FI_", "GLOO_", "GOMP_", "HIP_", "HSA_", "KMP_", "MALLOC_"),
    *("MIOPEN_", "MKL_", "MPI_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "ONEDNN_", "OPENBLAS_", "PJRT_", "PYTORCH_"),
    *("RCCL_", "ROCR_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TPU_", "TRITON_", "UCX_", "XLA_"),
)
"""Prefixes of the variables that change how a run computes."""

_ALLOWED_NAMES: Final = (
    *("HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_OFFLINE", "LANG", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONOPTIMIZE"),
    *("PYTHONPATH", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE", "VIRTUAL_ENV", "CONDA_DEFAULT_ENV", "TZ"),
)


def describe_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an allow-list; settings have their place in the record, and others are not written."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_ALLOWED_PREFIXES) or name in _ALLOWED_NAMES
    }


# ---------------------------------------------------------------------- reading


def read_run_record(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a run.

    Args:
        run: the folder of the run, a folder inside it, or the file.

    Raises:
        NotFound: there is no record.
        SettingError: it cannot be read.
    """
    failure = f"Cannot read the record of the run {os.fspath(run)!r}."
    place = Path(run).absolute()
    folders = (place, *place.parents[:2])
    path = place if place.is_file() else next((f / RECORD for f in folders if (f / RECORD).is_file()), None)
    if path is None:
        why = f"There is no {RECORD} in it." if place.exists() else "There is no such folder."
        raise NotFound(failure, why, "Name the project_dir of a run that an Accelerator started with a project folder.")
    try:
        record: dict[str, Any] = parse_json(read_limited(path, _MAX_RECORD_BYTES), _RECORD_SHAPE)
    except (OSError, ValueError) as error:
        raise SettingError(failure, f"{str(path)!r} is not a record: {error}", "Name another run.") from error
    return {**record, "folder": str(path.parent)}


def leaves_by_key(value: Any, key: str = "") -> dict[str, Any]:
    """The leaves of nested data by dotted key, such as `settings.mixed_precision.value`.

    Example:
        >>> leaves_by_key({"a": {"b": 1}, "c": [2]})
        {'a.b': 1, 'c.0': 2}
    """
    if isinstance(value, Mapping):
        pairs: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    else:
        return {key: value}
    leaves: dict[str, Any] = {}
    for name, inner in pairs:
        leaves.update(leaves_by_key(inner, f"{key}.{name}" if key else str(name)))
    return leaves


def own_folders(record: Mapping[str, Any]) -> list[re.Pattern[str]]:
    """Patterns of the ways in which a record writes the folder of its run, the longest first."""
    project_dir = str(record["settings"].get("project_dir", {}).get("value") or "")
    joined = os.path.join(str(record["command"].get("folder") or ""), project_dir)
    names = {record["folder"], os.path.realpath(record["folder"]), *((joined, project_dir) if project_dir else ())}
    patterns = (folder_pattern(name) for name in sorted(names, key=len, reverse=True))
    return [pattern for pattern in patterns if pattern is not None]


def folder_pattern(folder: str) -> re.Pattern[str] | None:
    """The pattern of a folder and of what is in it, within a text; None for `.` and `/`."""
    name = folder.rstrip("/")
    return re.compile(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])") if name.strip("/.") else None
