"""Damages every kind of file that we read, and reads it as a user would; see `tools/reliability.py`.

    python tools/reliability_damaged_files.py [COUNT]     "damaged files: 3000; untyped 0"

Each case is a forked child with a bound on its memory and its time. It ends with the data or with a typed error: any
other exception, a crash or a hang is a loss. So is a checkpoint with a manifest that is loaded although it is damaged,
and a damaged one in front of which an older good one is not taken.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests-integration"))

import torch
import yaml
from faults import sweeps
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
from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.shards import PortableWriter
from accel_plugins.deepspeed.config import HfDeepSpeedConfig
from accel_plugins.fsdp.weights import merge_weights
from accel_state.errors import AccelError
from accel_testing.fresh import fresh
from accel_torch import Accelerator, ProjectConfiguration
from accel_tracking.trackers.jsonl import FORMAT, read_run

__all__ = ("COUNT", "sweep")

COUNT: Final = 3000
_MEMORY: Final = 2 * 2**30
_SECONDS: Final = 60
_ODD: Final = (
    "null", "true", "-1", "0", "1e9999", "-1e9999", "NaN", "9" * 25, "9" * 5000, '"x"', '"\\ud800"', '"\\u0000"', "[]",
    "{}", "[" * 5000, '{"a":' * 3000, '"../../../../../../dev/zero"', '"/dev/zero"', '"a\\nb\\u001b[2J"', "1.5", "[[]]",
)  # fmt: skip
_ODD_VALUES: Final[tuple[Any, ...]] = (
    None, True, -1, 10**30, 1e308, float("nan"), "", "x", b"x", [], {}, (), [None], {"a": 1}, {1: 2}, torch.zeros(0),
    torch.zeros(3, 3), torch.tensor(7), torch.zeros(2, dtype=torch.complex64), torch.arange(4), slice(1),
)  # fmt: skip


class Counter:
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
    accelerator.register_for_checkpointing(Counter())
    for batch in loader if train else ():
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        break
    return accelerator


def _make_project(folder: Path) -> None:
    with fresh():
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


def outcome(read: Callable[[Path], object], folder: Path) -> str | None:
    """What is wrong with how a child ends that reads a folder; None when it has the data or a typed error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_a_child(read, folder, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return f"it hung for {_SECONDS} s"
    return said or (f"it ended with {status}" if status else None)


def _be_a_child(read: Callable[[Path], object], folder: Path, writing: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_SECONDS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        read(folder)
    except AccelError:
        pass
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in last if "accel" in Path(frame.filename).parts[-2]] or last
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(ours[-4:]))
        os.write(writing, f"{type(error).__name__}: {str(error)[:200]!r} at {where}".encode(errors="replace"))
    finally:
        os._exit(0)


def sweep(folder: Path, count: int = COUNT, only: str = "") -> sweeps.Tally:
    """Damage so many files, each in a copy of its folder.

    Args:
        folder: an empty one.
        count: how many.
        only: the kinds of files whose names contain this.
    """
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    tally = sweeps.Tally("damaged file")
    templates: dict[str, tuple[Path, list[Path]]] = {}
    for name, subject in SUBJECTS.items():
        if only in name:
            place = folder / name.replace(" ", "-")
            place.mkdir(parents=True)
            subject.make(place)
            templates[name] = place, sorted(path for path in place.glob(subject.files) if path.is_file())
    try:
        for number in range(count):
            choice = random.Random(number)
            name = list(templates)[number % len(templates)]
            template, files = templates[name]
            case = folder / "case"
            shutil.copytree(template, case)
            path = choice.choice(files)
            how = damage(case / path.relative_to(template), choice.choice(files).read_bytes(), choice)
            tally.count(f"{number}: {name}, {path.name}, {how}", outcome(SUBJECTS[name].read, case))
            shutil.rmtree(case)
    finally:
        logging.disable(logging.NOTSET)
    return tally


def main() -> int:
    """Run the whole sweep and print what was found."""
    count, only = int(sys.argv[1]) if sys.argv[1:] else COUNT, sys.argv[2] if sys.argv[2:] else ""
    with tempfile.TemporaryDirectory(prefix="damaged-") as folder:
        tally = sweep(Path(folder), count, only)
    by_place: dict[str, list[str]] = defaultdict(list)
    for loss in tally.lost:
        by_place[loss.rpartition(" at ")[2]].append(loss)
    for losses in sorted(by_place.values(), key=len):
        print(f"{len(losses)} like {losses[0]}")
    print(f"damaged files: {tally.injected}; untyped {len(tally.lost)}")
    return int(bool(tally.lost))


if __name__ == "__main__":
    sys.exit(main())
