"""Replicas that come apart are noticed, named, and cost nothing where nobody asked for it."""

from __future__ import annotations

from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.errors import SettingError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.profiling import profile
from accel_testing.recording_transport import recording
from accel_torch import Accelerator, ReplicasDiffer, set_seed
from accel_torch.replicas import bit_sums


def trained(wrong: str, every: int = 2, seeds_differ: bool = False, options: dict[str, Any] | None = None) -> Any:
    """Six steps in which process 1 does something of its own after the third; the message, or how it went well."""
    accelerator = Accelerator(cpu=True, check_replicas_every=every, **(options or {}))
    set_seed(accelerator.process_index if seeds_differ else 0)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    torch.manual_seed(accelerator.process_index if seeds_differ else 0)
    data = TensorDataset(torch.arange(96.0).reshape(-1, 2) / 96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    different = accelerator.process_index == 1
    try:
        for step, (inputs,) in enumerate(loader):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if different and step == 2:
                spoil(wrong, accelerator, model, optimizer, loader)
    except ReplicasDiffer as error:
        return str(error)
    return "well"


def spoil(wrong: str, accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    weight = accelerator.unwrap_model(model)[1].weight
    if wrong == "weight":
        with torch.no_grad():
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.flatten()[0] += 0.001
    if wrong == "generator":
        torch.rand(1)
    if wrong == "loader":
        loader.progress.iteration.steps += 1
    if wrong == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    if wrong == "step":
        optimizer._step = lambda inner, closure: False


def test_replicas_that_stay_replicas_train_on(two: Processes) -> None:
    assert two.run(trained, "nothing") == ["well", "well"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("weight", "the tensor 'module.1.weight'"),
        ("generator", "the generator 'torch_manual_seed'"),
        ("loader", "the position of loader 0"),
        ("group", "the number of the optimizer's parameters"),
    ],
)
def test_the_first_difference_is_named_on_every_process(two: Processes, wrong: str, named: str) -> None:
    for message in two.run(trained, wrong):
        assert f"They differ first in {named}." in message
        assert "agree with each other: process 0; process 1." in message
        assert "after 4 optimizer steps" in message


def test_the_process_that_differs_from_the_others_is_named(four: Processes) -> None:
    for message in four.run(trained, "weight"):
        assert "agree with each other: process 0, 2, 3; process 1." in message


def test_generators_that_were_different_from_the_beginning_may_stay_so(two: Processes) -> None:
    assert two.run(trained, "generator", 2, True) == ["well", "well"]


def test_divided_parameters_are_compared_with_their_replicas_only(four: Processes) -> None:
    assert four.run(sharded, "nothing") == ["well"] * 4
    for message in four.run(sharded, "weight"):
        assert "1.weight" in message
        # Processes 1 and 3 hold the same part of the copies {0, 1} and {2, 3}.
        assert "agree with each other: process 1; process 3." in message


def flat(wrong: str) -> Any:
    from accel_torch import FullyShardedDataParallelPlugin

    return trained(wrong, options={"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)})


def test_flat_parameters_have_no_replicas(two: Processes) -> None:
    assert two.run(flat, "nothing") == ["well", "well"]


def ignored(version: int) -> Any:
    from accel_torch import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(version, ignored_modules="1", auto_wrap_policy="NO_WRAP")
    return trained("weight", options={"fsdp_plugin": plugin})


@pytest.mark.parametrize("version", [1, 2])
def test_modules_that_sharding_ignores_are_compared(two: Processes, version: int) -> None:
    for message in two.run(ignored, version):
        assert "1.weight'" in message
        assert "agree with each other: process 0; process 1." in message


def sharded(wrong: str) -> Any:
    from accel_torch import FullyShardedDataParallelPlugin, ParallelismConfig

    return trained(
        wrong,
        options={
            "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        },
    )


def collectives_of_six_steps(every: int | None) -> int:
    accelerator = Accelerator(cpu=True, check_replicas_every=every)
    model: Any = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with recording() as records:
        for _ in range(6):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
    return len(records)


def test_a_check_is_one_collective(two: Processes) -> None:
    assert two.run(collectives_of_six_steps, None) == [0, 0]
    assert two.run(collectives_of_six_steps, 2) == [3, 3]
    assert two.run(collectives_of_six_steps, 7) == [0, 0]


def calls_of_a_step(**options: Any) -> list[str]:
    """Names of the Python functions of ours that one training step calls."""
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("accel_"):
            called.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    with fresh():
        accelerator = Accelerator(cpu=True, **options)
        model: Any = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step() -> None:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()

        # The guard against misuse watches two steps, and leaves.
        step()
        step()
        with profile(note):
            step()
    return called


def test_switched_off_they_add_no_call_to_a_step() -> None:
    plain = calls_of_a_step()
    watchers = ("hooks", "misuse", "replicas", "straggler", "time_recorder")
    assert plain
    assert [name for name in plain if name.split(".")[1] in watchers] == []
    assert plain == calls_of_a_step(check_replicas_every=None, straggler_report=False)
    # A step that hooks follow goes through one further method of the optimizer, and nothing else is added.
    added = set(calls_of_a_step(check_replicas_every=100)) - set(plain)
    assert {name for name in added if not name.startswith("accel_plugins.wrapped.optimizer.")} == {
        "accel_torch.replicas.after_step"
    }


@pytest.mark.parametrize("wrong", [-1, 2.0, True, "100"])
def test_an_interval_that_is_none(wrong: Any) -> None:
    with fresh(), pytest.raises(SettingError, match="an int of at least 0"):
        Accelerator(cpu=True, check_replicas_every=wrong)


def test_bits_of_all_kinds_of_tensors() -> None:
    tensors = [
        torch.tensor(1.0),
        torch.ones(0),
        torch.ones(3, 2).t(),
        torch.ones(5, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.float8_e4m3fn),
    ]
    sums = bit_sums(tensors)
    assert sums == bit_sums([tensor.clone() for tensor in tensors])
    assert sums[1] == 0
    assert bit_sums([torch.tensor(1.0)]) != bit_sums([torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))])
    assert bit_sums([]) == []
