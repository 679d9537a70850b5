"""The Accelerator on two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.errors import CheckpointError, SettingError, ShapeMismatch
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, TorchDynamoPlugin


def who() -> tuple[str, int, bool, str]:
    accelerator = Accelerator(cpu=True)
    return accelerator.distributed_type.value, accelerator.num_processes, accelerator.is_main_process, repr(accelerator)


def test_ranks_of_two_processes(two: Processes) -> None:
    first, second = two.run(who)
    assert first[:3] == ("MULTI_CPU", 2, True)
    assert second[:3] == ("MULTI_CPU", 2, False)


def evaluate(samples: int, as_objects: bool) -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(samples)), batch_size=5))
    seen: list[int] = []
    for (batch,) in loader:
        given = batch.tolist() if as_objects else {"value": batch, "double": batch * 2}
        gathered = accelerator.gather_for_metrics(given)
        seen += gathered if as_objects else gathered["value"].tolist()
        assert as_objects or gathered["double"].tolist() == [value * 2 for value in gathered["value"].tolist()]
    return seen


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("samples", [1, 9, 10, 11, 23])
def test_an_evaluation_counts_each_sample_once(two: Processes, samples: int, as_objects: bool) -> None:
    for seen in two.run(evaluate, samples, as_objects):
        assert seen == list(range(samples))


def gather_uneven() -> tuple[str, list[int]]:
    accelerator = Accelerator(cpu=True)
    uneven = torch.ones(accelerator.process_index + 1, dtype=torch.long)
    with pytest.raises(ShapeMismatch) as caught:
        accelerator.gather(uneven)
    padded = accelerator.pad_across_processes(uneven, pad_index=7)
    return str(caught.value), accelerator.gather(padded).tolist()


def test_uneven_tensors_are_a_named_error_everywhere_and_padding_helps(two: Processes) -> None:
    for message, gathered in two.run(gather_uneven):
        assert "gather_object()" in message
        assert gathered == [1, 7, 1, 1]


def collectives_per_step() -> tuple[list[bool], float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    equal = []
    for step in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
        gradients = accelerator.gather(model.module.weight.grad)
        equal.append(bool((gradients[0] == gradients[1]).item()))
        assert accelerator.sync_gradients is (step == 1)
    return equal, model.module.weight.grad.item()


def test_gradients_are_synchronised_at_the_end_of_a_window_only(two: Processes) -> None:
    for equal, gradient in two.run(collectives_per_step):
        assert equal == [False, True]
        assert gradient == pytest.approx(1.5)


def disagree() -> str:
    import os

    mine = "single" if os.environ["RANK"] == "0" else "ddp"
    with pytest.raises(SettingError) as caught:
        Accelerator(cpu=True, backend=mine)
    return str(caught.value)


def test_processes_that_choose_different_backends_are_told(two: Processes) -> None:
    for message in two.run(disagree):
        assert "process 0: single" in message
        assert "process 1: ddp" in message


def resume(folder: str, through_skipping: bool) -> tuple[list[float], list[float]]:
    from accel_torch import DataLoaderConfiguration, set_seed

    set_seed(3)
    configuration = DataLoaderConfiguration(
        restore_position=not through_skipping, use_seedable_sampler=through_skipping
    )
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))

    def train(batches: Any) -> list[float]:
        losses = []
        for inputs, targets in batches:
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    batches = iter(loader)
    train([next(batches) for _ in range(2)])
    accelerator.save_state(folder)
    expected = train(batches)
    accelerator.load_state(folder)
    return expected, train(accelerator.skip_first_batches(loader, 2) if through_skipping else loader)


@pytest.mark.parametrize("through_skipping", [True, False])
def test_a_resume_on_two_processes_is_exact(two: Processes, tmp_path: Path, through_skipping: bool) -> None:
    first, second = two.run(resume, str(tmp_path / "state"), through_skipping)
    for expected, resumed in (first, second):
        assert resumed == expected
        assert len(expected) == 3
    assert first[0] != second[0]
    assert {path.name for path in (tmp_path / "state").iterdir()} >= {
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "random_states_1.pkl",
    }


def resume_inside_a_window(folder: str) -> tuple[list[float], list[float], list[bool]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(56, 3), torch.randn(56, 1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))

    def train(batches: Any) -> list[float]:
        losses = []
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    batches = iter(loader)
    train([next(batches) for _ in range(2)])
    accelerator.save_state(folder)
    expected = train(batches)
    accelerator.load_state(folder)
    held = [parameter.grad is not None for parameter in model.parameters()]
    return expected, train(accelerator.skip_first_batches(loader, 2)), held


def test_a_resume_inside_an_accumulation_window_is_exact(two: Processes, tmp_path: Path) -> None:
    for expected, resumed, held in two.run(resume_inside_a_window, str(tmp_path / "state")):
        assert resumed == expected
        assert held == [True, True]
    assert (tmp_path / "state" / "gradients_1.safetensors").is_file()


def save_inside_a_window(folder: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(3, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 3)).sum())
    accelerator.save_state(folder)


def load_without_own_gradients(folder: str) -> str:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(3, 1))
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    return str(caught.value)


def test_partial_gradients_that_are_missing_are_an_error(two: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    two.run(save_inside_a_window, str(folder))
    (folder / "gradients_1.safetensors").unlink()
    (folder / "checkpoint_manifest.json").unlink()
    first, second = two.run(load_without_own_gradients, str(folder))
    assert "Process 1 failed" in first
    assert "gradients_1.safetensors is not there" in second


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.linear(inputs).tanh()


class Repeating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        out: torch.Tensor = self.head(inputs)
        return out


def reductions_of_compiled_shards(regional: bool | None) -> tuple[list[int], list[bool]]:
    """Reductions in each of six micro-batches of windows of three, and whether each block is compiled."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=3,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
        ),
        dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=regional),  # type: ignore[arg-type]
    )
    plain = Repeating()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    counts, cpu = [], [torch.profiler.ProfilerActivity.CPU]
    for _ in range(6):
        with torch.profiler.profile(activities=cpu) as profile, accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            optimizer.zero_grad()
        names = [event.name for event in profile.events() or () if event.name.startswith("c10d::")]
        counts.append(sum("reduce_scatter" in name for name in names))
    return counts, [layer._compiled_call_impl is not None for layer in plain.layers]


@pytest.mark.parametrize("regional", [None, True, False])
def test_compiled_shards_are_reduced_once_a_window(two: Processes, regional: bool | None) -> None:
    for counts, compiled in two.run(reductions_of_compiled_shards, regional, timeout=250):
        assert counts == [0, 0, 3, 0, 0, 3], "two blocks, and the rest of the model"
        assert compiled == [regional is not False] * 2


def built_in_place(backend: str, empty_init: bool | None) -> tuple[list[str], bool]:
    """Names of weights that differ from those of one process, and whether the same numbers are drawn afterwards."""
    accelerator = Accelerator(cpu=True, backend=backend)
    torch.manual_seed(7)
    with accelerator.init_module(empty_init=empty_init):
        plain = Repeating()
    drawn = torch.rand(3)
    state = accelerator.get_state_dict(accelerator.prepare(plain))
    torch.manual_seed(7)
    expected = Repeating().state_dict()
    differ = [name for name, value in state.items() if not torch.equal(value, expected[name])]
    return differ, torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_a_model_built_in_place_has_the_values_of_one_process(two: Processes, backend: str) -> None:
    assert two.run(built_in_place, backend, False) == [([], True), ([], True)]
    assert two.run(built_in_place, backend, None) == [([], True), ([], True)]
    for _, same_numbers in two.run(built_in_place, backend, True):
        assert not same_numbers, "nothing was drawn for a model that is not initialised"
