"""What processes tell each other, and what is done to nested data."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy
import torch

from accelerate import Accelerator
from accelerate.utils import (
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_to_fp32,
    find_batch_size,
    gather_object,
    listify,
    pad_across_processes,
    reduce,
    send_to_device,
    set_seed,
    slice_tensors,
)

Point = namedtuple("Point", ["x", "y"])


def _rank() -> int:
    return Accelerator(cpu=True).process_index


def gathered() -> Any:
    accelerator = Accelerator(cpu=True)
    own = {"a": torch.tensor([float(_rank())]), "b": [torch.tensor([[_rank(), 1]]), (torch.tensor([_rank()]),)]}
    return listify(accelerator.gather(own))


def gathered_scalars() -> Any:
    return Accelerator(cpu=True).gather(torch.tensor(float(_rank()))).tolist()


def gathered_named_tuple() -> Any:
    made = Accelerator(cpu=True).gather(Point(torch.tensor([_rank()]), torch.tensor([2.0])))
    return [type(made).__name__, made.x.tolist(), made.y.tolist()]


def gathered_texts() -> Any:
    return Accelerator(cpu=True).gather("text")


def reduced() -> Any:
    accelerator = Accelerator(cpu=True)
    own = {"a": torch.tensor([1.0 + _rank(), 2.0])}
    results = [accelerator.reduce(own), accelerator.reduce(own, "mean"), accelerator.reduce(own, "sum", scale=0.5)]
    return [listify(result) for result in results]


def reduced_by_function() -> Any:
    own = torch.tensor([1.0 + _rank()])
    return [reduce(own).tolist(), reduce(own, "sum").tolist(), own.tolist()]


def reduced_not_at_all() -> Any:
    return Accelerator(cpu=True).reduce(torch.tensor([1.0 + _rank()]), "none").tolist()


def padded() -> Any:
    accelerator = Accelerator(cpu=True)
    own = torch.ones(1 + _rank(), 2)
    last = accelerator.pad_across_processes(own, pad_index=-1)
    first = pad_across_processes(own, pad_index=-1, pad_first=True)
    return [last.tolist(), first.tolist()]


def padded_along_another_dimension() -> Any:
    own = [torch.ones(2, 1 + _rank()), torch.ones(2)]
    return [tensor.tolist() for tensor in Accelerator(cpu=True).pad_across_processes(own, dim=1)]


def sent_to_all() -> Any:
    last = Accelerator(cpu=True).num_processes - 1
    return listify(broadcast({"a": torch.tensor([1.0 + _rank()]), "b": [torch.tensor([_rank()])]}, from_process=last))


def objects_gathered() -> Any:
    Accelerator(cpu=True)
    return gather_object([_rank(), {"of": _rank()}])


def objects_sent_to_all() -> Any:
    Accelerator(cpu=True)
    own = [_rank(), "from", {"process": _rank()}]
    return [broadcast_object_list(own), own]


def moved() -> Any:
    nested = {"a": torch.ones(1), "b": [torch.ones(1), "text"], "c": None, "keep": torch.ones(1)}
    made = send_to_device(nested, "meta", skip_keys="keep")
    return [made["a"].device.type, made["b"][0].device.type, made["b"][1], made["c"], made["keep"].device.type]


def batch_sizes() -> Any:
    return [find_batch_size({"a": [torch.ones(3, 2)]}), find_batch_size((torch.ones(2),))]


def no_batch_at_all() -> Any:
    return find_batch_size([])


def a_batch_of_scalars() -> Any:
    return find_batch_size({"a": torch.tensor(1.0)})


def sliced_and_joined() -> Any:
    nested = {"a": torch.arange(4), "b": (torch.arange(8).reshape(4, 2),)}
    joined = concatenate([nested, nested])
    return [listify(slice_tensors(nested, slice(1, 3))), listify(joined)]


def back_to_full_precision() -> Any:
    made = convert_to_fp32({"a": torch.ones(1, dtype=torch.float16), "b": torch.ones(1, dtype=torch.int64)})
    return [str(made["a"].dtype), str(made["b"].dtype)]


def draws_of_a_seed() -> Any:
    set_seed(5)
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


def draws_of_a_seed_for_each_process() -> Any:
    Accelerator(cpu=True)
    set_seed(5, device_specific=True)
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


def split_lists() -> Any:
    accelerator = Accelerator(cpu=True)
    with accelerator.split_between_processes([1, 2, 3, 4, 5]) as own:
        pass
    with accelerator.split_between_processes([1, 2, 3, 4, 5], apply_padding=True) as padded_own:
        pass
    return [own, padded_own]


def split_dicts_and_tensors() -> Any:
    accelerator = Accelerator(cpu=True)
    with accelerator.split_between_processes({"a": [1, 2, 3], "b": ["x", "y", "z"]}) as own:
        pass
    with accelerator.split_between_processes(torch.arange(5), apply_padding=True) as tensor:
        pass
    return [own, tensor.tolist()]


def split_one_item() -> Any:
    with Accelerator(cpu=True).split_between_processes(["only"], apply_padding=True) as own:
        return own
