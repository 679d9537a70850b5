"""Losses with weights of their own: each is divided by its own sum over all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accel_state.errors import Conflict, NotOffered
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, count_labels

# By step, then by micro-batch, then by process: (samples, labels that count).
BATCHES = [
    [[(3, 5), (1, 2), (2, 0), (4, 9)], [(1, 0), (2, 6), (3, 4), (1, 1)], [(2, 3), (2, 1), (1, 1), (5, 8)]],
    [[(2, 0), (4, 11), (1, 3), (2, 2)], [(2, 4), (1, 1), (1, 2), (3, 7)], [(1, 2), (3, 5), (2, 6), (1, 0)]],
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def group(request: pytest.FixtureRequest, processes: Callable[[int], Processes]) -> Processes:
    return processes(request.param)


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch_of(step: int, number: int, process: int) -> dict[str, Tensor]:
    samples, count = BATCHES[step][number][process]
    generator = torch.Generator().manual_seed(100 * step + 10 * number + process)
    labels = torch.randint(4, (samples, 3), generator=generator)
    labels.view(-1)[count:] = -100
    return {"x": torch.randn(samples, 3, 5, generator=generator, dtype=torch.float64), "labels": labels}


def token_loss(values: Tensor, labels: Tensor) -> Tensor:
    loss = cross_entropy(values.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss / count_labels(labels).clamp(min=1)


def sample_loss(values: Tensor) -> Tensor:
    return values.square().sum((1, 2)).mean()


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return full.detach().clone()


def accelerator_of(backend: str, steps: int) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10)
    return Accelerator(
        cpu=True,
        backend=backend,
        fsdp_plugin=plugin if backend == "fsdp2" else None,
        gradient_accumulation_steps=steps,
    )


def train(backend: str, steps: int, kinds: int, in_block: bool, clips: bool) -> list[list[Tensor]]:
    """Complete gradients of each step."""
    accelerator = accelerator_of(backend, steps)
    plain = model_of()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    gradients = []
    for step in range(2):
        for number in range(steps):
            batch = batch_of(step, number, accelerator.process_index)

            def micro_batch(batch: dict[str, Tensor] = batch) -> None:
                values = model(batch["x"])
                accelerator.backward(token_loss(values, batch["labels"]), weight=count_labels(batch))
                if kinds >= 2:
                    accelerator.backward(sample_loss(values), weight=len(values))
                if kinds == 3:
                    accelerator.backward(values[..., 0].exp().mean(), weight=4.0e6 * values[..., 0].numel())
                if accelerator.sync_gradients and clips:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()

            if in_block:
                with accelerator.accumulate(model):
                    micro_batch()
            else:
                micro_batch()
        gradients.append([whole(parameter.grad) for parameter in model.parameters()])  # type: ignore[arg-type]
        assert accelerator.sync_gradients
        optimizer.zero_grad()
    return gradients


def reference(processes: int, steps: int, kinds: int, clips: bool) -> list[list[Tensor]]:
    """Those of plain torch with the batches of all processes together."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients = []
    for step in range(2):
        batches = [batch_of(step, number, process) for number in range(steps) for process in range(processes)]
        x, labels = (torch.cat([batch[key] for batch in batches]) for key in ("x", "labels"))
        values = model(x)
        loss = token_loss(values, labels)
        if kinds >= 2:
            loss = loss + sample_loss(values)
        if kinds == 3:
            loss = loss + values[..., 0].exp().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        gradients.append([whole(parameter.grad) for parameter in model.parameters()])  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return gradients


CASES = [
    (1, 2, True, False),
    (1, 2, False, True),
    (2, 1, True, False),
    (1, 1, False, False),
    (2, 1, True, True),
    (2, 2, True, False),
    (3, 2, True, True),
    (3, 3, True, False),
]


def train_all(backend: str) -> list[list[list[Tensor]]]:
    return [train(backend, *case) for case in CASES]


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_each_loss_has_its_own_denominator(group: Processes, backend: str) -> None:
    results = group.run(train_all, "single" if group.count == 1 else backend)
    for place, (steps, kinds, _, clips) in enumerate(CASES):
        wanted = reference(group.count, steps, kinds, clips)
        for result in results:
            torch.testing.assert_close(result[place], wanted, rtol=1e-9, atol=1e-9)


def refused() -> list[str]:
    found = []
    accelerator = accelerator_of("ddp", 2)
    accelerator.gradient_state.plugin.sync_each_batch = True
    plain = model_of()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    x = torch.randn(2, 3, 5, dtype=torch.float64)

    def refusal(*errors: Any) -> Any:
        return pytest.raises(errors)

    with refusal(NotOffered) as caught, accelerator.accumulate(model):
        values = model(x)
        accelerator.backward(sample_loss(values), weight=1)
        accelerator.backward(sample_loss(values), weight=2)
    found.append(str(caught.value))
    accelerator.gradient_state.plugin.sync_each_batch = False
    accelerator.step, accelerator.sync_gradients = 0, True
    with refusal(Conflict) as caught:
        for losses in (2, 3):
            with accelerator.accumulate(model):
                values = model(x)
                for _ in range(losses):
                    accelerator.backward(sample_loss(values), weight=1)
    found.append(str(caught.value))
    with refusal(Conflict) as caught:
        for weights in ((None,), (1, 1)):
            with accelerator.accumulate(model):
                values = model(x)
                for weight in weights:
                    accelerator.backward(sample_loss(values), weight=weight)
    found.append(str(caught.value))
    optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = 1
    accelerator.step, accelerator.sync_gradients = 0, True
    with refusal(Conflict) as caught, accelerator.accumulate(model, weight=2):
        accelerator.backward(sample_loss(model(x)), weight=2)
    found.append(str(caught.value))
    accelerator.backward(sample_loss(model(x)), weight=1)
    with refusal(Conflict) as caught:
        accelerator.backward(sample_loss(model(x)))
    found.append(str(caught.value))
    optimizer.step()
    values = model(x)
    for _ in range(1 + (accelerator.process_index == 0)):
        accelerator.backward(sample_loss(values), weight=1)
    accelerator.backward(sample_loss(values), weight=1)
    with refusal(Conflict) as caught:
        optimizer.step()
    found.append(str(caught.value))
    return found


def test_what_cannot_be_weighted_is_refused_on_all_processes(two: Processes) -> None:
    for several, window, unweighted_first, mixed, unweighted, numbers in two.run(refused):
        assert "cannot be reduced over the processes" in several
        assert "have different numbers of losses on process 0" in window
        assert "Give every micro-batch a weight, or none" in unweighted_first
        assert "Give each loss its weight in backward, and none in accumulate" in mixed
        assert "Give every micro-batch a weight, or none" in unweighted
        assert "The processes have 3, 2 losses" in numbers
