"""Files of every kind that we read, damaged, and pickles made to attack their readers.

Each is read as a user would, in a forked child with a bound on its memory and its time. It ends with the data or with
a typed error: any other exception, a crash or a hang is a loss. So is a checkpoint with a manifest that is loaded
although it is damaged, and a damaged one in front of which an older good one is not taken.

The pickles are made of the names that the readers admit: each is called, made, given a state and used as data with
arguments of many kinds, by every opcode that can do so; names of dangerous functions join them. Real pickles are
changed one opcode at a time as well: another admitted name, another number, an opcode left out or repeated. An audit
hook reports what is run while one is read.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import multiprocessing
import os
import pickletools
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy
import torch
import yaml
from faults.sweeps import Tally
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.utils.data import DataLoader

from accel_bigmodel import OffloadedWeightsLoader, load_weights, offload_state_dict, save_weights
from accel_cli.config.file import read_config, read_tables
from accel_cli.config.write import modernised
from accel_cli.launch.failures import Failure, read_record
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.mpi import read_hostfile
from accel_cli.main import main as command_line
from accel_plugins.checkpoint import pickled, shard_metadata
from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.pickled import NUMPY_GLOBALS
from accel_plugins.checkpoint.shards import PortableWriter
from accel_plugins.deepspeed.config import HfDeepSpeedConfig
from accel_plugins.fsdp.weights import merge_weights
from accel_state.errors import AccelError, CheckpointError
from accel_torch import Accelerator, ProjectConfiguration
from accel_tracking.trackers.jsonl import FORMAT, read_run
from injected.children import ask

__all__ = ("READERS", "Watched", "attacks", "code_in_a_field", "damaged_files", "gadgets", "read_each")

_MEMORY: Final = 2 << 30
"""Bytes that a child may take besides what it has when it begins."""
_SECONDS: Final = 60


# ---------------------------------------------------------------- children that read


def read_each(
    read: Callable[[Any], object], cases: Sequence[Any], hook: Callable[..., None] | None = None
) -> list[str | None]:
    """What is wrong with how each case is read in a limited child; a child that dies is followed by another.

    Args:
        read: reads one case.
        cases: what to read, one after the other.
        hook: an audit hook for the child.
    """
    found: list[str | None] = []
    forking = multiprocessing.get_context("fork")
    while len(found) < len(cases):
        answers, told = forking.Pipe(duplex=False)
        child = forking.Process(target=_read_in_child, args=(read, cases[len(found) :], hook, told))
        child.start()
        told.close()
        with contextlib.suppress(EOFError):
            while len(found) < len(cases):
                found.append(answers.recv())
        child.join()
        if child.exitcode:
            hung = child.exitcode == -signal.SIGALRM
            found.append(f"it hung for {_SECONDS} s" if hung else f"it ended with {child.exitcode}")
    return found


def _read_in_child(
    read: Callable[[Any], object], cases: Sequence[Any], hook: Callable[..., None] | None, told: Connection
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # The threads of torch have not been forked.
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if hook is not None:
        sys.addaudithook(hook)
    for case in cases:
        signal.alarm(_SECONDS)  # what hangs ends the process
        told.send(_wrong(read, case))
    # What a case has left running must not keep the child.
    os._exit(0)


def _wrong(read: Callable[[Any], object], case: Any) -> str | None:
    try:
        read(case)
    except AccelError:
        return None
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "accel" in Path(frame.filename).parts[-2]] or frames
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(ours[-4:]))
        return f"{type(error).__name__}: {str(error)[:200]!r} at {where}"
    return None


# ---------------------------------------------------------------- damaged files

_DAMAGED: Final = 3000
_ODD: Final = (
    "null", "true", "-1", "0", "1e9999", "-1e9999", "NaN", "9" * 25, "9" * 5000, '"x"', '"\\ud800"', '"\\u0000"', "[]",
    "{}", "[" * 5000, '{"a":' * 3000, '"../../../../../../dev/zero"', '"/dev/zero"', '"a\\nb\\u001b[2J"', "1.5", "[[]]",
)  # fmt: skip
_ODD_VALUES: Final[tuple[Any, ...]] = (
    None, True, -1, 10**30, 1e308, float("nan"), "", "x", b"x", [], {}, (), [None], {"a": 1}, {1: 2}, torch.zeros(0),
    torch.zeros(3, 3), torch.tensor(7), torch.zeros(2, dtype=torch.complex64), torch.arange(4), slice(1),
)  # fmt: skip


class _Registered:
    """An object that is registered for checkpoints."""

    def __init__(self) -> None:
        self.state = {"done": 3, "names": ["a", "b"]}

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
        self.state = {"done": state["done"], "names": list(state["names"])}


def session(project: Path, *, train: bool) -> Accelerator:
    """The start of a training script; with a step behind it, or before it loads."""
    torch.manual_seed(0)
    configuration = ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data: Any = torch.randn(16, 4)
    loader: DataLoader[Any] = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    accelerator.register_for_checkpointing(_Registered())
    for batch in loader if train else ():
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        break
    return accelerator


def _make_project(folder: Path) -> None:
    accelerator = session(folder, train=True)
    accelerator.save_state()
    accelerator.save_state()


def _make_bare_project(folder: Path) -> None:
    _make_project(folder)
    for manifest in folder.rglob(MANIFEST_NAME):
        manifest.unlink()
    shutil.rmtree(folder / "checkpoints" / "checkpoint_0")


def _load_project(folder: Path) -> object:
    return session(folder, train=False).load_state()


def _load_by_name(folder: Path) -> object:
    session(folder, train=False).load_state(str(folder / "checkpoints" / "checkpoint_1"))
    raise ValueError("it was loaded although it is damaged")


def _walk_back(folder: Path) -> object:
    try:
        return session(folder, train=False).load_state()
    except AccelError as error:
        raise ValueError(f"the older one was not taken: {error}") from error


def _look(folder: Path) -> object:
    for action in ("list", "verify", "info", "prune"):
        keep = ["--keep", "1"] if action == "prune" else []
        command_line(["checkpoint", action, str(folder / "checkpoints" / ("checkpoint_1" * (action == "info"))), *keep])
    return None


STATE: Final = {"a.weight": torch.randn(8, 4), "a.bias": torch.randn(8).half(), "step": torch.tensor(3)}


def _make_weights(safe: bool) -> Callable[[Path], object]:
    return lambda folder: save_weights(STATE, folder, 100, safe_serialization=safe)


def _read_offloaded(folder: Path) -> object:
    weights = OffloadedWeightsLoader(save_folder=folder)
    return [weights[name].clone() for name in weights]


def _make_offloaded(folder: Path) -> None:
    offload_state_dict(folder, STATE)


def _make_shards(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": dict(STATE), "other": {"lr": 0.1, "names": ["a"]}}
        save_shards(state, storage_writer=PortableWriter(folder / "shards"), no_dist=True)


def _merge(folder: Path) -> object:
    return merge_weights(folder / "shards", folder / "merged")


CONFIG: Final = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_processes": 2,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "main_training_function": "main",
}


def _make_config(folder: Path) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "run.json").write_text(json.dumps(CONFIG))
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}))
    (folder / "hosts").write_text("node1 slots=4\nnode2:3\n")


def _read_config(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        path = str(folder / name)
        # Each is what another command does with the file; one that refuses it does not keep the others from it.
        errors = []
        readers: list[Callable[[], object]] = [
            lambda: read_config(path, launch_classes()),
            lambda: modernised(path, launch_classes()),
            lambda: read_tables(path),
        ]
        for reader in readers:
            try:
                reader()
            except AccelError as error:
                errors.append(error)
        return errors

    return read


def _make_record(folder: Path) -> None:
    message = {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"}}
    (folder / "error.json").write_text(json.dumps({"message": message}))


def _read_record(folder: Path) -> object:
    failure = Failure(0, 1, read_record(str(folder / "error.json")))
    return failure.time, failure.trace, failure.shown, failure.exit_code


def _make_run(folder: Path) -> None:
    lines: list[dict[str, Any]] = [{"run": "run", "format": FORMAT, "time": 1.0, "config": {"lr": 0.1}}]
    lines += [{"time": 2.0, "step": step, "values": {"loss": 1 / (step + 1)}} for step in range(3)]
    lines += [{"time": 3.0, "table": {"name": "t", "columns": ["a"], "rows": [[1]]}}, {"time": 4.0, "end": True}]
    (folder / "run.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def _read_run(folder: Path) -> object:
    return read_run(folder / "run.jsonl").curves()


@dataclass(frozen=True)
class Subject:
    """A kind of file: what makes a folder with some, which of them are damaged, and what reads them."""

    make: Callable[[Path], object]
    files: str
    read: Callable[[Path], object]


SUBJECTS: Final = {
    "weights in shards": Subject(_make_weights(True), "*", lambda folder: _clone(load_weights(folder))),
    "weights in shards of torch": Subject(_make_weights(False), "*", lambda folder: _clone(load_weights(folder))),
    "offload folder": Subject(_make_offloaded, "*", _read_offloaded),
    "shards of DCP": Subject(_make_shards, "shards/*", _merge),
    "checkpoint without manifest": Subject(_make_bare_project, "checkpoints/checkpoint_1/*", _load_project),
    "checkpoint by name": Subject(_make_project, "checkpoints/checkpoint_1/[!c]*", _load_by_name),
    "newest of two checkpoints": Subject(_make_project, "checkpoints/checkpoint_1/*", _walk_back),
    "manifest": Subject(_make_project, f"checkpoints/checkpoint_1/{MANIFEST_NAME}", _look),
    "config in YAML": Subject(_make_config, "run.yaml", _read_config("run.yaml")),
    "config in JSON": Subject(_make_config, "run.json", _read_config("run.json")),
    "config of DeepSpeed": Subject(_make_config, "ds.json", lambda folder: HfDeepSpeedConfig(folder / "ds.json")),
    "hostfile": Subject(_make_config, "hosts", lambda folder: read_hostfile(str(folder / "hosts"), "--hostfile")),
    "record of an error": Subject(_make_record, "error.json", _read_record),
    "run of the tracker": Subject(_make_run, "run.jsonl", _read_run),
}


def _clone(weights: dict[str, Any]) -> object:
    return [weight.clone() for weight in weights.values()]


def damage(path: Path, other: bytes, choice: random.Random) -> str:
    """Damage a file in one of many ways, and say how."""
    content = path.read_bytes()
    means: list[Callable[[Path, bytes, bytes, random.Random], str | None]] = [_bytes, _bytes, _kind]
    if _is_json(content):
        means += [_json_value] * 4
    if zipfile.is_zipfile(path):
        means += [_member, _member, _object, _object, _object]
    for _ in range(20):
        how = choice.choice(means)(path, content, other, choice)
        if how is not None:
            return how
    raise AssertionError(f"{path} cannot be damaged")


def _bytes(path: Path, content: bytes, other: bytes, choice: random.Random) -> str | None:
    changed, at = bytearray(content), choice.randrange(len(content) + 1)
    much = choice.randrange(1, max(2, len(content) // 3))
    how = choice.choice(("cut", "flip", "insert", "remove", "zero", "repeat", "replace", "exchange"))
    if how == "cut":
        del changed[at:]
    elif how == "flip":
        for _ in range(choice.choice((1, 1, 8, 64))):
            changed[choice.randrange(len(changed))] ^= 1 << choice.randrange(8)
    elif how == "insert":
        changed[at:at] = choice.randbytes(choice.randrange(1, 40))
    elif how == "remove":
        del changed[at : at + much]
    elif how == "zero":
        changed[at : at + much] = bytes(len(changed[at : at + much]))
    elif how == "repeat":
        changed[at:at] = changed[at : at + much]
    elif how == "replace":
        changed[at : at + much] = choice.randbytes(len(changed[at : at + much]))
    else:
        changed = bytearray(other)
    if bytes(changed) == content:
        return None
    path.write_bytes(changed)
    return f"{how} at {at}"


def _kind(path: Path, content: bytes, other: bytes, choice: random.Random) -> str | None:
    path.unlink()
    how = choice.choice(("absent", "folder", "pipe", "endless", "loop", "empty", "elsewhere"))
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "endless":
        path.symlink_to("/dev/zero")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "elsewhere":
        path.symlink_to("/proc/self/status")
    return how


def _is_json(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content.splitlines()[0] if content.count(b'{"') > 1 else content), dict)
    except (ValueError, IndexError):
        return False


def _json_value(path: Path, content: bytes, other: bytes, choice: random.Random) -> str | None:
    """Put an odd value, a key twice or no key in some place of a JSON text, or of one of its lines."""
    try:
        lines: list[Any] = [json.loads(content)]
    except ValueError:
        lines = [json.loads(line) for line in content.splitlines()]
    places: list[tuple[Any, Any]] = [(lines, index) for index in range(len(lines))]
    for holder, key in places:
        inner = holder[key]
        places += (
            [(inner, name) for name in (inner if isinstance(inner, dict) else range(len(inner)))]
            if isinstance(inner, (dict, list))
            else []
        )
    holder, key = choice.choice(places)
    how, odd = choice.choice(("value", "value", "value", "no key", "other key")), choice.choice(_ODD)
    if how != "value" and isinstance(holder, dict):
        value = holder.pop(key)
        if how == "other key":
            holder[json.loads(choice.choice(('"x"', '"../x"', '"\\ud800"', '"\\u0000"', '""', '"a b"')))] = value
    else:
        holder[key] = "@@@"
    path.write_text("\n".join(json.dumps(line).replace('"@@@"', odd) for line in lines))
    return f"{how} {odd[:20]} at {str(key)[:40]!r}"


def _member(path: Path, content: bytes, other: bytes, choice: random.Random) -> str | None:
    """Damage a member of an archive whose checksums are right afterwards."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: bytearray(archive.read(name)) for name in archive.namelist()}
    name = choice.choice([name for name in members if members[name]])
    for _ in range(choice.choice((1, 1, 2, 8))):
        members[name][choice.randrange(len(members[name]))] = choice.randrange(256)
    if choice.random() < 0.2:
        del members[name][choice.randrange(len(members[name])) :]
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, bytes(data))
    return f"member {name}"


def _object(path: Path, content: bytes, other: bytes, choice: random.Random) -> str | None:
    """Write another object, or the same with another value in some place of it."""
    try:
        found = torch.load(io.BytesIO(content), weights_only=False)
    except Exception:
        return None
    whole = [found]
    places: list[tuple[Any, Any]] = [(whole, 0)]
    for holder, key in places:
        inner = holder[key]
        if isinstance(inner, (dict, list)):
            places += [(inner, name) for name in (list(inner) if isinstance(inner, dict) else range(len(inner)))]
    holder, key = choice.choice(places)
    how = choice.choice(("value", "value", "no key", "circle"))
    if how == "no key" and isinstance(holder, dict):
        del holder[key]
    elif how == "circle" and isinstance(holder[key], (dict, list)):
        holder[key] = whole
    else:
        holder[key] = choice.choice(_ODD_VALUES)
    torch.save(whole[0], path)
    return f"object: {how} {str(holder[key])[:20] if how != 'no key' else ''} at {str(key)[:40]!r}"


def damaged_files(folder: Path, every: int) -> Tally:
    """Damage files, each in a copy of its folder.

    Args:
        folder: an empty one.
        every: of the cases one is tried.
    """
    torch.set_num_threads(1)
    tally = Tally("damaged file")
    templates: list[tuple[str, Path, list[Path]]] = []
    for name, subject in SUBJECTS.items():
        place = folder / name.replace(" ", "-")
        place.mkdir(parents=True)
        ask(partial(subject.make, place))[0].get()
        templates.append((name, place, sorted(path for path in place.glob(subject.files) if path.is_file())))
    for number in range(_DAMAGED // every):
        choice = random.Random(number)
        name, template, files = templates[number % len(templates)]
        case = folder / "case"
        shutil.copytree(template, case)
        path = choice.choice(files)
        how = damage(case / path.relative_to(template), choice.choice(files).read_bytes(), choice)
        (wrong,) = read_each(SUBJECTS[name].read, [case])
        tally.count(f"{number}: {name}, {path.name}, {how}", wrong)
        shutil.rmtree(case)
    return tally


# ---------------------------------------------------------------- attacks: pickles by hand

CANARY: Final = "gadget_canary"
DANGEROUS: Final = (
    *(("builtins", name) for name in ("eval", "exec", "getattr", "setattr", "__import__", "open", "type", "object")),
    *(("os", name) for name in ("system", "mkdir", "execv")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("os", "torch", "field", "dataclass", "Enum", "Any")),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch._utils", "importlib.import_module"),
    ("collections", "namedtuple"),
    ("codecs", "open"),
    ("numpy", "load"),
    ("numpy", "memmap"),
    ("torch", "load"),
    ("torch.hub", "load"),
    ("functools", "partial"),
    ("operator", "attrgetter"),
    ("copyreg", "_reconstructor"),
    (CANARY, "run"),
)
_CHANGES_PER_OPCODE: Final = 3


def _text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def _named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _whole(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def _dict(*parts: bytes) -> bytes:
    return b"}(" + b"".join(parts) + b"u"


_CODE: Final = "__import__('os').mkdir('gadget')"
_BYTES: Final = _named("_codecs", "encode") + _tuple(_text("\x01" * 16), _text("latin1")) + b"R"
_STORAGE: Final = _tuple(_text("storage"), _named("torch", "LongStorage"), _text("0"), _text("cpu"), b"K\x08") + b"Q"
_TENSOR: Final = (
    _named("torch._utils", "_rebuild_tensor_v2")
    + _tuple(_STORAGE, b"K\x00", b"K\x08\x85", b"K\x01\x85", b"\x89", _named("collections", "OrderedDict") + b")R")
    + b"R"
)
_OBJECTS: Final = _named("numpy", "dtype") + _tuple(_text("O8"), b"\x89", b"\x88") + b"R"
_ARRAY: Final = (
    _named("numpy._core.multiarray", "_reconstruct") + _tuple(_named("numpy", "ndarray"), b"K\x00\x85", _BYTES) + b"R"
)


def _arguments(name: bytes) -> Iterator[bytes]:
    """Tuples of arguments."""
    yield b")"
    parts = [b"N", b"K\x03", _whole(10**11), _whole(-1), b"G?\xf0\x00\x00\x00\x00\x00\x00", _text(_CODE), _BYTES]
    parts += [b"]", b"}", b"]K\x01a", _tuple(_whole(10**6), _whole(10**6)), name, _TENSOR, _OBJECTS, _ARRAY, _STORAGE]
    for part in parts:
        yield part + b"\x85"
    yield _tuple(_text(_CODE), _text("unicode_escape"))
    yield _tuple(_text("O8"), b"\x89", b"\x88")
    yield _tuple(_text("V16"), b"\x89", b"\x88")
    yield _tuple(_OBJECTS, _BYTES)
    yield _tuple(_named("numpy", "dtype") + _tuple(_text("f8"), b"\x89", b"\x88") + b"R", _BYTES)
    yield _tuple(name, b"K\x00\x85", _BYTES)
    yield _tuple(_STORAGE, b"K\x00", _tuple(_whole(10**9)), b"K\x01\x85", b"\x89", b"N")
    yield _tuple(_STORAGE, _whole(10**6), b"K\x08\x85", b"K\x01\x85", b"\x89", b"N")
    yield _tuple(_STORAGE, b"K\x00", b"K\x08\x85", _whole(-8) + b"\x85", b"\x89", b"N")
    yield _tuple(_TENSOR, b"\x88", b"N")
    yield _tuple(_TENSOR, b"\x88", b"N", _dict(_text("__class__"), name))
    yield _tuple(name, name, b")", _dict(_text("data"), _TENSOR))
    yield _tuple(_named("torch._utils", "_rebuild_tensor_v2"), name, b")", b"}")
    yield _tuple(name, _named("torch", "float32"), b"K\x08\x85", b"K\x01\x85", b"K\x00", b"N", b"N", b"\x89")
    yield _tuple(_TENSOR, _TENSOR, _TENSOR, _TENSOR)
    yield _tuple(_named("torch", "float32"), _tuple(_whole(10**11)), b"K\x01\x85", b"\x89")


def _states(name: bytes) -> Iterator[bytes]:
    """What an object may be given as its state."""
    yield from (b"}", b")", b"N", _text("a"), b"K\x01")
    code = _dict(_text("__annotations__"), _dict(_text(f"a:{_CODE}"), _text("int")))
    yield code
    yield b"N" + code + b"\x86"
    yield _dict(_text("__class__"), name)
    yield b"N" + _dict(_text("__setstate__"), name, _text("__reduce__"), name) + b"\x86"
    yield _dict(_text("relative_path"), _text("../../etc/passwd"), _text("offset"), b"K\x00", _text("length"), b"K\x01")
    yield _tuple(b"K\x03", _text("|"), b"N", b"N", b"N", _whole(10**6), b"K\x01", b"K\x3f")
    yield _tuple(b"K\x01", _tuple(_whole(10**6)), _OBJECTS, b"\x89", _BYTES)
    yield _tuple(
        b"K\x01", b"K\x02\x85", _named("numpy", "dtype") + _tuple(_text("O"), b"\x89", b"\x88") + b"R", b"\x89", b"]"
    )
    yield _tuple(_STORAGE, _whole(10**6), _tuple(_whole(10**6)), b"K\x01\x85")
    yield _tuple(_BYTES, _whole(2**62), b"N")


def code_in_a_field(code: str) -> bytes:
    """A description of tensors whose class gets a field with code for its name, which `dataclasses` runs."""
    metadata, name = "torch.distributed.checkpoint.metadata", _text(f"a:{code}")
    hidden = _dict(_text("init"), b"\x89", _text("repr"), b"\x89", _text("compare"), b"\x89")
    field = _named(metadata, "field") + b")RN" + hidden + b"\x86b"
    changed = _dict(_text("__annotations__"), _dict(name, _text("int")), name, field)
    described = _named(metadata, "BytesStorageMetadata") + b"N" + changed + b"\x86b"
    return b"\x80\x04" + _named(metadata, "dataclass") + described + b"\x85R."


def _of_names(names: list[tuple[str, str]]) -> Iterator[bytes]:
    """Each name, used in every way."""
    for module, called in names:
        name = _named(module, called)
        yield name
        yield name + b"\x85"
        yield _dict(name, b"N")
        yield _text(module) + _text(called) + b"\x93"
        yield _text(module.rpartition(".")[0] or module) + _text(f"{module.rpartition('.')[2]}.{called}") + b"\x93)R"
        yield b"(i" + f"{module}\n{called}\n".encode()
        yield b"(" + name + b"o"
        yield name + b"q\x01" + b"h\x01\x85R"
        yield name + b")}\x92"
        yield name + b")Rq\x01" + b"h\x01h\x01\x85R"
        yield name + b")R(h\x00e"
        for put in (b"a", b"(N", b"s"):
            yield name + b")R" + {b"a": b"Na", b"(N": b"(NNu", b"s": b"NNs"}[put]
        for arguments in _arguments(name):
            yield name + arguments + b"R"
            yield name + arguments + b"\x81"
            yield name + arguments + b"R}b"
        for state in _states(name):
            yield name + state + b"b"
            yield name + b")R" + state + b"b"
            yield name + b")\x81" + state + b"b"
            yield name + b")\x81" + state + b"b" + state + b"b"


def _of_opcodes() -> Iterator[bytes]:
    """Opcodes that reach outside, memos with holes, numbers that promise too much."""
    yield from (
        b"\x82\x01",
        b"\x83\x01\x00",
        b"\x84\x01\x00\x00\x00",
        b"Pos\n",
        b"K\x01Q",
        _text("x") + b"Q",
        b"\x97\x98",
    )
    yield from (
        b"Nr\xff\xff\xff\x7f",
        b"Nr\xff\xff\xff\xff",
        b"p2000000000\n",
        b"h\x07",
        b"j\xff\xff\xff\xff",
        b"0",
        b"2",
        b"1",
    )
    yield from (b"\x95" + b"\xff" * 7 + b"\x0fN", b"\x8e" + (10**10).to_bytes(8, "little"))
    yield from (b"\x96" + (10**10).to_bytes(8, "little"), b"\x8d" + (10**10).to_bytes(8, "little"))
    yield from (
        b"B\xff\xff\xff\x7f",
        b"X\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
        b"T\xff\xff\xff\x7f",
        b"L" + b"9" * 5000 + b"L\n",
    )
    yield b"]q\x01h\x01a"
    yield b"}q\x01(Nh\x01u"
    yield b"]q\x01" + b"h\x01\x85q\x01" * 300
    yield b")q\x01" + b"h\x01h\x01\x86q\x01" * 80
    yield b"}(" + b")q\x01" + b"h\x01h\x01\x86q\x01" * 80 + b"Nu"
    yield b"]" * 5000 + b"a" * 4999
    yield b"(" * 5000
    yield b"NN"
    yield b"t"
    data = b"\x80\x02" + _named("os", "system") + b"(" + _text("true") + b"tR."
    yield b"N." + data
    yield from (
        b"\x80\x04" + _named("__builtin__", "eval"),
        b"\x80\x07N",
        b"\x80\x00" + _named("__builtin__", "bytes") + b")R",
    )


# ---------------------------------------------------------------- attacks: real pickles, changed


def _changed(real: bytes, names: list[tuple[str, str]], draw: random.Random) -> Iterator[bytes]:
    """The opcodes of a pickle with one of them changed, without those that begin and end it."""
    parts = []
    steps = list(pickletools.genops(real))
    for (opcode, argument, at), after in zip(steps, [*steps[1:], (None, None, len(real))], strict=True):
        if opcode.name not in ("FRAME", "PROTO", "STOP"):
            parts.append((opcode.name, argument, real[at : after[2]]))
    for index, (name, _, part) in enumerate(parts):
        before = b"".join(one for _, _, one in parts[:index])
        behind = b"".join(one for _, _, one in parts[index + 1 :])
        others = [b"", part + part, bytes([draw.randrange(256)]) + part[1:], draw.choice(parts)[2]]
        if name in ("GLOBAL", "STACK_GLOBAL"):
            others += [b"0" * 2 * (name != "GLOBAL") + _named(*draw.choice(names)) for _ in range(4)]
        if name.startswith(("BININT", "LONG")):
            others += [_whole(value) for value in (-1, 2**31, 10**11, 2**62)]
        if "UNICODE" in name:
            others += [_text(value) for value in ("", "__class__", "O8", "../x", "torch.sparse_csr")]
        draw.shuffle(others)
        for other in others[:_CHANGES_PER_OPCODE]:
            yield before + other + behind


def _real_data() -> list[Any]:
    """What checkpoints hold: states of optimizers and generators, arrays, tensors of unusual kinds."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [
        optimizer.state_dict(),
        model.state_dict(),
        {"numpy": ("MT19937", numpy.arange(3)), "scalar": numpy.float64(2)},
        [torch.nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.Size([2])],
        [Counter("ab"), OrderedDict(a=1), {1}, bytearray(b"ab"), io.BytesIO(b"ab"), 1j, b"ab", torch.device("cpu")],
        [torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)],
    ]


class _Format(NamedTuple):
    """A kind of file, and how it is read.

    Attributes:
        real: files as they are written, each as what stands before a pickle, the pickle, and what stands behind it.
        put: a file with another pickle.
        read: reads it.
        protocol: of its pickles.
    """

    real: Callable[[], list[tuple[Any, bytes, Any]]]
    put: Callable[[Any, bytes, Any], bytes]
    read: Callable[[Path], Any]
    protocol: bytes
    name: str


def _archives() -> list[tuple[Any, bytes, Any]]:
    found = []
    for data in _real_data():
        buffer = io.BytesIO()
        torch.save(data, buffer)
        with zipfile.ZipFile(buffer) as opened:
            members = {name: opened.read(name) for name in opened.namelist()}
        found.append((members, members["archive/data.pkl"], None))
    return found


def _archive(members: dict[str, bytes], text: bytes, _: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {**members, "archive/data.pkl": text}.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _sequences() -> list[tuple[Any, bytes, Any]]:
    """Files of torch before 1.6: the fourth of five pickles holds the data."""
    found = []
    for data in _real_data():
        buffer = io.BytesIO()
        torch.save(data, buffer, _use_new_zipfile_serialization=False)
        whole, ends = buffer.getvalue(), [0]
        buffer.seek(0)
        for _ in range(4):
            for _ in pickletools.genops(buffer):
                pass
            ends.append(buffer.tell())
        found.append((whole[: ends[3]], whole[ends[3] : ends[4]], whole[ends[4] :]))
    return found


def _descriptions() -> list[tuple[Any, bytes, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        state = {"weight": torch.ones(4, 2), "of": {"a": [1, {"b": torch.ones(3)}]}}
        save_shards(state, checkpoint_id=folder, no_dist=True)
        return [(b"", Path(folder, ".metadata").read_bytes(), b"")]


def _joined(before: bytes, text: bytes, behind: bytes) -> bytes:
    return before + text + behind


READERS: Final[dict[str, _Format]] = {
    "torch": _Format(_archives, _archive, pickled.read, b"\x80\x02", "state.bin"),
    "old torch": _Format(_sequences, _joined, pickled.read, b"\x80\x02", "state.bin"),
    "metadata": _Format(_descriptions, _joined, shard_metadata.read_metadata, b"\x80\x04", ".metadata"),
}


def _names_of_torch() -> dict[tuple[str, str], Any]:
    """What `torch.load(weights_only=True)` admits by itself, and what this library lets it admit."""
    with torch.serialization.safe_globals(NUMPY_GLOBALS):
        own = torch._weights_only_unpickler._get_allowed_globals()
        added = torch._weights_only_unpickler._get_user_allowed_globals()  # type: ignore[no-untyped-call]
    full = {**own, **added}
    return {(name.rpartition(".")[0], name.rpartition(".")[2]): value for name, value in full.items()}


def gadgets(reader: str) -> list[bytes]:
    """The files for a reader; those that it reads, as they are written, come first."""
    form = READERS[reader]
    table = shard_metadata.names_in_metadata() if reader == "metadata" else _names_of_torch()
    constants = [name for name, value in table.items() if isinstance(value, torch.dtype)][:3]
    callable_names = [name for name, value in table.items() if not isinstance(value, torch.dtype)]
    names = callable_names + constants + list(DANGEROUS)
    draw = random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = form.real()
    before, _, behind = real[0]
    by_hand = [form.put(before, form.protocol + text + b".", behind) for text in (*_of_opcodes(), *_of_names(names))]
    changed = [
        form.put(before, form.protocol + text + b".", behind)
        for before, whole, behind in real
        for text in _changed(whole, names, draw)
    ]
    known = [code_in_a_field(_CODE)] if reader == "metadata" else []
    return [*(form.put(*parts) for parts in real), *changed, *known, *by_hand]


# ---------------------------------------------------------------- attacks: what is run

_RUNS: Final = ("exec", "compile", "os.", "subprocess.", "shutil.", "socket.", "ctypes.", "pty.", "marshal.", "code.")
_HARMLESS: Final = ("os.listdir", "os.scandir", "os.fspath")


class Watched:
    """Reads gadgets, and raises when something was run while one was read; `hook` is an audit hook of the child.

    Args:
        form: how they are read.
        folder: for their files.
    """

    def __init__(self, form: _Format, folder: Path) -> None:
        self._form, self._file = form, folder / form.name
        self._on, self._seen = False, list[str]()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Notes what is run."""
        if not self._on:
            return
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        runs = event.startswith(_RUNS) and event not in _HARMLESS
        if writes or runs or (event == "import" and arguments[0] == CANARY):
            self._seen.append(f"{event} {arguments!r}"[:200])

    def read(self, gadget: bytes) -> None:
        """Read one gadget.

        Raises:
            RuntimeError: something was run, or the reader raised anything but a CheckpointError.
        """
        self._file.write_bytes(gadget)
        self._seen.clear()
        found, failed, self._on = None, list[str](), True
        try:
            found = self._form.read(self._file)
        except CheckpointError:
            pass
        except BaseException as error:
            failed = [f"{type(error).__name__}: {error}"]
        finally:
            self._on = False
        with contextlib.suppress(Exception):  # memory that is not its own ends the process
            torch.save(found, io.BytesIO())
        if failed or self._seen:
            raise RuntimeError("; ".join([*failed, *self._seen]))


def attacks(folder: Path, every: int, reader: str) -> Tally:
    """Read the gadgets of a reader, each `every`-th of them."""
    tally, form, files = Tally("gadget"), READERS[reader], gadgets(reader)
    # They are imported late: by torch for tensors of some other kinds, by pickle for its oldest kind of text.
    late = ("torch.nested._internal.ops", "torch._subclasses.schema_check_mode", "encodings.unicode_escape")
    for module in (*late, "encodings.raw_unicode_escape"):
        importlib.import_module(module)
    for file in files[: len(form.real())]:  # also imports what is imported when it is first used
        (folder / form.name).write_bytes(file)
        form.read(folder / form.name)
    watched = Watched(form, folder)
    for number, wrong in enumerate(read_each(watched.read, files[::every], watched.hook)):
        tally.count(f"{reader} gadget {number * every}", wrong)
    return tally
