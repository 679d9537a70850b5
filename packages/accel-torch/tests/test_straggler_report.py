"""Where the time of each process went, in one table at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_ops import gather
from accel_ops.checked_call import recent_calls
from accel_state.watch.record import CATEGORIES, DATA, STATUS_RECORD
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, DataLoaderConfiguration, GeneralTracker
from accel_torch.straggler import SHARES, shares, table


class Kept(GeneralTracker):
    """Keeps what it is given."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}

    @property
    def tracker(self) -> Kept:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.values.update(values)


class Slow(Dataset[torch.Tensor]):
    """Samples that take their time on one of the processes."""

    def __init__(self, pause: float) -> None:
        self.pause = pause

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause)
        return torch.full((64,), 0.01)


@pytest.fixture(scope="module")
def two(two: Processes, tmp_path_factory: pytest.TempPathFactory) -> Processes:
    # Importing takes each process as long as it takes, and in the first run the other waits for it.
    two.run(told, str(tmp_path_factory.mktemp("first") / "checkpoint"), -1)
    return two


def gathered_in_a_group() -> tuple[list[int], list[str]]:
    accelerator = Accelerator(cpu=True, straggler_report=True)
    group = dist.new_group(list(range(accelerator.num_processes)))
    values = gather(torch.tensor([accelerator.process_index]), group=group).tolist()
    return values, [call.group for call in recent_calls(1)]


def test_a_group_has_collectives_while_they_are_measured(two: Processes) -> None:
    (first, calls), (second, others) = two.run(gathered_in_a_group)
    assert first == second == [0, 1]
    assert calls == others
    assert calls[0]


def told(folder: str, slow: int) -> dict[str, float]:
    kept = Kept()
    accelerator = Accelerator(cpu=True, straggler_report=True, log_with=kept)
    accelerator.init_trackers("run")
    model: Any = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Slow(0.3 if accelerator.process_index == slow else 0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for inputs in loader:
        accelerator.backward(model(inputs).mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.end_training()
    return kept.values


@pytest.mark.parametrize("slow", [0, 1])
def test_the_process_that_reads_slowly_waits_less_than_the_other(two: Processes, tmp_path: Path, slow: int) -> None:
    values, others = two.run(told, str(tmp_path / "checkpoint"), slow)
    assert others == {}
    assert set(values) == {f"time_share/process_{rank}/{share}" for rank in range(2) for share in SHARES}
    for rank in range(2):
        assert sum(values[f"time_share/process_{rank}/{share}"] for share in SHARES) == pytest.approx(1.0)
        assert values[f"time_share/process_{rank}/saving"] > 0
    fast = 1 - slow
    assert values[f"time_share/process_{slow}/data"] > values[f"time_share/process_{fast}/data"]
    assert values[f"time_share/process_{fast}/waiting"] > values[f"time_share/process_{slow}/waiting"]


def test_one_process_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh():
        accelerator = Accelerator(cpu=True, straggler_report=True)
        model = accelerator.prepare(nn.Linear(2, 1))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.ones(1, 3))
        accelerator.end_training()
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["process", "seconds", *" ".join(SHARES).split()]
    assert line.split()[0] == "0"
    assert len(line.split()) == 2 + len(SHARES)


def test_the_table_says_who_waits_least() -> None:
    quick, slow = ([*[1.0] * (len(SHARES) - 1), waits] for waits in (4.0, 0.5))
    text = table([quick, slow])
    assert text.splitlines()[-1] == "Process 1 waits least (0.5 s; the most is 4.0 s)."
    assert shares([quick])["time_share/process_0/waiting"] == pytest.approx(4 / 11)
    assert shares([[0.0] * len(SHARES)])["time_share/process_0/data"] == 0
    # One set of categories has these names; a process that reports is not down.
    assert (len(SHARES), CATEGORIES[-1]) == (len(CATEGORIES) - 1, "down")


def read(timed: bool, dispatch: bool) -> list[Any]:
    config = DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=False)
    accelerator = Accelerator(cpu=True, straggler_report=timed, dataloader_config=config)
    loader: Any = accelerator.prepare(DataLoader(range(14), batch_size=2))  # type: ignore[arg-type]
    skipping = accelerator.skip_first_batches(loader, 1)
    batches = [batch.tolist() for source in (loader, skipping, loader) for batch in source]
    if timed:
        assert STATUS_RECORD.seconds[DATA] > 0
    return [*batches, len(loader), loader.end_of_dataloader]


@pytest.mark.parametrize("dispatch", [False, True])
def test_timed_loaders_give_the_same(two: Processes, dispatch: bool) -> None:
    assert two.run(read, True, dispatch) == two.run(read, False, dispatch)
