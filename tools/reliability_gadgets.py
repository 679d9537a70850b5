"""Pickles that try to make a reader of checkpoints run code, crash, or take memory, made of the names that it admits.

Every admitted name is called, made, given a state and used as data with arguments of many kinds, by every opcode that
can do so; names of dangerous functions join them. Real pickles are changed one opcode at a time as well: another
admitted name, another number, an opcode left out or repeated. Each pickle is read in a child process whose memory is
limited; an alarm ends it when it hangs, and an audit hook reports what is run. All is well when the file is read, or
refused with a CheckpointError, also for want of memory.

    python tools/reliability_gadgets.py READER FIRST STEP     what a child does: read pickles and report on each
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickletools
import random
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests-integration"))

import numpy
import torch
from faults.sweeps import Tally
from torch.distributed.checkpoint.state_dict_saver import save

from accel_plugins.checkpoint import pickled, shard_metadata
from accel_plugins.checkpoint.pickled import NUMPY_GLOBALS
from accel_state.errors import CheckpointError

__all__ = ("READERS", "AuditHook", "code_in_a_field", "gadgets", "outcome", "sweep")

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
_SECONDS: Final = 60
_ROOM: Final = 1 << 30
"""Bytes that a child may take besides what it has when it begins."""


# --------------------------------------------------------------------------- pickles by hand


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


# --------------------------------------------------------------------------- real pickles, changed


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
    model(torch.ones(1, 2)).sum().backward()
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
        save(state, checkpoint_id=folder, no_dist=True)
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


# --------------------------------------------------------------------------- children

_RUNS: Final = ("exec", "compile", "os.", "subprocess.", "shutil.", "socket.", "ctypes.", "pty.", "marshal.", "code.")
_HARMLESS: Final = ("os.listdir", "os.scandir", "os.fspath")


class AuditHook:
    """Notes what is run while a gadget is read."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if (
            writes
            or (event.startswith(_RUNS) and event not in _HARMLESS)
            or (event == "import" and arguments[0] == CANARY)
        ):
            self.seen.append(f"{event} {arguments!r}"[:200])


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def outcome(form: _Format, gadget: bytes, folder: Path, hook: AuditHook) -> str:
    """What is wrong after a gadget; empty when all is well."""
    (folder / form.name).write_bytes(gadget)
    hook.seen.clear()
    hook.on = True
    wrong, found = "", None
    try:
        found = form.read(folder / form.name)
    except CheckpointError:
        pass
    except BaseException as error:
        wrong = f"{type(error).__name__}: {error}"
    finally:
        hook.on = False
    with contextlib.suppress(Exception):  # memory that is not its own ends the process
        torch.save(found, io.BytesIO())
    return "; ".join([wrong] * bool(wrong) + hook.seen).replace("\n", " ")


def _child(reader: str, first: int, step: int) -> None:
    form = READERS[reader]
    every = gadgets(reader)
    hook = AuditHook()
    sys.addaudithook(hook)
    warnings.simplefilter("ignore")
    # They are imported late: by torch for tensors of some other kinds, by pickle for its oldest kind of text.
    late = ("torch.nested._internal.ops", "torch._subclasses.schema_check_mode", "encodings.raw_unicode_escape")
    for module in late:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as place:
        for gadget in every[: len(form.real())]:  # also imports what is imported when it is first used
            (Path(place) / form.name).write_bytes(gadget)
            form.read(Path(place) / form.name)
        limit = _memory("VmSize") + _ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for index in range(first, len(every), step):
            signal.alarm(_SECONDS)  # what hangs ends the process
            print(index, end=" ", flush=True)
            print(outcome(form, every[index], Path(place), hook), flush=True)
    print("end", flush=True)


def sweep(reader: str, every: int = 1) -> Tally:
    """Read the gadgets of a reader, each `every`-th of them; a child that crashes is followed by another."""
    tally = Tally("gadget")
    first = 0
    while True:
        command = [sys.executable, __file__, reader, str(first), str(every)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        *lines, last = done.stdout.splitlines() or [""]
        for line in lines:
            number, _, wrong = line.partition(" ")
            tally.count(f"{reader} gadget {number}", wrong.strip() or None)
        if last == "end":
            return tally
        number = last.partition(" ")[0]
        tally.count(f"{reader} gadget {number}", f"ended the process ({done.returncode}) {done.stderr[-300:]}")
        if not number.isdigit():
            return tally
        first = int(number) + every


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
