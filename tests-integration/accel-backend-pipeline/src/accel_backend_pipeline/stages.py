"""The model that `prepare` returns: the layers of this process, and the schedules that run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, distribute_tensor

from accel_backend_pipeline.config import PipelineConfig
from accel_ops import gather_object
from accel_plugins import Context, ModelPart

__all__ = ("Pipeline", "like", "whole")

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}


def whole(value: Any) -> Any:
    """The full tensor of one that tensor parallelism divides."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def like(value: Any, other: Tensor) -> Any:
    """A full tensor divided as another one of its shape is."""
    if not isinstance(other, DTensor) or not isinstance(value, Tensor) or value.shape != other.shape:
        return value
    return distribute_tensor(value.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


class Pipeline(nn.Module):
    """The layers of this process by the user's names. In training, forward computes loss and gradients.

    Args:
        model: the user's model; only the layers of this process are registered here.
        part: the stages of this process.
        group: the processes of the pipeline; the last stage is on the last one.
        config: the schedule, and the number of parts of a batch.
        context: that of the run.
    """

    def __init__(
        self, model: Any, part: ModelPart, group: dist.ProcessGroup, config: PipelineConfig, context: Context
    ) -> None:
        super().__init__()
        self.user_model, self._part = (model,), part
        self._group, self._config, self._context = group, config, context
        self._device = context.process.device
        self._layers: dict[int, list[nn.Module]] = {stage: [] for stage in part.stages}
        for number, (name, layer) in enumerate(model.named_children()):
            if part.has(number, len(model)):
                self.add_module(name, layer)
                self._layers[part.stage_of(number, len(model))].append(layer)
        self._schedules: dict[Any, Any] = {}

    def train(self, mode: bool = True) -> Pipeline:
        """Switch the user's model too, of which the layers are a part."""
        self.user_model[0].train(mode)
        return super().train(mode)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the weights of these layers from those of the whole model."""
        if strict and (wrong := self.user_model[0].state_dict().keys() ^ state_dict.keys()):
            raise RuntimeError(f"Missing or unexpected names: {', '.join(sorted(wrong))}.")
        own = {name: like(state_dict[name], value) for name, value in self.state_dict().items() if name in state_dict}
        return super().load_state_dict(own, strict=False, assign=assign)

    # Schedules send and receive, which torch.compile cannot trace.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss of a batch that every stage has, whose gradients are then there; or outputs."""
        trains = targets is not None and torch.is_grad_enabled()
        schedule = self._scheduled(inputs.shape, trains)
        given = (inputs,) if 0 in self._part.stages else ()
        last = self._part.count - 1 in self._part.stages
        losses: list[Tensor] = []
        dtype = self._context.precision.dtype
        with torch.autocast(self._device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            if trains:
                schedule.step(*given, target=targets if last else None, losses=losses)
            else:
                with torch.no_grad():
                    outputs = schedule.step(*given)
        if trains:
            loss = torch.stack(losses).sum().detach() * self._context.gradient.num_steps if losses else None
            return self._from_last(loss).requires_grad_()
        outputs = self._from_last(outputs.float() if last else None)
        return outputs if targets is None else self.user_model[0].loss(outputs, targets)

    def _scheduled(self, shape: torch.Size, trains: bool) -> Any:
        """The schedule for a shape of inputs: stages agree on the shapes of what they send once."""
        key = (shape, trains, torch.is_inference_mode_enabled())
        if key not in self._schedules:
            stages: list[Any] = [
                PipelineStage(nn.Sequential(*layers), stage, self._part.count, self._device, group=self._group)
                for stage, layers in self._layers.items()
            ]
            several = len(stages) > 1
            schedule = SCHEDULES[self._config.schedule] if trains or several else ScheduleGPipe
            loss = self._loss_of_part if trains else None
            batches = self._config.micro_batches
            made: Any = schedule(stages if several else stages[0], batches, loss_fn=loss, scale_grads=False)
            self._schedules[key] = made
        return self._schedules[key]

    def _loss_of_part(self, outputs: Tensor, targets: Tensor) -> Tensor:
        part: Tensor = self.user_model[0].loss(outputs.float(), targets)
        return part / (self._config.micro_batches * self._context.gradient.num_steps)

    def _from_last(self, value: Tensor | None) -> Tensor:
        """What the last stage has, on all stages."""
        received: Tensor = gather_object([value], group=self._group)[-1]
        return received.to(self._device)
