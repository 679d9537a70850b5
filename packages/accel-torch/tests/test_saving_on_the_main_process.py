"""`if accelerator.is_main_process: accelerator.save_state(...)`, as many scripts for the original library have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.checkpoint.manifest import read_manifest, verify
from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator


def prepared(**options: Any) -> tuple[Accelerator, Any, Any]:
    fresh()
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 4) * (1 + accelerator.process_index)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def saves_on_main(folder: str, later: str, async_save: bool) -> tuple[bool, bool, list[float]]:
    """Save on the main process while the others go on, then on all; whether both load, and weights after all."""
    accelerator, model, optimizer = prepared()
    train(accelerator, model, optimizer)
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    if accelerator.is_main_process:
        accelerator.save_state(f"{folder}/alone", async_save=async_save)
    if later == "backward":
        train(accelerator, model, optimizer)
    else:
        accelerator.wait_for_everyone()
    train(accelerator, model, optimizer)
    accelerator.save_state(f"{folder}/all")
    trained = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.load_state(f"{folder}/alone")
    is_back = all(torch.equal(value, saved[name]) for name, value in accelerator.get_state_dict(model).items())
    accelerator.load_state(f"{folder}/all")
    weights = accelerator.get_state_dict(model)
    is_trained = all(torch.equal(value, trained[name]) for name, value in weights.items())
    return is_back, is_trained, [float(value.sum()) for value in weights.values()]


@pytest.mark.parametrize(("later", "async_save"), [("backward", False), ("collective", False), ("backward", True)])
def test_the_main_process_saves_alone_while_the_others_wait_for_it_in_a_later_call(
    two: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture, later: str, async_save: bool
) -> None:
    (back, trained, weights), other = two.run(saves_on_main, str(tmp_path), later, async_save)
    assert (back, trained) == (True, True)
    assert other == (True, True, weights)
    for name, alone in (("alone", True), ("all", None)):
        manifest = read_manifest(tmp_path / name)
        assert manifest is not None
        assert manifest.facts.get("alone") is alone
        assert verify(tmp_path / name, hashes=True).good
        states = [path.name for path in (tmp_path / name).glob("random_states_*")]
        assert len(states) == (1 if alone else 2)


def refused_on_main(folder: str) -> str:
    """The error of the main process where no process has all weights."""
    from accel_torch import FullyShardedDataParallelPlugin

    accelerator, model, optimizer = prepared(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    train(accelerator, model, optimizer)
    message = ""
    if accelerator.is_main_process:
        with pytest.raises(CheckpointError) as refused:
            accelerator.save_state(f"{folder}/alone")
        message = str(refused.value)
    accelerator.wait_for_everyone()
    return message


def test_sharded_weights_cannot_be_saved_by_one_process(two: Processes, tmp_path: Path) -> None:
    first, second = two.run(refused_on_main, str(tmp_path))
    assert "Process 1 has ended, or is in a later call" in first
    assert "on every process" in first
    assert second == ""
    assert not (tmp_path / "alone").exists()


def comes_late(folder: str) -> bool:
    """A process that is only late takes part, although the first one looks at it meanwhile."""
    import time

    accelerator, model, optimizer = prepared()
    train(accelerator, model, optimizer)
    if not accelerator.is_main_process:
        # Longer than the pause between several looks.
        time.sleep(6)
    accelerator.save_state(f"{folder}/late")
    manifest = read_manifest(Path(folder) / "late")
    return manifest is not None and "alone" not in manifest.facts


def test_a_process_that_is_only_late_takes_part(two: Processes, tmp_path: Path) -> None:
    assert two.run(comes_late, str(tmp_path)) == [True, True]
