"""Records losses and learning rates of each step, for TensorBoard if `tensorboard_dir` is set."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_plugins.megatron.released import parallel_state
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from accel_plugins.megatron.config import MegatronLMPlugin

__all__ = ("Recorder",)

_logger: Final = logging.getLogger(__name__)
_TENSORBOARD: Final = Requirement("tensorboard")


class Recorder:
    """Writes on one process: the last one, which knows the losses.

    Args:
        plugin: says the folder, and whether norms and scales are written too.

    Raises:
        Missing: a folder for TensorBoard was named, and it is not installed.
    """

    def __init__(self, plugin: MegatronLMPlugin) -> None:
        self._all = plugin.set_all_logging_options
        self._writer: Any = None
        if plugin.tensorboard_dir is not None and self._is_last():
            _TENSORBOARD.demand(f"Cannot use MegatronLMPlugin(tensorboard_dir={plugin.tensorboard_dir!r}).")
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(plugin.tensorboard_dir)

    @staticmethod
    def _is_last() -> bool:
        import torch.distributed as dist

        return dist.get_rank() == dist.get_world_size() - 1

    def record(self, engine: Any, report: Mapping[str, Any], stepped: bool) -> None:
        """Write a step of training."""
        if self._writer is None:
            return
        values = {name: float(loss) for name, loss in report.items() if name != "logits"}
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        values["learning-rate"] = float(inner.param_groups[0]["lr"])
        if self._all:
            values["grad-norm"] = engine.grad_norm or 0.0
            values["loss-scale"] = float(inner.get_loss_scale())
            values["skipped"] = float(not stepped)
        self._write(values, engine.iteration)

    def evaluated(self, means: Mapping[str, float], iteration: int) -> None:
        """Write the means of an evaluation."""
        if parallel_state.get_data_parallel_rank() == 0 and parallel_state.is_pipeline_last_stage():
            shown = ", ".join(f"{name}={value:.6g}" for name, value in means.items())
            _logger.info("Evaluation after %d steps: %s", iteration, shown)
        if self._writer is not None:
            self._write({f"{name} validation": value for name, value in means.items()}, iteration)

    def _write(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()
