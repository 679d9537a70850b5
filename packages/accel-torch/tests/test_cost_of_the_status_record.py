"""What the status record costs a step: byte codes, system calls and messages are counted, because times are noise."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_state.watch.record import STATUS_RECORD
from accel_testing.processes import Processes, run_command
from accel_testing.profiling import profile
from accel_torch import Accelerator

BYTE_CODES = 250
"""Most byte codes of a step. One takes about 5 ns, and 1.5 microseconds are allowed."""

STEPS = 20
ON_THE_PATH = ("watch/record.py", "accel_torch/time_recorder.py")


def trained(folder: Path) -> Any:
    """A run with everything that is recorded: a function that makes the steps of an epoch."""
    accelerator = Accelerator(cpu=True, goodput=True, straggler_report=True, project_dir=folder)
    model: Any = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    samples: Any = torch.zeros(STEPS * accelerator.num_processes, 1)
    model, optimizer, loader = accelerator.prepare(model, sgd, DataLoader(samples))

    def epoch() -> None:
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()

    # The first steps are watched for mistakes.
    for _ in range(3):
        epoch()
    return epoch


def test_a_step_executes_few_byte_codes(fresh_state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_STATUS_FOLDER", str(tmp_path))
    epoch = trained(tmp_path)
    executed: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(ON_THE_PATH):
            return None
        frame.f_trace_opcodes = True
        executed[frame.f_code.co_name] += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        epoch()
    finally:
        sys.settrace(before)
    # The most steps of an optimizer of this process, which may have had others.
    assert STATUS_RECORD.steps >= 4 * STEPS
    # Without the functions that an epoch calls once.
    each = {name: count / STEPS for name, count in executed.items() if count > 5 * STEPS and "epoch" not in name}
    assert set(each) == {"batch_requested", "batch_given", "enter"}
    assert sum(each.values()) < BYTE_CODES, each


TRACED = """
import os
import sys

import torch
from accel_torch import Accelerator

accelerator = Accelerator(cpu=True, goodput=True, straggler_report=True, project_dir=sys.argv[1])
model = torch.nn.Linear(1, 1)
loader = torch.utils.data.DataLoader(torch.zeros(60, 1))
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for number, batch in enumerate(loader):
    if number in (20, 50):
        os.getppid()
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_step_makes_no_system_call(tmp_path: Path) -> None:
    calls, script = tmp_path / "calls", tmp_path / "train.py"
    script.write_text(TRACED, encoding="utf-8")
    # Only the main thread. Memory and the lock of the interpreter are not the record's.
    traced = ["strace", "-e", "trace=!%memory,futex", "-o", str(calls), sys.executable, str(script), str(tmp_path)]
    environment = {"ACCEL_STATUS_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run_command(traced, timeout=280, env=environment, cwd=tmp_path)
    if "Operation not permitted" in done.stderr:
        pytest.skip("this system does not let a process trace another one")
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().splitlines()
    first, last = (number for number, line in enumerate(lines) if line.startswith("getppid("))
    assert lines[first + 1 : last] == []
    assert list(tmp_path.glob("rank0.*.status"))


def messages(folder: str) -> list[str]:
    """Functions of collectives and of the store that the main thread calls in an epoch."""
    epoch = trained(Path(folder))
    called = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(("accel_state.transport", "accel_state.protocol", "accel_ops")):
            called.append(f"{module}.{frame.f_code.co_name}")

    with profile(note):
        epoch()
    return called


def test_a_step_sends_no_message_of_ours(two: Processes, tmp_path: Path) -> None:
    # Averaging the gradients is up to torch.
    assert two.run(messages, str(tmp_path), environment={"ACCEL_STATUS_FOLDER": str(tmp_path)}) == [[], []]
