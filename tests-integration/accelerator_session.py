"""The kit's training run, driven by an Accelerator in place of the kit's own short loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_plugins.bundle import Bundle
from accel_plugins.testing.reference_loop import Case, Session, loss_of, make_model, make_optimizer
from accel_state import current
from accel_state.kwargs import KwargsHandler
from accel_torch import Accelerator, GradientAccumulationPlugin, GradScalerKwargs

__all__ = ("AcceleratorSession",)


class AcceleratorSession(Session):
    """What users write, with the backend of a case."""

    def __init__(self, case: Case, model: nn.Module | None = None, init_scale: float = 256.0) -> None:
        handlers: list[Any] = [GradScalerKwargs(init_scale=init_scale)]
        plugin = None
        if isinstance(case.config, KwargsHandler):
            handlers.append(case.config)
        else:
            plugin = case.config
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=case.precision,
            backend=case.manifest.name,
            fsdp_plugin=plugin,
            kwargs_handlers=handlers,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=case.accumulation, sync_each_batch=not case.no_sync
            ),
        )
        self.process = current.process()
        self.case, self.manifest = case, case.manifest
        self.gradient = self.accelerator.gradient_state
        self.strategy = self.accelerator._engine.strategy
        self.user_model = make_model() if model is None else model
        prepared = self.prepare(Bundle.of([self.user_model, make_optimizer(case, self.user_model)]))
        self.model, self.optimizer = prepared.models[0], prepared.optimizers[0]
        self.schedulers = []

    def prepare(self, bundle: Bundle) -> Bundle:
        count = len(bundle.models)
        made = self.accelerator.prepare(*bundle.models, *bundle.optimizers)
        bundle.models[:], bundle.optimizers[:] = made[:count], made[count:]
        return bundle

    def follow(self, scheduler: Any) -> Any:
        self.schedulers.append(self.accelerator.prepare(scheduler))
        return self.schedulers[-1]

    def save(self, folder: Path, step: int = 0) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: Path) -> int:
        self.accelerator.load_state(folder)
        return self.accelerator.step

    def backward(self, batch: tuple[Tensor, Tensor]) -> float:
        parts, total = self.micro_batches(batch), 0.0
        for inputs, targets in parts:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, inputs, targets)
                self.accelerator.backward(loss)
            total += loss.item()
        return total / len(parts)

    def complete_gradients(self) -> None:
        self.accelerator.unscale_gradients(self.optimizer)

    def clip(self) -> float | None:
        norm: Any = None
        if self.case.clip_norm is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.clip_norm, self.case.norm_type)
        if self.case.clip_value is not None:
            self.accelerator.clip_grad_value_(self.model.parameters(), self.case.clip_value)
        return None if norm is None else float(norm)

    def step(self) -> bool:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return not self.accelerator.optimizer_step_was_skipped

    def mean(self, value: float) -> float:
        return float(self.accelerator.reduce(torch.tensor(value, dtype=torch.float64), "mean"))

    def weights(self) -> dict[str, list[Any]]:
        state = self.accelerator.get_state_dict(self.model)
        whole = self.accelerator._engine.strategy.writes_weights()
        return {name: value.tolist() for name, value in state.items()} if whole else {}
