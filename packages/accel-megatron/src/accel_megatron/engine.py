"""The engine: the model that `prepare` returns with Megatron-LM. A call of it makes a whole step.

Its checkpoints have Megatron-LM's distributed format, which can be loaded on another number of processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from accel_megatron.objects import MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper
from accel_megatron.parallel import (
    dist_checkpointing,
    from_last_stage,
    mapping,
    parallel_state,
    pipeline_parallel,
    tensor_parallel,
)
from accel_megatron.train_steps import StepOutput, train_step_for
from accel_ops import broadcast_object_list
from accel_ops.agreement import raise_on_any_rank
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.shards import check_objects
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state import current
from accel_state.errors import CheckpointError, DataError, NotOffered
from accel_state.process import wait_for_everyone
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from accel_megatron.config import MegatronLMPlugin

__all__ = (
    "FOLDER",
    "MegatronEngine",
    "Recorder",
    "micro_batches",
)


class MegatronEngine(Module):
    """A model that Megatron-LM trains. In training, a call computes gradients, steps and advances the schedule.

    A call receives a batch of `micro_batch_size * num_micro_batches` samples as named arguments, and returns the loss,
    averaged over all data-parallel processes. Only the tensors of a batch are passed to the model.

    Args:
        accelerator: has `device` and `state.megatron_lm_plugin`.
        model: the parts of the model on this process.
        optimizer: Megatron-LM's optimizer, or a wrapper of it.
        scheduler: advanced after each optimizer step; None: no scheduler.

    Attributes:
        module: the parts of the model.
        base_model: the first part, unwrapped.
        iteration: number of steps so far.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        plugin = accelerator.state.megatron_lm_plugin
        self._plugin, self._device = plugin, accelerator.device
        self.module = torch.nn.ModuleList(model if isinstance(model, (list, tuple)) else [model])
        self.base_model = _innermost(self.module[0])
        self.optimizer, self.scheduler = optimizer, scheduler
        args = SimpleNamespace(**plugin.megatron_lm_default_args)
        self.train_step_handler = train_step_for(accelerator, args)
        self.module_config = self.get_module_config()
        self.iteration = 0
        self.num_floating_point_operations_so_far = 0
        self.report_memory_flag = False
        self.total_loss_dict: dict[str, float] = {}
        self.eval_total_loss_dict: dict[str, float] = {}
        self._evaluated = 0
        self.grad_norm: float | None = None
        self._recorder = Recorder(plugin)

    def get_module_config(self) -> Any:
        """Megatron-LM's configuration of the model."""
        return self.base_model.config

    def train(self, mode: bool = True) -> MegatronEngine:
        """Make calls train; with False, evaluate."""
        super().train(mode)
        if mode:
            self.log_eval_results()
        return self

    def eval(self) -> MegatronEngine:
        """Make calls evaluate: they only return a loss."""
        return self.train(False)

    # ------------------------------------------------------------------ one step

    def forward(self, **batch_data: Any) -> Any:
        """A training or evaluation step, on a batch by name or, with Megatron's datasets, on an iterator.

        Raises:
            DataError: the batch cannot be divided into micro-batches.
        """
        report = self.train_step(**batch_data) if self.training else self.eval_step(**batch_data)
        if self.training:
            _add(self.total_loss_dict, report)
        else:
            self._evaluated += 1
            _add(self.eval_total_loss_dict, report)
        return self._output(report)

    def train_step(self, **batch_data: Any) -> dict[str, Tensor]:
        """Compute gradients, step and advance the schedule; return the losses by name, and logits on request."""
        for part in self.module:
            part.zero_grad_buffer()  # type: ignore[operator]
        inner_optimizer(self.optimizer).zero_grad()
        report = self._run(batch_data, forward_only=False)
        stepped, norm, _ = inner_optimizer(self.optimizer).step()
        self.grad_norm = None if norm is None else float(norm)
        if isinstance(self.optimizer, MegatronLMOptimizerWrapper):
            self.optimizer.skipped = not stepped
        if stepped and self.scheduler is not None:
            self._move_schedule()
        self.iteration += 1
        consumed = self._plugin.consumed_samples
        consumed[0] += self._plugin.global_batch_size or 0
        self._recorder.record(self, report, bool(stepped))
        return report

    def eval_step(self, **batch_data: Any) -> dict[str, Tensor]:
        """The losses of a batch by name, without training."""
        with torch.no_grad():
            return self._run(batch_data, forward_only=True)

    def _move_schedule(self) -> None:
        inner = _plain_schedule(self.scheduler)
        if hasattr(inner, "lr_decay_steps"):
            inner.step(increment=self._plugin.global_batch_size)
        else:
            for _ in range(self._plugin.data_parallel_size or 1):
                inner.step()

    def _run(self, batch_data: Mapping[str, Any], forward_only: bool) -> dict[str, Tensor]:
        """Run forward, and in training backward, over all micro-batches and stages."""
        iterators, count = self._iterators(batch_data)
        lengths = self._plugin.megatron_lm_default_args
        shown = batch_data.get("input_ids")
        reports = pipeline_parallel.get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iterators,
            model=list(self.module),
            num_microbatches=count,
            seq_length=lengths.get("seq_length") if shown is None else shown.shape[1],
            micro_batch_size=self._plugin.micro_batch_size,
            decoder_seq_length=lengths.get("decoder_seq_length") if shown is None else None,
            forward_only=forward_only,
        )
        return self._together(reports)

    def _forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Any]:
        """The train step's function; a mean loss counts as one token where Megatron-LM needs a number of tokens."""
        output, loss_func = self.train_step_handler.forward_step(data_iterator, model)

        @wraps(getattr(loss_func, "func", loss_func))
        def counted(output_tensor: Any) -> Any:
            returned = loss_func(output_tensor)
            if len(returned) == 2 and self.module_config.calculate_per_token_loss:
                loss, report = returned
                return loss, torch.ones((), dtype=torch.int, device=loss.device), report
            return returned

        return output, counted

    # ------------------------------------------------------------------ data

    def get_batch_data_iterator(self, batch_data: Mapping[str, Any]) -> Any:
        """The micro-batches of a batch; one iterator for each part of the model, if there are several.

        Raises:
            DataError: the batch cannot be divided into micro-batches.
        """
        iterators, _ = self._iterators(batch_data)
        return iterators

    def _iterators(self, batch_data: Mapping[str, Any]) -> tuple[Any, int]:
        parts, plugin = len(self.module), self._plugin
        if not batch_data:
            raise DataError(
                "Cannot call a model of Megatron-LM without a batch.",
                "The model receives the tensors of a batch as named arguments.",
                "Call model(**batch), also with batches of Megatron-LM's own data sets.",
            )
        chunks = micro_batches(batch_data, plugin.micro_batch_size)
        iterators: list[Iterator[Any]] = [iter(chunks) for _ in range(parts)]
        return (iterators if parts > 1 else iterators[0]), len(chunks)

    # ------------------------------------------------------------------ outputs

    def _together(self, reports: list[Any]) -> dict[str, Tensor]:
        """Losses averaged over micro-batches, equal on all stages; concatenated logits, on the last stage."""
        names = [name for name in reports[0] if name != "logits"] if reports else []
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            names = self._names_of_last_stage(names)
        means = {
            name: torch.stack([report[name].float() for report in reports]).mean()
            if reports
            else torch.zeros((), device=self._device)
            for name in names
        }
        merged = {name: from_last_stage(loss.to(self._device)) for name, loss in means.items()}
        if reports and "logits" in reports[0]:
            merged["logits"] = torch.cat([report["logits"] for report in reports])
        return merged

    def _names_of_last_stage(self, names: list[str]) -> list[str]:
        shared = [names]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        broadcast_object_list(shared, src=source, group=group)
        return shared[0]

    def _output(self, report: Mapping[str, Tensor]) -> Any:
        losses = [loss for name, loss in report.items() if name != "logits"]
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)
        logits = report.get("logits")
        size = self._plugin.megatron_lm_default_args.get("vocab_size")
        if logits is not None and logits.dim() == 3 and size is not None:
            logits = logits[..., :size]
        kind = getattr(self.train_step_handler, "model_output_class", None) or StepOutput
        return kind(loss=loss) if logits is None else kind(loss=loss, logits=logits)

    def log_eval_results(self) -> None:
        """Write the mean losses of the evaluation since the last call, if any, and reset them."""
        if self._evaluated:
            means = {name: total / self._evaluated for name, total in self.eval_total_loss_dict.items()}
            self._recorder.evaluated(means, self.iteration)
        self.eval_total_loss_dict, self._evaluated = {}, 0

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, output_dir: str | Path) -> None:
        """Write model, optimizer, schedule and generators into a folder; called on every process."""
        self.log_eval_results()
        save_engine(self, Path(output_dir), self._plugin)

    def load_checkpoint(self, input_dir: str | Path) -> None:
        """Load a checkpoint of `save_checkpoint`; called on every process.

        Raises:
            CheckpointError: the folder has no such checkpoint, or one of another model.
        """
        load_engine(self, Path(input_dir), self._plugin)


def micro_batches(batch: Mapping[str, Any], size: int | None) -> list[dict[str, Any]]:
    """The tensors of a batch by name, divided into micro-batches of `size` samples.

    Raises:
        DataError: the batch cannot be divided in this way.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    samples = {name: value.shape[0] if value.ndim else 0 for name, value in tensors.items()}
    failure = f"Cannot pass a batch of {samples} samples to Megatron-LM."
    if not samples:
        raise DataError(failure, "It has no tensors.", "Pass tensors with the samples as first dimension.")
    if len(set(samples.values())) != 1:
        raise DataError(
            failure, "Its tensors have different numbers of samples.", "Pass tensors with the same number of samples."
        )
    count = next(iter(samples.values()))
    if not size or not count or count % size:
        raise DataError(
            failure,
            f"The batch cannot be divided into micro-batches of {size} samples.",
            "Use the prepared loaders, with even_batches=True (the default) or with drop_last=True.",
        )
    return [{name: value[start : start + size] for name, value in tensors.items()} for start in range(0, count, size)]


def _add(totals: dict[str, float], report: Mapping[str, Tensor]) -> None:
    for name, loss in report.items():
        if name != "logits":
            totals[name] = totals.get(name, 0.0) + float(loss)


def _innermost(part: Any) -> Any:
    """A part of a model without the wrappers for gradient averaging and precision."""
    while hasattr(part, "module"):
        part = part.module
    return part


def _plain_schedule(scheduler: Any) -> Any:
    return scheduler.scheduler if isinstance(scheduler, MegatronLMSchedulerWrapper) else scheduler


_logger: Final = logging.getLogger(__name__)
_TENSORBOARD: Final = Requirement("tensorboard")


class Recorder:
    """Writes metrics for TensorBoard, on the last process, which has the losses.

    Args:
        plugin: the settings with the folder, and whether to write norms and scales too.

    Raises:
        Missing: a folder for TensorBoard is set, but TensorBoard is not installed.
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
        """Write a training step."""
        if self._writer is None:
            return
        values = {name: float(loss) for name, loss in report.items() if name != "logits"}
        inner = inner_optimizer(engine.optimizer)
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


# ---------------------------------------------------------------------------- checkpoints

FOLDER: Final = "megatron"
"""The name of Megatron-LM's folder in a checkpoint."""

_GENERATORS_KEY: Final = "rng_state"
_OPTIMIZER_FORMAT: Final = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Sharded optimizer states are written in the format that can be loaded on another number of processes."""


def save_engine(engine: Any, folder: Path, plugin: MegatronLMPlugin) -> None:
    """Write an engine's state; every process writes its part.

    Raises:
        NotOffered: Megatron-LM would not be able to load the checkpoint.
    """
    if plugin.use_distributed_optimizer and not plugin.no_save_optim:
        _demand_readable(inner_optimizer(engine.optimizer))
    place = folder / FOLDER
    if _is_first():
        place.mkdir(parents=True, exist_ok=True)
    # After this, the folder exists for all processes.
    wait_for_everyone()
    state = _sharded(engine, loading=False, optimizer=not plugin.no_save_optim)
    state[_GENERATORS_KEY] = _generators()
    state["degrees"] = _degrees(plugin)
    state["iteration"] = engine.iteration
    state["consumed_samples"] = list(plugin.consumed_samples or ())
    if engine.scheduler is not None:
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    dist_checkpointing.save(state, str(place))


def load_engine(engine: Any, folder: Path, plugin: MegatronLMPlugin) -> None:
    """Load a checkpoint of `save`, on any number of processes.

    Random-number generators are restored only if the model is sharded in the same way.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, contains code, or belongs to another model.
    """
    place = folder / FOLDER
    failure = f"Cannot load the Megatron-LM checkpoint {place}."
    process = current.process_or_start()
    common = raise_on_any_rank(
        process, "megatron", lambda: _look_through(failure, place), failure, error=CheckpointError
    )
    wants_optimizer = not plugin.no_load_optim
    if wants_optimizer and not common["has_optimizer"]:
        raise CheckpointError(
            failure,
            "The checkpoint was saved without optimizer states.",
            "Set MegatronLMPlugin(no_load_optim=True) to start with new ones.",
        )
    state = _sharded(engine, loading=True, optimizer=wants_optimizer)
    same = common["degrees"] == _degrees(plugin)
    if same:
        state[_GENERATORS_KEY] = _generators()
    try:
        loaded = dist_checkpointing.load(state, str(place))
    except Exception as error:
        # Megatron-LM raises many kinds of errors here; each means that the files do not fit.
        raise CheckpointError(
            failure,
            f"The checkpoint does not fit this model: {error}",
            "Load a checkpoint of a model with the same sizes.",
        ) from error
    _restore(engine, plugin, loaded, same and wants_optimizer, wants_optimizer)


def _restore(engine: Any, plugin: MegatronLMPlugin, loaded: Any, generators: bool, optimizer: bool) -> None:
    for index, part in enumerate(engine.module):
        _innermost(part).load_state_dict(loaded[_part_name(index)])
    engine.iteration = loaded["iteration"]
    plugin.consumed_samples = list(loaded["consumed_samples"])
    if not optimizer:
        # The optimizer's 32-bit copies start from the loaded weights.
        inner_optimizer(engine.optimizer).reload_model_params()
        return
    inner_optimizer(engine.optimizer).load_state_dict(loaded["optimizer"])
    if engine.scheduler is not None and "opt_param_scheduler" in loaded:
        engine.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if generators:
        tensor_parallel.get_cuda_rng_tracker().set_states(loaded[_GENERATORS_KEY])


def _sharded(engine: Any, loading: bool, optimizer: bool) -> dict[str, Any]:
    """The tensors that Megatron-LM writes or loads, with the position of each shard in the full tensor."""
    models = {
        _part_name(index): _innermost(part).sharded_state_dict(metadata=_OPTIMIZER_FORMAT)
        for index, part in enumerate(engine.module)
    }
    state: dict[str, Any] = dict(models)
    if optimizer:
        if loading:
            _begin_states(inner_optimizer(engine.optimizer))
        every = {name: value for shards in models.values() for name, value in shards.items()}
        state["optimizer"] = inner_optimizer(engine.optimizer).sharded_state_dict(
            every, is_loading=loading, metadata=_OPTIMIZER_FORMAT
        )
    if not loading:
        state["has_optimizer"] = optimizer
    return state


def _demand_readable(optimizer: Any) -> None:
    """Raise for sharded states of torch's Adam, which has step counts: Megatron-LM cannot load them again."""
    if any(
        isinstance(one.optimizer, torch.optim.Adam) for one in getattr(optimizer, "chained_optimizers", [optimizer])
    ):
        raise NotOffered(
            "Cannot write a checkpoint with sharded optimizer states (use_distributed_optimizer=True).",
            "Megatron-LM uses torch's Adam here, and cannot load its sharded states again.",
            "Install transformer-engine or apex, which have a supported Adam, or set no_save_optim=True.",
        )


def _begin_states(optimizer: Any) -> None:
    """Create the states of an optimizer that has not stepped, for loading; torch's also need a step count."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one.optimizer.state:
            continue
        one.init_state_fn(one.optimizer, one.config)
        if isinstance(one.optimizer, torch.optim.Adam):
            for state in one.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))


def _part_name(index: int) -> str:
    return "model" if index == 0 else f"model{index}"


def _generators() -> Any:
    """The generators of tensor parallelism: one set per part of the model, equal on data-parallel processes."""
    place = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    whole = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return mapping.ShardedObject(_GENERATORS_KEY, states, whole, place, replica_id=replica)


def _degrees(plugin: MegatronLMPlugin) -> list[int]:
    return [plugin.tp_degree, plugin.pp_degree]


def _is_first() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == 0


def _look_through(failure: str, place: Path) -> dict[str, Any]:
    """The content of the folder besides tensors, read without running code from the files."""
    if not (place / ".metadata").is_file():
        raise CheckpointError(failure, "The folder with Megatron-LM's files does not exist.", "Use another checkpoint.")
    check_objects(place)
    pickled.read(place / "common.pt", map_location="meta")
    try:
        common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(place))
    except Exception as error:
        raise CheckpointError(failure, f"common.pt cannot be read: {error}", "Load another checkpoint.") from error
    missing = {"degrees", "iteration", "has_optimizer"} - common.keys()
    if missing:
        raise CheckpointError(failure, f"It lacks {', '.join(sorted(missing))}.", "Load a checkpoint of save_state().")
    return common
