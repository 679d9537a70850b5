"""Files of `torch.save`, read by `torch.load(weights_only=True)`, which runs no code of a file."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from accel_state.untrusted import open_regular

__all__ = ("TorchTensor", "load_torch_file", "tensor_in")


@dataclass(frozen=True)
class TorchTensor:
    """A tensor with contiguous elements in a file, in C order.

    Args:
        dtype: its dtype.
        shape: its shape.
        begin: offset of its first byte in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def load_torch_file(path: Path, *, mapped: bool, **options: Any) -> Any:
    """The content of a file.

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
        return torch.load(path, weights_only=True, mmap=mapped and zipfile.is_zipfile(path), **options)


def tensor_in(file: IO[bytes], size: int) -> TorchTensor | None:
    """The place of the tensor in a file that has nothing else; None if its bytes cannot be read as they are.

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
    return TorchTensor(described.dtype, tuple(described.shape), begin)
