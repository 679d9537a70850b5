"""What cannot work is refused with the reason and with what to do: real launches and real lighthouses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torchft")

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accel_state.errors import CollectiveError, Conflict, NotOffered, NotReady
from accel_torch import Accelerator

LAUNCH = "import sys; {before}; from accel_cli.main import main; sys.exit(main(sys.argv[1:]))"


def refused_launch(tmp_path: Path, before: str = "pass", **variables: str) -> list[str]:
    """The lines of the error of a launch in a Python that executes a statement first."""
    (tmp_path / "train.py").write_text("raise SystemExit('the script was started')\n")
    argv = [sys.executable, "-c", LAUNCH.format(before=before), "launch", "--backend=torchft", "--cpu", "train.py"]
    done = subprocess.run(
        argv, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr.splitlines()


def test_a_launch_without_torchft_is_refused_with_the_install_line(tmp_path: Path) -> None:
    # None in `sys.modules` is Python's own way to let a module be missing.
    lines = refused_launch(tmp_path, "sys.modules['torchft'] = None")
    assert lines == [
        "accel: Cannot start the backend 'torchft' (--backend).",
        "  The package 'torchft' is not installed.",
        '  Run: pip install "torchft>=0.2"',
    ]


def test_a_launch_with_another_version_of_torchft_is_refused_with_the_install_line(tmp_path: Path) -> None:
    older = tmp_path / "older"
    (older / "torchft").mkdir(parents=True)
    (older / "torchft" / "__init__.py").touch()
    (older / "torchft-0.1.1.dist-info").mkdir()
    (older / "torchft-0.1.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchft\nVersion: 0.1.1\n"
    )
    path = os.pathsep.join([str(older), *filter(None, [os.environ.get("PYTHONPATH")])])
    lines = refused_launch(tmp_path, PYTHONPATH=path)
    assert lines == [
        "accel: Cannot start the backend 'torchft' (--backend).",
        "  torchft 0.1.1 is installed; >=0.2 is needed.",
        '  Run: pip install "torchft>=0.2"',
    ]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def accelerator_of_a_replica(patch: pytest.MonkeyPatch, lighthouse: str, **variables: str) -> Accelerator:
    """An Accelerator in the environment that the launcher gives a replica."""
    given = {"TORCHFT_LIGHTHOUSE": lighthouse, "ACCEL_TORCHFT_HOST": "127.0.0.1", **variables}
    for name, value in given.items():
        patch.setenv(name, value)
    return Accelerator(cpu=True, backend="torchft")


def test_a_data_set_without_an_order_is_refused(
    fresh_state: None, monkeypatch: pytest.MonkeyPatch, lighthouse: str
) -> None:
    accelerator = accelerator_of_a_replica(monkeypatch, lighthouse)
    with pytest.raises(Conflict) as refused:
        accelerator.prepare(DataLoader(Stream(), batch_size=2))
    assert refused.value.obstacle
    assert refused.value.remedy


def train(accelerator: Accelerator, data: Dataset[tuple[torch.Tensor, ...]], between: Callable[[int], None]) -> None:
    """Train a layer, and call a function before each step."""
    model = torch.nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=1)
    )
    for number, (inputs,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
        between(number)


def test_a_replica_without_a_launcher_is_refused(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = accelerator_of_a_replica(monkeypatch, "")
    with pytest.raises(NotReady, match="accel launch --backend torchft"):
        train(accelerator, TensorDataset(torch.ones(4, 2)), lambda number: None)


def test_a_lighthouse_that_does_not_answer_is_named(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "http://127.0.0.1:1"
    accelerator = accelerator_of_a_replica(monkeypatch, address, ACCEL_TORCHFT_QUORUM_TIMEOUT="2")
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=address):
        train(accelerator, TensorDataset(torch.ones(4, 2)), lambda number: None)
    # Far from the 60 s that a replica waits by default.
    assert time.monotonic() - began < 50


def test_a_lighthouse_that_dies_between_two_steps_is_named(
    fresh_state: None, monkeypatch: pytest.MonkeyPatch, own_lighthouse: tuple[subprocess.Popen[str], str]
) -> None:
    process, own_address = own_lighthouse
    accelerator = accelerator_of_a_replica(monkeypatch, own_address, ACCEL_TORCHFT_QUORUM_TIMEOUT="2")
    made: list[int] = []

    def between(number: int) -> None:
        made.append(number)
        if number == 2:
            process.kill()
            process.wait()

    with pytest.raises(CollectiveError) as refused:
        train(accelerator, TensorDataset(torch.ones(50, 2)), between)
    assert made == [0, 1, 2]
    assert str(refused.value.failure) == "Cannot begin step 3 of the run."
    assert f"The lighthouse {own_address}" in str(refused.value)
    assert "within 2 s" in str(refused.value)


def test_several_optimizers_are_refused(fresh_state: None, monkeypatch: pytest.MonkeyPatch, lighthouse: str) -> None:
    accelerator = accelerator_of_a_replica(monkeypatch, lighthouse)
    layers = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    with pytest.raises(NotOffered, match="several optimizers"):
        accelerator.prepare(*layers, *(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers))
