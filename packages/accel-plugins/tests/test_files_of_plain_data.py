"""What `torch.save` wrote is read where it is plain data, and refused where it asks for more."""

from __future__ import annotations

import collections
import io
import pickle
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from accel_bigmodel.weight_files import load_weights_file
from accel_plugins.checkpoint import pickled
from accel_state.errors import CheckpointError
from accel_testing.processes import run_command

PLAIN: dict[str, Any] = {
    "numbers": [1, -5, 2**70, 1.5, 1j, None, True],
    "texts": ["é", b"abc", b"", bytearray(b"abc"), bytearray(), io.BytesIO(b"bytes").getvalue()],
    "containers": [(1, (2,)), {1, 2}, {"a": {"b": []}}, collections.OrderedDict(a=1), collections.Counter("abca")],
    "descriptions": [torch.Size([3]), torch.float8_e4m3fn, torch.device("cuda", 1), torch.strided],
    "state of python": random.Random(3).getstate(),
    "state of numpy": numpy.random.RandomState(3).get_state(),
    "scalars": [numpy.float32(1.5), numpy.bool_(True), numpy.int64(3), numpy.complex64(1j)],
    "arrays": [numpy.ones((2, 3), ">i4"), numpy.asfortranarray(numpy.ones((2, 3))), numpy.zeros(0), numpy.array(3)],
}

TENSORS: dict[str, Any] = {
    "a view": torch.arange(6).view(2, 3).T[1:],
    "expanded": torch.ones(1).expand(100, 100),
    "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "of bytes": torch.ones(3, dtype=torch.uint16),
    "without elements": torch.ones(0, 4),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("zipped", [True, False])
def test_plain_data_are_read(tmp_path: Path, name: str, zipped: bool) -> None:
    torch.save(PLAIN[name], tmp_path / "a", _use_new_zipfile_serialization=zipped)
    found = pickled.read(tmp_path / "a")
    with numpy.printoptions(threshold=1000):
        assert repr(found) == repr(pickle.loads(pickle.dumps(PLAIN[name])))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_are_read(tmp_path: Path, name: str) -> None:
    torch.save([TENSORS[name]], tmp_path / "a")
    (found,) = pickled.read(tmp_path / "a")
    assert type(found) is type(TENSORS[name])
    assert torch.equal(found.to_dense(), TENSORS[name].to_dense())


EMPTY_CORE = """
import pathlib, types, numpy, torch
numpy._core = types.ModuleType("numpy._core")
from accel_plugins.checkpoint import pickled
import accel_plugins.fsdp.fsdp1, accel_plugins.fsdp.fsdp2
torch.save([numpy.ones(2), numpy.float32(1.5)], "a")
print(pickled.read(pathlib.Path("a"))[0].tolist())
"""


def test_private_modules_of_numpy_are_not_needed(tmp_path: Path) -> None:
    # numpy 1.26.1 to 1.26.4 have the package `numpy._core`, without attributes.
    done = run_command([sys.executable, "-c", EMPTY_CORE], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[1.0, 1.0]\n"), done.stderr


SCALAR: Any = numpy.float64(1).__reduce__()[0]  # type: ignore[call-arg, unused-ignore]


class Calls:
    """Is read by a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Gives:
    """Is read by a call whose result is given a state."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], state: Any) -> None:
        self.call = function, arguments, state

    def __reduce__(self) -> Any:
        return self.call


def objects_by_address() -> Any:
    """numpy takes eight bytes for the address of an object."""
    dtype = Gives(numpy.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 63))
    return Calls(SCALAR, dtype, b"\x01" * 8)


def disguised_objects() -> Any:
    """A dtype of numbers whose state makes it one with fields of objects."""
    state = (3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 27)
    dtype = Gives(numpy.dtype, ("V8", False, True), state)
    return Calls(SCALAR, dtype, b"\x01" * 8)


def counted_references() -> Any:
    """A dtype of numbers whose flags make numpy count references at the addresses in the array."""
    state = (3, "<", None, None, None, -1, -1, 27)
    dtype = Gives(numpy.dtype, ("u8", False, True), state)
    return Calls(SCALAR, dtype, b"\x01" * 8)


def array_of_objects() -> Any:
    array = numpy.zeros(1, "u8")
    function, arguments, (version, shape, _, order, data) = array.__reduce__()  # type: ignore[misc]
    return Gives(function, arguments, (version, shape, numpy.dtype("O"), order, data))


REFUSED: dict[str, Callable[[], Any]] = {
    "objects by address": objects_by_address,
    "disguised objects": disguised_objects,
    "counted references": counted_references,
    "an array of objects": array_of_objects,
    "objects": lambda: numpy.array([{}], object),
    "records": lambda: numpy.zeros(2, "i4,f8"),
    "a short scalar": lambda: Calls(SCALAR, numpy.dtype("u8"), b"\x01"),
    "code": lambda: Calls(eval, "1"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("zipped", [True, False])
def test_what_asks_for_more_is_refused(tmp_path: Path, name: str, zipped: bool) -> None:
    torch.save({"a": REFUSED[name]()}, tmp_path / "a", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="damaged"):
        pickled.read(tmp_path / "a")
    with pytest.raises(CheckpointError):
        load_weights_file(tmp_path / "a")


def test_arrays_are_found_in_all_containers_and_shared_ones_once(tmp_path: Path) -> None:
    array = numpy.arange(3)
    shared = [array, {"b": (1, (array,))}]
    content = {"a": shared, "again": shared, "ordered": collections.OrderedDict(c=array)}
    torch.save(content, tmp_path / "a")
    found = pickled.read(tmp_path / "a")
    assert found["a"] is found["again"]
    arrays = [found["a"][0], found["a"][1]["b"][1][0], found["ordered"]["c"]]
    assert all(type(one) is numpy.ndarray for one in arrays)
    assert [one.tolist() for one in arrays] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_stay_when_their_file_is_written_again(tmp_path: Path, zipped: bool) -> None:
    torch.save({"a": torch.arange(100_000)}, tmp_path / "a", _use_new_zipfile_serialization=zipped)
    found = pickled.read(tmp_path / "a")["a"]
    (tmp_path / "a").write_bytes(b"")
    assert found.sum().item() == sum(range(100_000))


def changed(path: Path, change: Callable[[bytes], bytes], **options: Any) -> None:
    """Write an archive anew with another pickle."""
    members = zipfile.ZipFile(path)
    held = {one.filename: members.read(one) for one in members.infolist()}
    members.close()
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in held.items():
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)


LENGTH = b"K\x64"  # as pickled: 100
LARGE = b"J\xff\xff\xff\x7f"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LENGTH + b"\x85", LARGE + b"\x85"),
        (b"K\x00" + LENGTH, b"K\x01" + LENGTH),
        (b"K\x01\x85", b"K\x02\x85"),
    ],
    ids=["a larger size", "a later begin", "a wider stride"],
)
def test_tensors_beyond_their_bytes_are_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    torch.save({"a": torch.arange(100)}, tmp_path / "a")
    changed(tmp_path / "a", lambda text: text)
    assert len(pickled.read(tmp_path / "a")["a"]) == 100
    changed(tmp_path / "a", lambda text: text.replace(old, new))
    with pytest.raises(CheckpointError, match="damaged"):
        pickled.read(tmp_path / "a")


def test_a_device_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        pickled.read(tmp_path / "a")


def test_classes_that_the_program_told_torch_to_trust_are_read(tmp_path: Path) -> None:
    torch.save({"a": Told(3)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="Told"):
        pickled.read(tmp_path / "a")
    with torch.serialization.safe_globals([Told]):
        assert pickled.read(tmp_path / "a")["a"].value == 3


class Told:
    """A class of a program."""

    def __init__(self, value: int) -> None:
        self.value = value
