"""The largest micro-batch that fits on every rank, and training with it as with the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state import PartialState
from accel_state.errors import AccelError, CollectiveError, NotReady, OutOfMemory, SettingError
from accel_state.exit_codes import NOTICE_VARIABLE, RESUME
from accel_testing.plugin import on_devices, room_for
from accel_testing.processes import Processes, run_command
from accel_torch import Accelerator, find_micro_batch_size
from accel_torch.micro_batches import Search

pytestmark = pytest.mark.usefixtures("preloaded_python", "fresh_state")
PRELOADED = ("accel_plugins.fsdp.fsdp2",)


class Memory:
    """A step that runs out of memory above a number of samples."""

    def __init__(self, limit: int) -> None:
        self.limit, self.tried = limit, list[int]()

    def __call__(self, size: int) -> None:
        self.tried.append(size)
        if size > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 MiB")


@pytest.mark.parametrize("largest", [1, 2, 7, 19, 20, 21, 64, 512, 3000, 100_000, 3_000_000])
def test_the_limit_is_found_within_5_percent_in_8_trials(largest: int) -> None:
    limits = {1, 2, 3, 19, 20, 21, largest // 3, largest // 2 + 1, largest - 1, largest, 2 * largest}
    for limit in sorted(limit for limit in limits if limit):
        search, tried = Search(largest), []
        while (size := search.size) is not None:
            tried.append(size)
            search.note(size <= limit)
        true = min(limit, largest)
        assert 0.95 * true <= search.fitting <= true
        assert search.trials == len(tried) <= 8
        assert search.fitting in tried


def test_a_batch_that_fits_as_a_whole_takes_one_trial() -> None:
    PartialState(cpu=True)
    plan = find_micro_batch_size(Memory(512))
    assert (plan.size, plan.steps, plan.trials, plan.per_process) == (512, 1, 1, 512)


def test_accumulation_grows_where_micro_batches_become_smaller() -> None:
    PartialState(cpu=True)
    plan = find_micro_batch_size(Memory(10), 32)
    assert (plan.size, plan.steps, plan.sizes) == (10, 4, (10, 10, 10, 2))
    batch = {"x": torch.arange(32), "y": [torch.arange(64).reshape(32, 2)]}
    split = list(plan.split(batch))
    assert [samples for _, samples in split] == [10, 10, 10, 2]
    assert torch.cat([part["x"] for part, _ in split]).equal(batch["x"])  # type: ignore[arg-type]
    assert [part["y"][0].shape for part, _ in split] == [(10, 2), (10, 2), (10, 2), (2, 2)]


def test_a_single_sample_that_does_not_fit() -> None:
    PartialState(cpu=True)
    with pytest.raises(OutOfMemory, match="global batch of 64"):
        find_micro_batch_size(Memory(0), 64)


def test_another_error_comes_through() -> None:
    PartialState(cpu=True)

    def step(size: int) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        find_micro_batch_size(step)


@on_devices("simulated", differs="the allocator is really out of memory, and rounds sizes up")
def test_the_limit_of_a_real_allocator_is_found(device: torch.device) -> None:
    PartialState()
    sample = 2**20
    room = 200 * sample + sample // 2
    peaks: dict[int, bool] = {}

    def step(size: int) -> None:
        peaks[size] = False
        batch = torch.ones(size, sample // 4, device=device)
        peaks[size] = bool(batch.sum().isfinite())

    with room_for(device, room):
        plan = find_micro_batch_size(step, 512)
    assert peaks[plan.size]
    assert 0.9 * 200 <= plan.size <= 200
    assert plan.trials <= 8


def found_by_ranks(limits: list[int], global_batch_size: int) -> Any:
    rank = PartialState(cpu=True).process_index
    step = Memory(limits[rank])
    try:
        plan = find_micro_batch_size(step, global_batch_size, deadline=100)
    except AccelError as error:
        return type(error).__name__, str(error)
    return plan.size, plan.per_process, plan.steps, step.tried


@pytest.mark.parametrize("limits", [[100, 37, 80], [12, 100, 100]])
def test_the_rank_with_the_least_memory_decides(three: Processes, limits: list[int]) -> None:
    answers = three.run(found_by_ranks, limits, 300)
    size, per_process, steps, tried = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert 0.95 * min(limits) <= size <= min(limits)
    assert per_process == 100
    assert steps == -(-100 // size)
    assert len(tried) <= 8


def test_all_ranks_learn_that_nothing_fits(two: Processes) -> None:
    assert {kind for kind, _ in two.run(found_by_ranks, [0, 50], 100)} == {OutOfMemory.__name__}


def test_a_global_batch_that_cannot_be_divided(two: Processes) -> None:
    for kind, message in two.run(found_by_ranks, [9, 9], 7):
        assert kind == SettingError.__name__
        assert "multiple of the 2 processes" in message


def other_error() -> str:
    rank = PartialState(cpu=True).process_index

    def step(size: int) -> None:
        if rank == 1:
            raise KeyError("labels")

    try:
        find_micro_batch_size(step, 64, deadline=100)
    except KeyError as error:
        return str(error)
    except CollectiveError as error:
        return error.obstacle
    return ""


def test_another_error_of_one_rank_is_raised_on_all(two: Processes) -> None:
    assert two.run(other_error) == ["Process 1 failed: KeyError: 'labels'", "'labels'"]


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def tried_on(limits: list[int]) -> dict[str, Any]:
    """What is left behind after trials in which a rank runs out of memory in the middle of backward."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    model = accelerator.prepare(model_of())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    generators = torch.get_rng_state()

    def step(size: int) -> None:
        def out_of_memory(gradient: torch.Tensor) -> None:
            if size > limits[rank]:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        hidden = torch.randn(size, 3, requires_grad=True)
        outputs = model(hidden)
        outputs.register_hook(out_of_memory)
        accelerator.backward(outputs.sum())

    plan = find_micro_batch_size(step, 32 * accelerator.num_processes, accelerator=accelerator)
    return {
        "size": plan.size,
        "weights": all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        "gradients": [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        "generators": torch.equal(torch.get_rng_state(), generators),
        "synchronises": accelerator.sync_gradients,
    }


def test_trials_leave_nothing_behind(two: Processes) -> None:
    expected = {"size": 14, "weights": True, "gradients": [], "generators": True, "synchronises": True}
    assert two.run(tried_on, [14, 30]) == [expected] * 2


def data_of() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(40, 3, generator=generator), torch.randn(40, 1, generator=generator))


def plain_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def train_split(limit: int) -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = plain_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = find_micro_batch_size(Memory(limit), 16, accelerator=accelerator)
    loader = DataLoader(data_of(), batch_size=plan.per_process)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        for (inputs, targets), samples in plan.split(batch):
            with accelerator.accumulate(model, weight=samples):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    assert accelerator.gradient_accumulation_steps == 1
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


@pytest.mark.parametrize("limit", [8, 3, 5])
def test_training_in_micro_batches_equals_training_on_whole_batches(two: Processes, limit: int) -> None:
    model = plain_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = data_of()
    # The last step has 8 samples, the whole batch of one process; samples from the beginning fill it up.
    for rows in (range(16), range(16, 32), [*range(32, 40), *range(8)]):
        inputs, targets = (tensor[list(rows)] for tensor in data.tensors)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]
    for weights in two.run(train_split, limit):
        assert weights == pytest.approx(expected, abs=1e-6)


def test_a_batch_that_is_left_in_its_middle_is_named() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(plain_of())
    plan = find_micro_batch_size(Memory(2), 8, accelerator=accelerator)
    for part, samples in plan.split(torch.ones(8, 3)):
        with accelerator.accumulate(model, weight=samples):
            accelerator.backward(model(part).sum())
        break
    with pytest.raises(NotReady, match="not read to its last micro-batch"):
        list(plan.split(torch.ones(8, 3)))


@pytest.mark.parametrize("kind", ["sharded", "static"])
def test_a_run_whose_passes_have_collectives_ends_and_goes_on_with_smaller_sizes(tmp_path: Path, kind: str) -> None:
    script = str(Path(__file__).with_name("micro_batch_script.py"))
    command = [sys.executable, "-m", "accel_cli.main", "launch", "--cpu", "--num_processes", "2", script]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    codes = []
    while not codes or codes[-1]:
        finished = run_command([*command, str(tmp_path), "2", kind], timeout=250, env=environment)
        codes.append(finished.returncode)
        assert finished.returncode in (0, RESUME), str(finished)
        assert len(codes) <= 3
    assert codes == [RESUME, RESUME, 0]
    assert (tmp_path / "tried").read_text().split() == ["4", "2", "3"]
    assert [(tmp_path / f"found_{rank}").read_text() for rank in range(2)] == ["2 3"] * 2


def test_a_process_can_end_at_once_from_any_thread(tmp_path: Path) -> None:
    code = (
        "import threading, time\n"
        "from accel_state.exit_codes import leave_to_resume\n"
        "threading.Thread(target=leave_to_resume, args=(True,)).start()\n"
        "time.sleep(60)\n"
    )
    notice = tmp_path / "resume"
    environment = {**os.environ, NOTICE_VARIABLE: str(notice), "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=250, check=False).returncode == RESUME
    assert notice.exists()
