"""Reads weights from one file, a folder, or an index; the content of a file can never run code.

safetensors and torch check a file when they open it, and map it: a weight takes memory only where its values are read.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_bigmodel.weight_files.names import (
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    index_name,
    is_safetensors,
    read_index,
)
from accel_state.devices.select import family_of
from accel_state.errors import CheckpointError, CheckpointNameError, SettingError
from accel_state.settings.installed import Requirement
from accel_state.untrusted import open_regular, printable

__all__ = (
    "Copy",
    "StoredWeight",
    "TensorRecord",
    "WeightFile",
    "WeightSource",
    "copy_all",
    "find_weights",
    "forget_pages",
    "load_torch_file",
    "load_weights",
    "load_weights_file",
    "local_checkpoint",
    "open_weights",
    "record_of_tensor",
)

_PIECE: Final = 16 << 20
"""Bytes of a weight that are copied at once; only that much of it is in memory twice."""
_THREADS: Final = min(8, max(4, os.cpu_count() or 1))
"""One thread leaves a disk idle between two reads; more than 8 save no time."""
_HUB: Final = Requirement("huggingface_hub", distribution="huggingface-hub")
_IDENTIFIER: Final = re.compile(r"[\w.-]+/[\w.-]+")


def local_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """Return an existing path unchanged; else the snapshot of "org/name", downloaded if it is not in the cache.

    If a repository has both formats, only the safetensors files are fetched.

    Raises:
        SettingError: there is no such path, and it is not an identifier or cannot be fetched.
        Missing: the name is an identifier, and huggingface_hub is not installed.
    """
    path = Path(checkpoint)
    if path.exists():
        return path
    name = os.fspath(checkpoint)
    failure = f"Cannot load the checkpoint {name!r}."
    if not _IDENTIFIER.fullmatch(name):
        raise SettingError(failure, "There is no such file or folder.", "Check the spelling of the path.")
    _HUB.demand(f"{failure} No such path exists, and a repository on the Hub needs huggingface_hub.")
    import huggingface_hub

    download: Any = huggingface_hub.snapshot_download
    try:
        folder = Path(download(name, allow_patterns=["*.safetensors", "*.safetensors.index.json"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(download(name, allow_patterns=["*.bin", "*.bin.index.json"]))
    except Exception as error:
        raise SettingError(
            failure,
            f"It is not a local path, and the Hub reports: {type(error).__name__}: {error}",
            "Check the name and the network connection.",
        ) from error
    return folder


@dataclass(frozen=True)
class WeightSource:
    """One file of a checkpoint and the weights to read from it; None for all."""

    path: Path
    names: tuple[str, ...] | None = None

    def load(self, device: str | int | torch.device = "cpu") -> dict[str, Any]:
        """Load the weights by name, on `device`."""
        return load_weights_file(self.path, device, self.names)


def find_weights(path: str | os.PathLike[str]) -> tuple[WeightSource, ...]:
    """Find the files of the checkpoint at `path`.

    `path` may be a weight file, an index (`.json`), or a folder: there it is the last written one of
    `pytorch_model.bin`, `model.safetensors` and their indexes, or else a single `*.index.json`.

    Raises:
        CheckpointError: there is no such file or folder, or the index is damaged.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise CheckpointError(
            f"Cannot load weights from {str(path)!r}.",
            "There is no such file or folder.",
            "Check the spelling of the path.",
        )
    if path.suffix != ".json":
        return (WeightSource(path),)
    files = read_index(path).names_by_file()
    return tuple(WeightSource(path.parent / file, tuple(names)) for file, names in sorted(files.items()))


def _in_folder(folder: Path) -> Path:
    names = (WEIGHTS_NAME, SAFE_WEIGHTS_NAME)
    usual = [folder / name for name in (*names, *map(index_name, names))]
    if present := [path for path in usual if path.is_file()]:
        # A folder may hold what an earlier save wrote in the other format; of equal times, the first one counts.
        return max(present, key=lambda path: path.stat().st_mtime_ns)
    indexes = sorted(folder.glob("*.index.json"))
    if len(indexes) == 1:
        return indexes[0]
    listed = f"{len(indexes)} index files: {', '.join(index.name for index in indexes)}" if indexes else "no index file"
    raise CheckpointNameError(
        f"Cannot load weights from the folder {str(folder)!r}.",
        f"It contains neither {WEIGHTS_NAME} nor {SAFE_WEIGHTS_NAME}, and {listed}.",
        "Give the path of the weight file or of the index.",
    )


def load_weights(path: str | os.PathLike[str], device: str | int | torch.device = "cpu") -> dict[str, Any]:
    """Load all weights of the checkpoint at `path`, found as by `find_weights`, by name and on `device`.

    On a CPU the tensors are mapped from the file, so that they use memory only when they are read.

    Raises:
        CheckpointError: a file is missing, truncated, corrupted, or contains Python objects other than weights.
    """
    weights: dict[str, Any] = {}
    for source in find_weights(path):
        weights.update(source.load(device))
    return weights


def load_weights_file(
    path: str | os.PathLike[str], device: str | int | torch.device = "cpu", names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Load the weights of one file, or only the given ones.

    Raises:
        CheckpointError: as `load_weights`, or one of the given weights is not in the file.
    """
    values = _values_in(Path(path))
    wanted = tuple(values if names is None else names)
    _check_present(Path(path), wanted, values)
    return {name: values[name].to(device) if isinstance(values[name], Tensor) else values[name] for name in wanted}


class WeightFile:
    """A file of weights that was checked when it was opened.

    Args:
        path: the file.

    Attributes:
        is_mapped: whether its values take no memory until they are used.

    Raises:
        CheckpointError: the file is missing, truncated or corrupted, holds Python objects other than weights, or has a
            dtype that torch does not support.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = _values_in(path)
        self.is_mapped = is_safetensors(path) or _can_be_mapped(path)
        self.names = tuple(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy maps the file again, instead of copying what is mapped.
        return WeightFile, (self.path,)

    def get(self, name: str) -> Any:
        """The weight with a name, mapped from the file; or another object that `get_extra_state` returned.

        Raises:
            CheckpointError: the file does not contain it.
        """
        _check_present(self.path, [name], self._values)
        return self._values[name]


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is not read yet.

    Args:
        name: its name in the file.
        shape: its shape.
        dtype: its dtype.
        file: its checked file; None for a weight that another process reads, and sends.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: WeightFile | None

    @property
    def path(self) -> Path:
        """The path of its file."""
        return Path() if self.file is None else self.file.path

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def mapped(self) -> Tensor:
        """The weight, mapped from its file; memory for it without a file."""
        if self.file is None:
            return torch.empty(self.shape, dtype=self.dtype)
        weight: Tensor = self.file.get(self.name)
        return weight


def open_weights(sources: Iterable[WeightSource]) -> dict[str, StoredWeight]:
    """All weights of a checkpoint by name; every file is checked before the first one is read.

    Raises:
        CheckpointError: as `WeightFile`, or a file lacks a weight that the index lists for it.
    """
    weights: dict[str, StoredWeight] = {}
    for source in sources:
        file = WeightFile(source.path)
        for name in file.names if source.names is None else source.names:
            value = file.get(name)
            # Only values from a module's `get_extra_state` may be other objects.
            if isinstance(value, Tensor):
                weights[name] = StoredWeight(name, tuple(value.shape), value.dtype, file)
    return weights


class Copy(NamedTuple):
    """A tensor to fill from a file.

    Args:
        target: any tensor with memory.
        weight: the stored weight.
        starts: first index in each dimension of the part with the target's shape; the whole weight if None.
    """

    target: Tensor
    weight: StoredWeight
    starts: Sequence[int] | None = None

    @property
    def size(self) -> int:
        """Bytes that are read."""
        return self.target.numel() * self.weight.dtype.itemsize

    def run(self) -> None:
        """Read the weight, or the part of it, into the target; without a file, nothing."""
        if self.weight.file is None:
            return
        source = self.weight.mapped()
        for dimension, start in enumerate(self.starts or ()):
            source = source.narrow(dimension, start, self.target.shape[dimension])
        target = self.target.detach()
        if not self.weight.file.is_mapped or source.layout != torch.strided or not source.dim() or not source.nbytes:
            target.copy_(source)
            return
        rows = max(1, _PIECE * len(source) // source.nbytes)
        for to, part in zip(torch.split(target, rows), torch.split(source, rows), strict=True):
            to.copy_(part)
            forget_pages(part)


def copy_all(copies: Iterable[Copy], advance: Callable[[int], object] = lambda size: None) -> int:
    """Fill tensors on several threads.

    Args:
        copies: what to fill.
        advance: called by any thread with the number of bytes that it has read.

    Returns:
        The number of bytes read.
    """
    inference = torch.is_inference_mode_enabled()

    def run(copy: Copy) -> int:
        # The mode is set per thread; a tensor that was created in inference mode can only be written in that mode.
        with torch.inference_mode(inference), torch.no_grad():
            copy.run()
        advance(copy.size)
        return copy.size

    copies = list(copies)
    devices = {copy.target.device for copy in copies}
    # What was given to a device before may still use the memory of the targets.
    _wait_for(devices)
    with ThreadPoolExecutor(_THREADS, "accel-load") as pool:
        # In the order of the file, as a disk reads it best.
        read = sum(pool.map(run, sorted(copies, key=lambda copy: str(copy.weight.path))))
    # The streams of the caller know nothing of the copies that other threads have started.
    _wait_for(devices)
    return read


def _wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until devices with streams have done all that they were given."""
    for device in devices:
        if device.type != "meta" and family_of(device).spec.pins_memory:
            torch.get_device_module(device).synchronize(device)


def _values_in(path: Path) -> dict[str, Any]:
    """What a file holds by name, mapped."""
    return _map_safetensors(path) if is_safetensors(path) else _map_torch(path)


def _map_safetensors(path: Path) -> dict[str, Any]:
    try:
        # A pipe would block, and a device may have no end.
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, AttributeError) as error:
        raise CheckpointError(
            f"Cannot read the weights in {str(path)!r}.",
            printable(f"{type(error).__name__}: {error}"),
            "The file is damaged or not a safetensors file: download it again, or load an older checkpoint. For a new "
            "dtype, install versions of safetensors and torch that support it.",
        ) from error


def _map_torch(path: Path) -> dict[str, Any]:
    try:
        values = load_torch_file(path, mapped=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"Cannot read the weights in {str(path)!r}.",
            f"It is not a plain file of tensors: {str(error).splitlines()[0]}",
            "If you trust its author, read it with torch.load(weights_only=False), and save only its tensors again.",
        ) from error
    except Exception as error:  # a damaged pickle can make its reader raise any error
        first_line = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"Cannot read the weights in {str(path)!r} ({os.path.getsize(path) if os.path.exists(path) else 0} bytes).",
            f"{type(error).__name__}: {first_line}",
            "The file is damaged or was not written by torch.save: download it again, or load an older checkpoint.",
        ) from error
    _check_weights(path, values)
    return dict(values)


def _check_weights(path: Path, values: object) -> None:
    """Check that a weight file maps names to tensors; only values from `get_extra_state` may be other objects."""
    wrong = f"a {type(values).__name__}"
    if isinstance(values, Mapping):
        odd = [k for k, v in values.items() if not isinstance(v, Tensor) and not str(k).endswith("_extra_state")]
        odd += [k for k in values if not isinstance(k, str)]
        if not odd:
            return
        wrong = f"{type(values[odd[0]]).__name__} under {odd[0]!r}"
    raise CheckpointError(
        f"Cannot read the weights in {str(path)!r}.",
        f"It contains {wrong} where a mapping of names to tensors is expected.",
        "If the weights are nested deeper, read the file with torch.load, and save only their mapping.",
    )


def _check_present(path: Path, names: Iterable[str], values: Mapping[str, Any]) -> None:
    missing = [name for name in names if name not in values]
    if missing:
        raise CheckpointError(
            f"Cannot read {missing[0]!r} from {str(path)!r}.",
            f"The file does not hold it, nor {len(missing) - 1} others that the index places there.",
            "The index and the file do not match: download both again.",
        )


def load_torch_file(path: Path, *, mapped: bool, **options: Any) -> Any:
    """The content of a file of `torch.save`.

    Args:
        path: the file.
        mapped: memory-map the tensors, which the caller copies before anybody can write into the file: the process ends
            when it uses a tensor whose file became shorter. Files of torch before 1.6 are read as a whole.
        options: options of `torch.load`, besides `weights_only` and `mmap`.

    Raises:
        OSError: there is no such file, or it is not a regular one.
        pickle.UnpicklingError: it contains more than plain data.
        Exception: whatever a damaged file makes torch raise.
    """
    open_regular(path).close()
    # Indices of sparse tensors are checked after their storages are read.
    sparse: Any = torch.sparse.check_sparse_tensor_invariants
    with sparse():
        return torch.load(path, weights_only=True, mmap=mapped and _can_be_mapped(path), **options)


def forget_pages(tensor: Tensor) -> None:
    """Let go of the pages of a mapped tensor that was copied; while they are mapped, they are memory of the process.

    Args:
        tensor: a tensor of a mapped file into which nobody has written: what is used of it later is read from the file
            again. The values of any other tensor are lost.
    """
    call = _madvise()
    if call is not None and tensor.numel():
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        # A page at either end may belong to another tensor too.
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + extent * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if length > 0:
            call(begin, length, mmap.MADV_DONTNEED)


@cache
def _madvise() -> Any | None:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None:
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def _can_be_mapped(path: Path) -> bool:
    """Whether a file is an archive whose members are not compressed."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())


@dataclass(frozen=True)
class TensorRecord:
    """A tensor with contiguous elements in a file, in C order.

    Args:
        dtype: its dtype.
        shape: its shape.
        begin: offset of its first byte in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def record_of_tensor(file: IO[bytes], size: int) -> TensorRecord | None:
    """The place of the tensor in a file of `torch.save` that has nothing else; None if its bytes have another order.

    Args:
        file: the file; its tensor is not read.
        size: its size in bytes.

    Raises:
        pickle.UnpicklingError: it contains more than plain data.
        Exception: whatever a damaged file makes torch raise.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    file.seek(0)
    if not zipfile.is_zipfile(file):
        return None
    file.seek(0)
    with FakeTensorMode():
        described = torch.load(file, weights_only=True, map_location="cpu")
    if type(described) is not FakeTensor or described.layout != torch.strided:
        return None
    if described.is_quantized or described.is_conj() or described.is_neg() or not described.is_contiguous():
        return None
    storage: Any = described.untyped_storage()
    begin = storage._checkpoint_offset + described.storage_offset() * described.itemsize
    if begin + described.nbytes > size:
        raise EOFError("a tensor reaches beyond the end of the file")
    return TensorRecord(described.dtype, tuple(described.shape), begin)
