"""Runs an unchanged training script, and records the results of each optimizer step for a comparison with another run.

    accel launch --module accel_torch.check_parity.recording TASK.json train.py its arguments

The run under the plan is first, and also records its batches. Then one process runs the same script with the plan's
global batches, so its numbers of batches, optimizer steps and scheduler steps are those of a process of the plan. After
each step it continues from the plan's parameters, so that steps are compared independently and rounding errors do not
accumulate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_data.hooks import LoaderHook
from accel_plugins.layers import strategy_model
from accel_plugins.parameters import canonical_name
from accel_plugins.shards import Shards
from accel_plugins.single.strategy import SingleStrategy
from accel_plugins.strategy import Strategy
from accel_torch.check_parity.dropout import Dropout, without_recurrent_dropout
from accel_torch.check_parity.notes import ParityTask, RunFacts, RunNotes, StepNotes, batch_file, joined, step_file
from accel_torch.check_parity.tolerances import elements_per_row
from accel_torch.check_parity.variation import Variation, states
from accel_torch.check_resume.digests import sample_digests
from accel_torch.hooks import Hook
from accel_torch.observed_runs import StopRun, run_script
from accel_torch.step import unscale_gradients

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context
    from accel_torch.options import Options
    from accel_torch.session import Session

__all__ = ("ParityRecorder", "main")


class ParityRecorder(Hook):
    """Records what one process of a run computes.

    Args:
        task: the task of the run.
        variation: records what the script reads.
        dropout: disables dropout.
    """

    def __init__(self, task: ParityTask, variation: Variation, dropout: Dropout) -> None:
        self._task, self._variation, self._dropout = task, variation, dropout
        self._session: weakref.ref[Session] | None = None
        self._facts = RunFacts()
        self._note = StepNotes(0)
        self._step = 0
        self._begun = self._stepped = self._clipping = False
        self._held: set[str] = set()
        self._used: set[str] = set()
        self._own_samples: dict[tuple[int, int, int], list[str]] = {}
        self._generators: dict[str, str] = {}
        register_optimizer_step_pre_hook(self._before_optimizer_step)
        register_optimizer_step_post_hook(self._after_optimizer_step)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._watch_clipping()
        self._watch_modules()

    # ------------------------------------------------------------------ called by the session and its loaders

    def configure(self, options: Options) -> Options:
        """In the run of one process, remove all settings of the plan."""
        if not self._task.is_reference:
            return options
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
        plugins = {name: one for name, one in options.plugins.items() if name != "torch_tp_plugin"}
        return options._replace(
            backend="single", backend_config=None, backends={}, plugins=plugins, parallelism_config=None
        )

    def start(self, session: Session) -> None:
        """Record a new session."""
        self._session = weakref.ref(session)
        planned = RunNotes(Path(self._task.plan)).ranks[0] if self._task.is_reference else None
        if planned is not None and planned.reads_loader:
            session.strategy = _OneOfMany(session.strategy.context, Shards(planned.data_count, 0))
        strategy = session.strategy
        strategy.on_gradients = self._engine_steps
        shards = strategy.shards()
        process = strategy.context.process
        self._facts = dataclasses.replace(
            self._facts,
            rank=process.rank,
            world=process.world_size,
            data=shards.index,
            data_count=shards.count,
            accumulation=session.gradient.num_steps,
            precision=str(session.state.mixed_precision),
        )

    def before_backward(self, loss: Any) -> None:
        """Record a loss."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._note.losses.append(float(_complete(loss)))

    def before_clip(self, session: Session) -> None:
        """Record the gradients before they are clipped."""
        unscale_gradients(session)
        self._before_clipping()
        self._clipping = True

    def after_clip(self, norm: Any) -> None:
        """Record their norm."""
        self._clipping = False
        if norm is not None:
            self._note.norms.append(float(_complete(norm) if isinstance(norm, Tensor) else norm))

    def after_prepare(self, session: Session, bundle: Bundle) -> None:
        """Record what the modules of prepared models compute."""
        for model in bundle.models:
            self._follow(model)

    def loader_prepared(self, session: Session, loader: Any) -> None:
        """Attach to a prepared loader."""
        if not hasattr(loader, "between_batches"):
            return
        follower = _LoaderFollower(self, self._facts.loaders, loader)
        self._facts.loaders += 1
        session.pauses.used = True
        loader.hook = follower
        if self._task.is_reference:
            loader.device_transfer = follower.replaced

    def after_boundary(self, loader: Any, first: bool) -> None:
        """Record the state after a step."""
        if not first:
            self._step_ends()

    def epoch_begins(self) -> None:
        """Record the state before the first step."""
        self._facts.reads_loader = True
        self._begin()

    def batch_given(self, loader: int, epoch: int, number: int, batch: Any) -> None:
        """Record a batch that the loop receives; in the run of one process, the batch that is replaced."""
        self._generators = states()
        if self._task.is_reference:
            self._note.samples.append((loader, epoch, self._own_samples.pop((loader, epoch, number), [])))
            return
        self._note.samples.append((loader, epoch, sample_digests(batch)))
        path = batch_file(self._task.notes, loader, epoch, number, self._facts.data)
        if not path.exists():
            # Processes with the same shard write the same file.
            torch.save(batch, path.with_suffix(f".{self._facts.rank}"))
            path.with_suffix(f".{self._facts.rank}").replace(path)

    def global_batch(self, loader: int, epoch: int, number: int, own: Any) -> Any:
        """The plan's batch instead of the one that this process read; its own batch if the plan read none."""
        # Loaders prefetch.
        self._own_samples[loader, epoch, number] = sample_digests(own)
        places = range(self._facts.data_count)
        paths = [batch_file(self._task.plan, loader, epoch, number, place) for place in places]
        if not all(path.is_file() for path in paths):
            return own
        parts = [torch.load(path, map_location="cpu", weights_only=False) for path in paths]
        try:
            return joined(parts)
        except RuntimeError as error:
            raise SystemExit(
                f"check-parity: the shards of global batch {number} have different shapes, so that one process "
                f"cannot concatenate them ({error}). Pad all of them to one length."
            ) from error

    # ------------------------------------------------------------------ models

    def _follow(self, model: nn.Module) -> None:
        """Record the outputs of all modules of a prepared model, and its inputs."""
        index, self._facts.models = self._facts.models, self._facts.models + 1
        inner = self._strategy.unwrap(strategy_model(model))
        without_recurrent_dropout(inner)
        model.register_forward_pre_hook(self._model_called, with_kwargs=True, prepend=True)
        for name, module in inner.named_modules():
            self._names[module] = _prefix(index) + canonical_name(name)

    def _model_called(self, model: nn.Module, arguments: Any, options: Any) -> None:
        if not torch.is_grad_enabled() or not model.training:
            return
        self._begin()
        if not self._facts.reads_loader:
            self._step_ends()
            self._note.inputs += sample_digests([*arguments, *options.values()])

    def _watch_modules(self) -> None:
        """Record what each module returns to its caller, after all other hooks."""
        # The compiler cannot trace the recording, and an uncompiled model computes the same.
        torch.compiler.set_stance("force_eager")
        call = nn.Module.__call__

        def called(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            name = self._names.get(module)
            if name is None:
                return call(module, *arguments, **options)
            outer, self._dropout.module = self._dropout.module, name
            try:
                output = call(module, *arguments, **options)
            finally:
                self._dropout.module = outer
            self._note_output(name, output)
            return output

        nn.Module.__call__ = called  # type: ignore[method-assign]

    def _note_output(self, name: str, output: Any) -> None:
        if not torch.is_grad_enabled() or self._stepped or self._step >= self._task.steps:
            return
        seen = self._note.modules.setdefault(name, [0, 0, 0.0, 0.0, 0])
        seen[0] += 1
        for tensor in _tensors(output):
            if tensor.is_floating_point():
                values = _complete(tensor).double()
                seen[1] += values.numel()
                seen[2] += float(values.sum())
                seen[3] += float(values.square().sum())
                seen[4] += values.numel() // max(elements_per_row(values.shape), 1)

    @property
    def _strategy(self) -> Strategy:
        return self._living.strategy

    @property
    def _living(self) -> Session:
        session = None if self._session is None else self._session()
        if session is None:
            raise StopRun
        return session

    def _models(self) -> list[tuple[str, nn.Module]]:
        return [(_prefix(index), strategy_model(model)) for index, model in enumerate(self._living.prepared.models)]

    def _gradients(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for prefix, model in self._models():
            found |= {prefix + name: _kept(value) for name, value in self._strategy.gradients(model).items()}
        return found

    def _parameters(self) -> dict[str, Tensor]:
        """Full parameters, from the processes that can compute them."""
        strategy = self._strategy
        found: dict[str, Tensor] = {}
        direct = type(strategy).gradients is Strategy.gradients
        for prefix, model in self._models():
            named = list(strategy.unwrap(model).named_parameters(remove_duplicate=False))
            if direct:
                found |= {prefix + canonical_name(name): _kept(_complete(value)) for name, value in named}
                continue
            names = {canonical_name(name) for name, _ in named}
            weights = strategy.state_dict(model)
            if strategy.writes_weights():
                found |= {prefix + name: _kept(value) for name, value in weights.items() if name in names}
        return found

    def _buffers(self) -> dict[str, Tensor]:
        found = {}
        for prefix, model in self._models():
            for name, value in self._strategy.unwrap(model).named_buffers(remove_duplicate=False):
                found[prefix + canonical_name(name)] = _kept(_complete(value))
        return found

    # ------------------------------------------------------------------ steps

    def _begin(self) -> None:
        """Record the state before the first step."""
        if self._begun:
            return
        self._begun = True
        self._note.parameters, self._note.buffers = self._parameters(), self._buffers()
        self._write()
        self._continue_from_plan()

    def _before_clipping(self) -> None:
        # An engine that steps within backward has removed them.
        self._note.gradients = self._gradients() or self._note.gradients

    def _engine_steps(self, model: nn.Module) -> None:
        """Record the gradients of an engine that steps within backward."""
        if self._begun and self._step < self._task.steps:
            gradients = self._gradients()
            self._note.gradients |= gradients
            self._note_used(gradients)

    def _note_used(self, gradients: dict[str, Tensor]) -> None:
        self._used |= {name for name, gradient in gradients.items() if bool(gradient.any())}

    def _before_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        if self._step >= self._task.steps:
            self._note.masks = self._dropout.masks
            self._write(self._step + 1)
            raise StopRun
        if not self._begun:
            return
        gradients = self._gradients()
        if self._generators and self._generators != states():
            self._facts.drew.append(self._step + 1)
        if not self._note.norms:
            self._note.gradients |= gradients
        else:
            self._note.clipped |= gradients
        for prefix, model in self._models():
            for name, parameter in self._strategy.unwrap(model).named_parameters():
                if parameter.requires_grad:
                    self._held.add(prefix + canonical_name(name))
        self._note_used(gradients)

    def _after_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        self._stepped = self._begun

    def _step_ends(self) -> None:
        """Record the state after a step, when all its work is complete."""
        if not self._stepped:
            return
        self._stepped = False
        self._step += 1
        note = self._note
        note.rates = [float(group["lr"]) for one in self._living.prepared.optimizers for group in one.param_groups]
        note.parameters, note.buffers = self._parameters(), self._buffers()
        self._facts.optimizers = len(self._living.prepared.optimizers)
        self._facts.without_gradient = sorted(self._held - self._used)
        self._write()
        self._continue_from_plan()
        if self._step >= self._task.steps:
            if self._task.is_reference:
                raise StopRun
            self._dropout.noting = True

    def _write(self, step: int | None = None) -> None:
        self._note.step = self._step if step is None else step
        path = step_file(Path(self._task.notes), self._facts.rank, self._note.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: getattr(self._note, name) for name in _FIELDS}, path)
        self._note = StepNotes(0)
        self._write_facts()

    def _write_facts(self) -> None:
        self._facts.reads = self._variation.reads()
        folder = Path(self._task.notes, f"rank_{self._facts.rank}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(dataclasses.asdict(self._facts)), encoding="utf-8")

    def ends(self) -> None:
        """Record the last step of a script that reached its end."""
        if self._session is not None and self._session() is not None:
            with contextlib.suppress(StopRun):
                self._step_ends()
        self._write_facts()

    def _continue_from_plan(self) -> None:
        """Continue from the parameters of the plan's main process after this step."""
        path = step_file(Path(self._task.plan), 0, self._step)
        if not self._task.is_reference or not path.is_file():
            return
        theirs = torch.load(path, map_location="cpu", weights_only=False)
        for prefix, model in self._models():
            inner = self._strategy.unwrap(model)
            for kind, named in (
                ("parameters", inner.named_parameters(remove_duplicate=False)),
                ("buffers", inner.named_buffers(remove_duplicate=False)),
            ):
                for name, tensor in named:
                    other = theirs[kind].get(prefix + canonical_name(name))
                    if other is not None and other.shape == tensor.shape:
                        tensor.data.copy_(other)

    def _watch_clipping(self) -> None:
        """Record the norms of scripts that clip with torch's function."""
        clip = nn.utils.clip_grad_norm_

        def noted(parameters: Any, *arguments: Any, **options: Any) -> Any:
            outside = not self._clipping and self._begun
            if outside:
                self._before_clipping()
                parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            norm = clip(parameters, *arguments, **options)
            if outside:
                self._note.norms.append(float(_complete(norm)))
            return norm

        nn.utils.clip_grad_norm_ = noted


class _OneOfMany(SingleStrategy):
    """The strategy of the one process, whose loaders have the shape of one shard of the plan's data."""

    def __init__(self, context: Context, own: Shards) -> None:
        super().__init__(context)
        self._own = own

    def shards(self) -> Shards:
        return self._own


class _LoaderFollower(LoaderHook):
    """Follows one loader; see `accel_data.hooks.LoaderHook` and `DeviceTransfer`."""

    def __init__(self, recorder: ParityRecorder, number: int, loader: Any) -> None:
        self._recorder, self._number = recorder, number
        self._epoch, self._batch = -1, 0

    def epoch_begins(self) -> None:
        self._epoch, self._batch = self._epoch + 1, 0
        self._recorder.epoch_begins()

    def batch_given(self, batch: Any) -> None:
        self._recorder.batch_given(self._number, self._epoch, self._batch, batch)
        self._batch += 1

    def replaced(self, pairs: Iterator[tuple[Any, Any]], ahead: bool) -> Iterator[tuple[Any, Any]]:
        for number, (batch, rest) in enumerate(pairs):
            yield self._recorder.global_batch(self._number, self._epoch, number, batch), rest


_FIELDS = [field.name for field in dataclasses.fields(StepNotes)]


def _prefix(index: int) -> str:
    """The prefix of a model's names if several models are prepared."""
    return f"model {index}: " if index else ""


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


def _complete(tensor: Tensor) -> Tensor:
    complete: Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return complete.detach()


def _kept(tensor: Tensor) -> Tensor:
    # Gradients of sparse embeddings have rows in any order, some of them twice.
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.detach().to("cpu", copy=True)


def main(arguments: list[str]) -> None:
    """Run the script in the arguments with the task in the first argument."""
    task = ParityTask.read(arguments[0])
    variation, dropout = Variation(task.source, task.varied, task.rank), Dropout()
    variation.install()
    dropout.install()
    recorder = ParityRecorder(task, variation, dropout)
    run_script(arguments[1], arguments[2:], recorder)
    recorder.ends()


if __name__ == "__main__":
    main(sys.argv[1:])
