"""Types that checkers see come back from `prepare` and its relatives, by the old address and by the new one.

`test_static_types.py` has mypy and pyright read this; nothing runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import accelerate
from accel_torch import Accelerator


class Model(nn.Module):
    """A model with a method of its own."""

    def generate(self) -> str:
        return "text"


def prepared(
    accelerator: Accelerator,
    model: Model,
    other: nn.Linear,
    adam: AdamW,
    sgd: SGD,
    loader: DataLoader[tuple[Tensor, Tensor]],
    texts: DataLoader[str],
    step: StepLR,
    schedule: LambdaLR,
) -> None:
    assert_type(accelerator.prepare(model), Model)
    assert_type(accelerator.prepare(model).generate(), str)
    assert_type(accelerator.prepare(model, device_placement=[False]), Model)
    assert_type(accelerator.prepare(model, adam), tuple[Model, AdamW])
    assert_type(accelerator.prepare(model, adam, loader), tuple[Model, AdamW, DataLoader[tuple[Tensor, Tensor]]])
    four = accelerator.prepare(model, adam, loader, step)
    assert_type(four, tuple[Model, AdamW, DataLoader[tuple[Tensor, Tensor]], StepLR])
    five = accelerator.prepare(model, adam, loader, step, None)
    assert_type(five, tuple[Model, AdamW, DataLoader[tuple[Tensor, Tensor]], StepLR, None])
    six = accelerator.prepare(model, adam, step, other, sgd, schedule)
    assert_type(six, tuple[Model, AdamW, StepLR, nn.Linear, SGD, LambdaLR])
    seven = accelerator.prepare(model, adam, step, other, sgd, schedule, texts, device_placement=[True] * 7)
    assert_type(seven, tuple[Model, AdamW, StepLR, nn.Linear, SGD, LambdaLR, DataLoader[str]])
    eight = accelerator.prepare(model, adam, step, other, sgd, schedule, texts, loader)
    assert_type(eight[6], DataLoader[str])
    assert_type(eight[7], DataLoader[tuple[Tensor, Tensor]])


def however_many(accelerator: Accelerator, listed: list[Any], model: Model) -> None:
    assert_type(accelerator.prepare(*listed), Any)
    nine = accelerator.prepare(model, model, model, model, model, model, model, model, model)
    assert_type(nine, Any)


def by_the_old_address(accelerator: accelerate.Accelerator, model: Model, adam: AdamW) -> None:
    assert_type(accelerator.prepare(model, adam), tuple[Model, AdamW])


def decorated(accelerator: Accelerator) -> None:
    @accelerator.on_main_process
    def plain(text: str) -> int:
        return len(text)

    @accelerator.on_local_main_process()
    def in_brackets(text: str) -> int:
        return len(text)

    kept: Callable[[str], int] = plain
    also: Callable[[str], int] = in_brackets
    assert_type(kept("a"), int)
    assert_type(also("a"), int)


def answers(accelerator: Accelerator) -> None:
    assert_type(accelerator.check_trigger(), bool)
    assert_type(accelerator.sync_gradients, bool)
    assert_type(accelerator.num_processes, int)
