"""The model that `prepare` returns: the layers of this process, and the schedules that run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from accel_ops import gather_object

__all__ = ("Pipeline", "layers_of")

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def layers_of(model: nn.Sequential, stage: int, stages: int) -> nn.Sequential:
    """The layers of a stage, which have about as many parameters as those of any other."""
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model]
    before, chosen = 0, []
    for layer, size in zip(model, sizes, strict=True):
        # A layer belongs to the stage in which its middle parameter lies.
        if min(int((before + size / 2) * stages / max(sum(sizes), 1)), stages - 1) == stage:
            chosen.append(layer)
        before += size
    return nn.Sequential(*chosen)


class Pipeline(nn.Module):
    """The layers of this process. In training, forward computes loss and gradients; without targets, outputs.

    Args:
        model: the user's model; only the parameters of this stage are registered.
        group: the processes of the pipeline, in the order of their stages.
        device: of the parameters.
        schedule: key of `SCHEDULES`.
        micro_batches: parts of a batch.
        window: returns the number of batches of a step, by which gradients are divided.
        dtype: the dtype in which layers compute; None: that of the weights.
    """

    def __init__(
        self,
        model: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        schedule: str,
        micro_batches: int,
        window: Callable[[], int],
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.whole = (model,)
        self.group, self.stage, self.stages = group, dist.get_rank(group), dist.get_world_size(group)
        self.layers = layers_of(model, self.stage, self.stages)
        self._device, self._schedule, self._window, self._dtype = device, schedule, window, dtype
        self._micro_batches = micro_batches
        self._schedules: dict[Any, Any] = {}

    def train(self, mode: bool = True) -> Pipeline:
        """Switch the user's model too, of which the layers are a part."""
        self.whole[0].train(mode)
        return super().train(mode)

    # Schedules send and receive, which torch.compile cannot trace.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss of a batch that every stage has, whose gradients are then there; or outputs."""
        trains = targets is not None and torch.is_grad_enabled()
        schedule = self._scheduled(inputs.shape, trains)
        given = (inputs,) if self.stage == 0 else ()
        last = self.stage == self.stages - 1
        losses: list[Tensor] = []
        with torch.autocast(self._device.type, self._dtype or torch.bfloat16, enabled=self._dtype is not None):
            if trains:
                schedule.step(*given, target=targets if last else None, losses=losses)
            else:
                with torch.no_grad():
                    outputs = schedule.step(*given)
        if trains:
            loss = torch.stack(losses).sum().detach() * self._window() if losses else None
            return self._from_last(loss).requires_grad_()
        outputs = self._from_last(outputs.float() if last else None)
        return outputs if targets is None else self.whole[0].loss(outputs, targets)

    def _scheduled(self, shape: torch.Size, trains: bool) -> Any:
        """The schedule for a shape of inputs: stages agree on the shapes of what they send once."""
        key = (shape, trains, torch.is_inference_mode_enabled())
        if key not in self._schedules:
            stage = PipelineStage(self.layers, self.stage, self.stages, self._device, group=self.group)
            chosen = SCHEDULES[self._schedule] if trains else ScheduleGPipe
            loss = self._loss_of_part if trains else None
            self._schedules[key] = chosen(stage, self._micro_batches, loss_fn=loss, scale_grads=False)
        return self._schedules[key]

    def _loss_of_part(self, outputs: Tensor, targets: Tensor) -> Tensor:
        part: Tensor = self.whole[0].loss(outputs.float(), targets)
        return part / (self._micro_batches * self._window())

    def _from_last(self, value: Tensor | None) -> Tensor:
        """What the last stage has, on all stages."""
        received: Tensor = gather_object([value], group=self.group)[-1]
        return received.to(self._device)
