from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    compute_module_sizes,
    dtype_byte_size,
    find_tied_parameters,
    get_max_layer_size,
    get_non_persistent_buffers,
    init_empty_weights,
    named_module_tensors,
    retie_parameters,
)
from accel_bigmodel.sizes import torch_dtype
from accel_state.choices import CustomDtype
from accel_state.errors import SettingError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("buf", torch.zeros(5), persistent=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        if tie:
            self.head.weight = self.emb.weight


def test_every_tensor_and_module_has_its_bytes() -> None:
    sizes = compute_module_sizes(Model())
    assert sizes[""] == 880
    assert (sizes["scale"], sizes["emb"], sizes["blocks"], sizes["blocks.1"], sizes["blocks.1.a.bias"]) == (
        12,
        160,
        480,
        160,
        16,
    )
    assert sizes["count"] == 16


def test_sizes_in_another_dtype_leave_integers_and_smaller_weights_alone() -> None:
    sizes = compute_module_sizes(Model(), dtype="float16", special_dtypes={"norm.weight": torch.float32})
    assert (sizes["emb"], sizes["norm.weight"], sizes["norm.bias"], sizes["count"], sizes["buf"]) == (80, 16, 8, 16, 10)
    assert compute_module_sizes(Model().half(), dtype=torch.float32)["emb"] == 80
    assert compute_module_sizes(Model(), dtype=CustomDtype.INT4)["emb"] == 20


def test_tied_weights_count_once() -> None:
    assert compute_module_sizes(Model(tie=True))[""] == 880 - 160
    assert compute_module_sizes(nn.Linear(2, 2))[""] == 24
    assert dict(compute_module_sizes(nn.Identity())) in ({}, {"": 0})


def test_sizes_of_buffers_and_names_of_non_persistent_ones() -> None:
    assert compute_module_sizes(Model(), buffers_only=True) == {"": 36, "buf": 20, "count": 16}
    assert get_non_persistent_buffers(Model()) == {"buf"}
    nested = nn.ModuleDict({"inner": Model()})
    assert get_non_persistent_buffers(nested) == set()
    assert get_non_persistent_buffers(nested, recurse=True) == {"buf"}
    assert get_non_persistent_buffers(nested, recurse=True, fqns=True) == {"inner.buf"}


def test_named_tensors() -> None:
    assert [name for name, _ in named_module_tensors(Model())] == ["scale", "buf", "count"]
    assert [name for name, _ in named_module_tensors(Model(), include_buffers=False)] == ["scale"]
    everything = dict(named_module_tensors(Model(), recurse=True, remove_non_persistent=True))
    assert everything.keys() == Model().state_dict().keys()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bool, 0.125),
        (torch.float8_e4m3fn, 1),
        (torch.bfloat16, 2),
        (torch.complex64, 8),
        (CustomDtype.INT2, 0.25),
        ("float32", 4),
        ("torch.int8", 1),
    ],
)
def test_bytes_of_an_element(dtype: torch.dtype | CustomDtype | str, size: float) -> None:
    assert dtype_byte_size(dtype) == size


def test_names_of_dtypes() -> None:
    assert torch_dtype("torch.bfloat16") is torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(SettingError, match="'bfloat17'"):
        torch_dtype("bfloat17")
    with pytest.raises(SettingError, match="'nn'"):
        torch_dtype("nn")


def test_the_largest_layers() -> None:
    model = Model()
    sizes = compute_module_sizes(model)
    children = list(model.named_children())
    assert get_max_layer_size(children, sizes, None) == (160, ["emb", "head"])
    assert get_max_layer_size(children, sizes, ["Block"]) == (160, ["emb", "blocks.0", "blocks.1", "blocks.2", "head"])


def test_tied_parameters_are_found_and_tied_again() -> None:
    with init_empty_weights():
        model = Model(tie=True)
    assert find_tied_parameters(model) == [["emb.weight", "head.weight"]]
    assert find_tied_parameters(Model()) == []
    model.head.weight = nn.Parameter(torch.ones(10, 4))
    assert find_tied_parameters(model) == []
    retie_parameters(model, [["emb.weight", "head.weight", "gone.weight", "emb.gone"]])
    assert model.emb.weight is model.head.weight
    assert not model.emb.weight.is_meta
