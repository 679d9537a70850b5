"""What a guard of steps adds to a step."""

from __future__ import annotations

from typing import Any, Final

from bench.case import Call, Case, Scope, Work

STEPS, LAYERS, WIDTH = 50, 4, 16

METHOD: Final = (
    "Guard: CPU time of a step of 4 small layers that clips, with `StepGuard(spike=1e6)`, in rounds of 50; "
    '"raw" is the same step with an Accelerator that has no guard. The gradients are below the limit, or scaled.'
)


def steps(limit: float, *handlers: Any) -> Call:
    """Training steps with an Accelerator, which clips to a limit."""
    import torch

    from accel_torch import Accelerator

    accelerator = Accelerator(cpu=True, kwargs_handlers=list(handlers))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1e-4))
    inputs = torch.randn(8, WIDTH)

    def train() -> None:
        for _ in range(STEPS):
            accelerator.backward(model(inputs).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()

    return train


def work(limit: float) -> Work:
    """Steps that are judged, beside those that are not."""

    def guarded(scope: Scope) -> Call:
        from accel_torch import StepGuard

        return steps(limit, StepGuard(spike=1e6))

    def unguarded(scope: Scope) -> Call:
        return steps(limit)

    return Work(guarded, raw=unguarded)


CASES: Final = (
    Case("guard of steps", "judging a step below the limit", "CPU us", "ours - raw", 12.0, work(1.0), METHOD, STEPS),
    Case("guard of steps", "judging a step that is scaled", "CPU us", "ours - raw", 12.0, work(1e-3), METHOD, STEPS),
)
