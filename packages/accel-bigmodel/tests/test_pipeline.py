from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel.pipeline import find_pippy_batch_size, generate_device_map, prepare_pippy
from accel_state.errors import AccelError, Missing, NotOffered, SettingError
from accel_state.process import PartialState
from accel_testing.processes import Processes

# Seconds a call may take: it imports and traces on a busy machine.
TRACING = 250


class Model(nn.Module):
    """Uses its inputs late, shares a parameter between stages, and has a connection past one."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(blocks)])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, final: str = "sum") -> dict[str, Any]:
        first = hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).relu() * self.scale
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return {"logits": self.head(hidden + first), "hidden": [hidden], "final": final}


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x)) if bool(x.sum() > 0) else self.first(x)


class Importing(Branching):
    def forward(self, x: torch.Tensor) -> Any:
        import a_package_that_is_nowhere

        return self.second(self.first(x)) * a_package_that_is_nowhere.factor


def built(kind: type[nn.Module] = Model, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return kind(**kwargs).eval()


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(rows * 2).reshape(rows, 2) % 10
    return ids, (ids % 3 > 0).float()


def same(found: Any, rows: int, **kwargs: Any) -> bool:
    ids, mask = inputs(rows)
    with torch.no_grad():
        expected = built(**kwargs)(ids, mask=mask)
    return (
        torch.allclose(found["logits"], expected["logits"], atol=1e-6)
        and torch.allclose(found["hidden"][0], expected["hidden"][0], atol=1e-6)
        and found["final"] == expected["final"]
    )


def run_batches(gather: bool, points: Any, chunks: int | None) -> list[bool | None]:
    PartialState(cpu=True)
    ids, mask = inputs(6)
    model = prepare_pippy(built(), points, None, (ids,), {"mask": mask}, chunks, gather)
    found = []
    for rows in (6, 1, 5, 13):
        ids, mask = inputs(rows)
        output = model(ids, mask=mask)
        found.append(None if output is None else same(output, rows))
    assert not any(parameter.grad_fn for parameter in model.parameters())
    return [*found, model.hf_split_points]


def refusals() -> list[str]:
    PartialState(cpu=True)
    ids, mask = inputs(4)
    messages = []

    def refused(call: Any) -> None:
        try:
            call()
        except AccelError as error:
            messages.append(f"{type(error).__name__}: {error.failure} {error.obstacle}")

    refused(lambda: prepare_pippy(built(), ["nowhere"], example_args=(ids,)))
    refused(lambda: prepare_pippy(built(), [], example_args=(ids,)))
    refused(lambda: prepare_pippy(built(), example_args=()))
    refused(lambda: prepare_pippy(built(Branching), example_args=(torch.ones(2, 4),)))
    refused(lambda: prepare_pippy(built(Importing), example_args=(torch.ones(2, 4),)))
    model = prepare_pippy(built(), example_args=(ids,), example_kwargs={"mask": mask, "final": "sum"})
    refused(lambda: model(ids))
    refused(lambda: model(ids, mask=mask, final="mean"))
    refused(lambda: model(ids, mask=mask[:2], final="sum"))
    refused(lambda: model(3, mask=None, final="sum"))
    # Still usable afterwards.
    output = model(ids, mask=mask, final="sum")
    return [*messages, str(output is None or same(output, 4))]


def three_stages() -> bool:
    PartialState(cpu=True)
    ids, mask = inputs(6)
    model = prepare_pippy(built(blocks=6), "auto", None, (ids,), {"mask": mask}, gather_output=True)
    return same(model(ids, mask=mask), 6, blocks=6)


def test_the_last_process_gets_what_the_whole_model_gives(two: Processes) -> None:
    first, last = two.run(run_batches, False, "auto", None, timeout=TRACING)
    assert first[:4] == [None] * 4
    assert last == [True, True, True, True, ["blocks.1"]]


def test_every_process_gets_the_output_when_asked(two: Processes) -> None:
    for found in two.run(run_batches, True, ["blocks.3"], 3, timeout=TRACING):
        assert found == [True, True, True, True, ["blocks.3"]]


def test_what_cannot_be_run_is_refused_on_every_process(two: Processes) -> None:
    for found in two.run(refusals, timeout=TRACING):
        words = [
            "has no module 'nowhere'",
            "2 stages need 1 split points",
            "no tensor with a batch dimension",
            f"{NotOffered.__name__}: Cannot split Branching into stages",
            f"{Missing.__name__}: Cannot split Importing into stages. Tracing it needs 'a_package_that_is_nowhere'",
            "It was traced for inputs like",
            "It was traced with 'sum', and the call has 'mean' there",
            "(4, 2), (2, 2) have no first dimension in common",
            "no tensor with a batch dimension",
        ]
        assert len(found) == len(words) + 1, found
        for text, word in zip(found, words, strict=False):
            assert word in text
        assert found[-1] == "True"


def test_three_stages(three: Processes) -> None:
    assert three.run(three_stages, timeout=TRACING) == [True, True, True]


def test_one_process_runs_the_model_as_it_is() -> None:
    model = built()
    assert prepare_pippy(model, example_args=inputs(2)) is model
    assert same(model(inputs(3)[0], mask=inputs(3)[1]), 3)
    with pytest.raises(SettingError, match="1 stages need 0 split points"):
        prepare_pippy(built(), ["blocks.1"], example_args=inputs(2))
    with pytest.raises(SettingError, match="num_chunks=0"):
        prepare_pippy(built(), example_args=inputs(2), num_chunks=0)


def test_stages_have_about_the_same_size() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    assert list(generate_device_map(layers, 2).values()) == [0, 0, 0, 1, 1, 1]
    assert list(generate_device_map(layers, 3).values()) == [0, 0, 1, 1, 2, 2]
    uneven = nn.Sequential(nn.Linear(100, 100), nn.Linear(2, 2), nn.Linear(2, 2))
    assert list(generate_device_map(uneven, 3).values()) == [0, 1, 2]
    assert list(generate_device_map(nn.Sequential(*reversed(uneven)), 3).values()) == [0, 1, 2]
    assert list(generate_device_map(nn.Sequential(nn.Linear(2, 2)), 3).values()) == [0]
    assert generate_device_map(layers, 2, max_memory={0: 700, 1: 10**6})["5"] == 1


@pytest.mark.parametrize(
    ("args", "kwargs", "size"),
    [
        ((torch.ones(3, 2),), {}, 3),
        ((), {"a": [torch.ones(4, 2)]}, 4),
        ((1, "x"), {"b": torch.ones(2)}, 2),
        ((torch.tensor(1.0),), {}, None),
        (None, None, None),
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_tensor(args: Any, kwargs: Any, size: int | None) -> None:
    assert find_pippy_batch_size(args, kwargs) == size
