"""Replicas are killed at random and come back: all have the same weights at the end, and every sample came once.

`ACCEL_REPLICA_KILLS` says how many are killed; 3 without it. The order in which samples are added up changes with the
members, and over ten thousand steps in float32 that order alone changes losses by more than the tests allow, in one
process without replicas too. So long runs train in float64.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchft")

from accel_testing.simulated_device import POSSIBLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

SCRIPT = Path(__file__).with_name("train_replica.py")
KILLS = int(os.environ.get("ACCEL_REPLICA_KILLS", "3"))
SAMPLES, PAUSE, HEARTBEAT = 403, 0.05, 1.0
PATIENCE = 180.0
LONG = 25
"""A run with more kills than that is a long one."""

spec = importlib.util.spec_from_file_location("train_replica", SCRIPT)
assert spec is not None
assert spec.loader is not None
train_replica = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_replica)


def _rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _started(path: Path) -> float:
    """When the process that writes a file began."""
    with open(path) as file:
        first = file.readline()
    return float(json.loads(first)["time"]) if first.endswith("}\n") else 0.0


def _first_step_begun_after(moment: float, rows: list[dict[str, Any]]) -> float | None:
    """When a process ended the first step that it began after a moment; None while there is none."""
    begun = next((row["time"] for row in rows if "attempt" in row and row["time"] > moment), None)
    if begun is None:
        return None
    return next((row["time"] for row in rows if "step" in row and row["time"] > begun), None)


class Replicas:
    """A launched run of replicas, and what they have noted."""

    def __init__(
        self,
        folder: Path,
        backend: str,
        count: int,
        processes: int = 1,
        *options: str,
        save_every: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.folder, self.count, self.processes, self.dtype = folder, count, processes, dtype
        words = [*options, *(["--cpu"] if device == "cpu" else [])]
        words += [f"--backend={backend}", f"--replica_groups={count}", f"--num_processes={processes}"]
        words += [f"--torchft_heartbeat_timeout={HEARTBEAT}", str(SCRIPT), str(folder), str(SAMPLES), str(PAUSE)]
        words += [str(save_every), device, str(dtype).rpartition(".")[2]]
        self.output = folder / "output"
        with open(self.output, "w") as file:
            self.launch = subprocess.Popen(
                [sys.executable, "-m", "accel_cli.main", "launch", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def rows(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Replica and rank, and what each process of it has noted."""
        for path in sorted(self.folder.glob("*.jsonl")):
            yield path.name.rpartition("-")[0], _rows_of(path)

    def newest(self, replica: int) -> list[dict[str, Any]]:
        """What the first process of a replica noted since it was started last."""
        starts = [path for path in self.folder.glob(f"{replica}-0-*.jsonl") if path.stat().st_size]
        return _rows_of(max(starts, key=_started)) if starts else []

    def wait_for_everyone(self) -> None:
        """Wait until every replica has made a step together with all others."""
        deadline = time.monotonic() + PATIENCE
        members = self.count * self.processes
        while not all(
            any(row.get("step") and row["members"] == members for row in self.newest(r)) for r in range(self.count)
        ):
            assert self.launch.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def kill(self, replica: int) -> float:
        """Kill the first process of a replica; seconds until all others have made a step that they began afterwards."""
        before = len(self.newest(replica))
        others = [other for other in range(self.count) if other != replica]
        pid = self.newest(replica)[0]["ready"]
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        after: list[float] = []
        while len(after) < len(others):
            assert self.launch.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            after = [at for other in others if (at := _first_step_begun_after(killed, self.newest(other)))]
            time.sleep(0.05)
        while self.newest(replica)[0]["ready"] == pid:
            assert self.launch.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, (before, self.output.read_text())
            time.sleep(0.1)
        return max(after) - killed

    def pause(self, replica: int, seconds: float) -> int:
        """Stop the first process of a replica for a while; returns how many steps others made alone meanwhile."""
        pid = self.newest(replica)[0]["ready"]
        others = [other for other in range(self.count) if other != replica]
        os.kill(pid, signal.SIGSTOP)
        stopped = time.time()
        time.sleep(seconds)
        rows = (row for other in others for row in self.newest(other) if "step" in row and row["time"] > stopped)
        alone = sum(row["members"] < self.count * self.processes for row in rows)
        os.kill(pid, signal.SIGCONT)
        continued, deadline = time.time(), time.monotonic() + PATIENCE
        while not any("step" in row and row["time"] > continued for row in self.newest(replica)):
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)
        assert self.newest(replica)[0]["ready"] == pid, "it was started again"
        return alone

    def kill_all(self) -> None:
        """Kill every replica at once, and wait until all have been started again."""
        pids = [self.newest(replica)[0]["ready"] for replica in range(self.count)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while any(self.newest(replica)[0]["ready"] in pids for replica in range(self.count)):
            assert self.launch.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def noted(self, key: str) -> list[Any]:
        """What any process has noted under a key, in the order of time."""
        rows = sorted((row for _, rows in self.rows() for row in rows if key in row), key=lambda row: row["time"])
        return [row[key] for row in rows]

    def finish(self) -> None:
        """Let all finish the epoch after the next one, and wait for the end."""
        epoch = max(row["epoch"] for _, rows in self.rows() for row in rows if "epoch" in row)
        (self.folder / "epochs.new").write_text(str(epoch + 2))
        (self.folder / "epochs.new").rename(self.folder / "epochs")
        assert self.launch.wait(timeout=PATIENCE) == 0, self.output.read_text()

    @property
    def steps_an_epoch(self) -> int:
        """Optimizer steps of the run in one epoch."""
        return -(-SAMPLES // (train_replica.BATCH * self.count * self.processes))

    def steps(self) -> list[tuple[int, list[int], float]]:
        """(epoch, ids, sum of the losses) of each step that counted."""
        made = [row for _, rows in self.rows() for row in rows if "step" in row]
        members = {row["step"]: row["members"] for row in sorted(made, key=lambda row: row["time"])}
        attempts: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
        for name, rows in self.rows():
            for row in rows:
                if "attempt" in row and members.get(row["attempt"]) == row["members"]:
                    known = attempts[row["attempt"]].get(name)
                    if known is None or known["time"] < row["time"]:
                        attempts[row["attempt"]][name] = row
        steps = []
        for number in sorted(members):
            # The newest attempts: one of a replica that was lost in an earlier one may be among them.
            rows = sorted(attempts[number].values(), key=lambda row: row["time"])[-members[number] :]
            ids = [sample for row in rows for sample in row["ids"]]
            steps.append((number // self.steps_an_epoch, ids, sum(row["loss"] for row in rows)))
        return steps

    def check_samples(self) -> list[tuple[int, list[int], float]]:
        """Equal weights, and every sample once an epoch; returns the steps."""
        ends = {rows[-1]["end"] for _, rows in self.rows() if "end" in rows[-1]}
        assert len(ends) == 1, ends
        steps = self.steps()
        seen: dict[int, list[int]] = defaultdict(list)
        for epoch, ids, _ in steps:
            seen[epoch] += ids
        for epoch, ids in seen.items():
            assert sorted(ids) == list(range(SAMPLES)), f"epoch {epoch}"
        return steps

    def check(self) -> None:
        """What `check_samples` says, and the losses and weights of one process with these steps."""
        steps = self.check_samples()
        model, optimizer = train_replica.model_and_optimizer(self.dtype)
        _, inputs, targets = train_replica.data(SAMPLES, self.dtype).tensors
        for number, (_, ids, total) in enumerate(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[ids]), targets[ids])
            loss.backward()
            optimizer.step()
            assert total / len(ids) == pytest.approx(loss.item(), rel=2e-5), f"step {number}"
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(torch.load(self.folder / "weights-0-0.pt"), weights, rtol=1e-4, atol=1e-5)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts replicas, and ends them."""
    running = []

    def start(*arguments: Any, **options: Any) -> Replicas:
        running.append(Replicas(tmp_path, *arguments, **options))
        return running[-1]

    yield start
    for replicas in running:
        if replicas.launch.poll() is None:
            replicas.launch.terminate()
            replicas.launch.wait(timeout=60)


@pytest.mark.parametrize(
    ("backend", "count", "processes", "kills"),
    [("torchft", 2, 1, KILLS), ("torchft", 4, 1, KILLS), ("torchft-fsdp2", 2, 2, 1)],
)
def test_killed_replicas_return_and_no_sample_is_lost(
    started: Any, backend: str, count: int, processes: int, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = random.Random(7)
    dtype = torch.float64 if kills > LONG else torch.float32
    replicas = started(backend, count, processes, dtype=dtype)
    replicas.wait_for_everyone()
    delays = []
    for _ in range(kills):
        time.sleep(chosen.random() * 2)
        delays.append(replicas.kill(chosen.randrange(count)))
        replicas.wait_for_everyone()
    replicas.finish()
    replicas.check()
    with capsys.disabled():
        longest, median = max(delays), sorted(delays)[len(delays) // 2]
        print(f"\n{backend} x {count}: next step after {median:.2f} s (longest {longest:.2f}), heartbeat {HEARTBEAT} s")


@pytest.mark.parametrize(
    ("backend", "processes"),
    [("torchft-local-sgd", 1), ("torchft-diloco", 1), ("torchft-fsdp2-local-sgd", 2), ("torchft-fsdp2-diloco", 2)],
)
def test_replicas_that_train_apart_return_too_and_their_rounds_are_made_again(
    started: Any, backend: str, processes: int
) -> None:
    chosen = random.Random(5)
    replicas = started(backend, 2, processes, "--torchft_sync_every=10")
    replicas.wait_for_everyone()
    for _ in range(2):
        time.sleep(chosen.random() * 2)
        replicas.kill(chosen.randrange(2))
        replicas.wait_for_everyone()
    replicas.finish()
    replicas.check_samples()
    attempts = [(name, row["attempt"]) for name, rows in replicas.rows() for row in rows if "attempt" in row]
    assert len(set(attempts)) < len(attempts), "no round was made again"


def test_a_run_that_lost_all_replicas_goes_on_from_its_newest_checkpoint(started: Any) -> None:
    replicas = started("torchft", 2, save_every=10)
    replicas.wait_for_everyone()
    while len(replicas.noted("saved")) < 4:
        time.sleep(0.1)
    replicas.kill_all()
    saved = replicas.noted("saved")[-1]
    replicas.wait_for_everyone()
    first = min(row["step"] for replica in range(2) for row in replicas.newest(replica) if "step" in row)
    assert first == saved + 1
    replicas.finish()
    replicas.check()


def test_a_replica_that_was_paused_gets_the_state_of_the_others(started: Any) -> None:
    replicas = started("torchft", 2)
    replicas.wait_for_everyone()
    assert replicas.pause(1, 4 * HEARTBEAT) > 0
    replicas.wait_for_everyone()
    replicas.finish()
    replicas.check()


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have the simulated device here")
def test_a_replica_on_another_device_than_the_cpu_returns_too(started: Any) -> None:
    replicas = started("torchft", 2, device="simulated")
    replicas.wait_for_everyone()
    assert set(replicas.noted("device")) == {"simulated:0"}
    replicas.kill(1)
    replicas.wait_for_everyone()
    replicas.finish()
    replicas.check()
