"""Micro-batches that count by their tokens: the gradient is that of the single big batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accel_state.errors import Conflict, NotReady, SettingError
from accel_state.protocol.header import eager_header_bytes
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, GradScalerKwargs

IGNORED = -100

# By step, then by micro-batch, then by process: how many of 12 tokens count. The second step has processes and whole
# micro-batches without any.
TOKENS = [
    [[12, 1, 7, 3], [2, 11, 5, 12], [6, 6, 1, 9]],
    [[0, 12, 4, 0], [0, 0, 0, 0], [3, 1, 0, 8]],
]


@pytest.fixture(scope="module", params=[1, 2, 4])
def group(request: pytest.FixtureRequest, processes: Callable[[int], Processes]) -> Processes:
    return processes(request.param)


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def micro_batch(step: int, number: int, process: int) -> tuple[Tensor, Tensor, int]:
    """Inputs, targets of which some are ignored, and how many are not."""
    tokens = TOKENS[step][number][process]
    generator = torch.Generator().manual_seed(100 * step + 10 * number + process)
    targets = torch.randint(4, (12,), generator=generator)
    targets[tokens:] = IGNORED
    return torch.randn(12, 5, generator=generator), targets, tokens


def plugin_of(backend: str) -> FullyShardedDataParallelPlugin | None:
    if backend != "fsdp2":
        return None
    return FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=30)


def full(tensor: Tensor) -> Tensor:
    whole: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return whole.detach()


def train(backend: str, loss_reduction: Any, as_tensor: bool, precision: str) -> dict[str, Any]:
    """Complete gradients of each step, weights at the end, and the collectives of our own transport."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=3,
        backend=backend,
        fsdp_plugin=plugin_of(backend),
        mixed_precision=precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    plain = model_of()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9))
    gradients, norms = [], []
    with recording() as records:
        for step in range(2):
            for number in range(3):
                inputs, targets, tokens = micro_batch(step, number, accelerator.process_index)
                weight = torch.tensor(tokens) if as_tensor else tokens
                with accelerator.accumulate(model, weight=weight, loss_reduction=loss_reduction):
                    accelerator.backward(cross_entropy(model(inputs), targets, reduction=loss_reduction))
                    if accelerator.sync_gradients:
                        norms.append(float(full(accelerator.clip_grad_norm_(model.parameters(), 1e9))))
                        gradients.append([full(p.grad).tolist() for p in model.parameters()])
                    optimizer.step()
                    optimizer.zero_grad()
    weights = {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}
    own = [(record.operation, record.nbytes) for record in records]
    return {"gradients": gradients, "norms": norms, "weights": weights, "own": own}


def one_big_batch(processes: int) -> dict[str, Any]:
    """The same in plain torch, each step as one batch of all tokens."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    gradients, norms = [], []
    for step in range(2):
        parts = [micro_batch(step, number, process) for number in range(3) for process in range(processes)]
        logits = model(torch.cat([inputs for inputs, _, _ in parts]))
        cross_entropy(logits, torch.cat([targets for _, targets, _ in parts])).backward()
        gradients.append([p.grad.tolist() for p in model.parameters() if p.grad is not None])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"gradients": gradients, "norms": norms, "weights": weights}


def near(actual: Any, expected: Any, rel: float = 1e-5) -> None:
    torch.testing.assert_close(
        [torch.tensor(one) for one in actual], [torch.tensor(one) for one in expected], rtol=rel, atol=rel / 10
    )


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("loss_reduction", "as_tensor"), [("mean", False), ("sum", True)])
def test_gradients_are_those_of_one_big_batch(
    group: Processes, backend: str, loss_reduction: str, as_tensor: bool
) -> None:
    expected = one_big_batch(group.count)
    for told in group.run(train, backend, loss_reduction, as_tensor, "no"):
        for step in range(2):
            near(told["gradients"][step], expected["gradients"][step])
        near(told["norms"], expected["norms"])
        if told["weights"]:
            near(told["weights"].values(), expected["weights"].values(), 1e-4)


def test_one_exchange_a_step_and_one_at_the_start_is_all_it_takes(group: Processes) -> None:
    for told in group.run(train, "ddp", "mean", False, "no"):
        assert told["own"] == [("all_gather", eager_header_bytes(group.count))] * (1 + 2)


def test_an_fp16_run_is_near_it(group: Processes) -> None:
    expected = one_big_batch(group.count)
    for told in group.run(train, "ddp", "sum", False, "fp16"):
        near(told["norms"], expected["norms"], 0.05)


def uneven_windows() -> tuple[list[float], list[float]]:
    """A loader whose last window is shorter: gradients of its two steps, with weights and by hand."""
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    bare = accelerator.unwrap_model(model)
    optimizer = accelerator.prepare(torch.optim.SGD(bare.parameters(), lr=0.0))
    data = torch.arange(1.0, 3 * accelerator.num_processes + 1)[:, None]
    seen, steps = [], []
    for (batch,) in accelerator.prepare(DataLoader(TensorDataset(data), batch_size=1)):
        weight = float(batch)
        with accelerator.accumulate(model, weight=weight):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            seen.append((weight, float(batch)))
            if accelerator.sync_gradients:
                everyones = accelerator.gather(torch.tensor(seen))
                steps.append((float(bare.weight.grad), float(everyones.prod(dim=1).sum() / everyones[:, 0].sum())))
                seen = []
            optimizer.zero_grad()
    return [actual for actual, _ in steps], [expected for _, expected in steps]


def test_a_shorter_last_window_is_a_mean_over_its_own_tokens(group: Processes) -> None:
    for actual, expected in group.run(uneven_windows):
        assert len(actual) == 2
        assert actual == pytest.approx(expected)


def bad_weight(bad: float) -> str:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    last = accelerator.process_index == accelerator.num_processes - 1
    with accelerator.accumulate(model, weight=bad if last else 1):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        with pytest.raises(SettingError) as caught:
            optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_an_error_on_every_process(group: Processes, bad: float) -> None:
    for message in group.run(bad_weight, bad):
        assert f"on process {group.count - 1}." in message


def no_tokens_at_all() -> float:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = next(model.parameters()).clone()
    with accelerator.accumulate(model, weight=0, loss_reduction="sum"):
        accelerator.backward(model(torch.ones(1, 2)).sum() * 0)
        optimizer.step()
    return float((next(model.parameters()) - before).abs().max())


def test_a_step_without_tokens_changes_nothing(group: Processes) -> None:
    assert set(group.run(no_tokens_at_all)) == {0.0}


# ----------------------------------------------------------------------------- one process


@pytest.fixture
def accelerator(fresh_state: None) -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def test_weights_for_some_micro_batches_of_a_window_are_refused(accelerator: Accelerator) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        pass
    with pytest.raises(Conflict, match="every micro-batch a weight"), accelerator.accumulate(model, weight=2):
        pass


def test_a_window_may_have_weights_and_the_next_none(accelerator: Accelerator) -> None:
    plain = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    gradients = []
    for weight in (1, 3, None, None, 1, 1):
        with accelerator.accumulate(model, weight=weight):
            accelerator.backward(model(torch.tensor([[float(weight or 2)]])).sum())
            optimizer.step()
            if accelerator.sync_gradients:
                gradients.append(float(plain.weight.grad))
            optimizer.zero_grad()
    assert gradients == [2.5, 2.0, 1.0]

    with accelerator.accumulate(model, weight=1):
        pass
    with pytest.raises(Conflict, match="every micro-batch a weight"), accelerator.accumulate(model):
        pass


def test_a_loss_is_a_mean_or_a_sum(accelerator: Accelerator) -> None:
    wrong: Any = "median"
    with pytest.raises(SettingError, match="'mean' or 'sum'"), accelerator.accumulate(weight=1, loss_reduction=wrong):
        pass


def test_a_checkpoint_inside_a_weighted_window_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model, weight=1):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(NotReady, match="have weights"):
        accelerator.save_state(tmp_path / "state")
