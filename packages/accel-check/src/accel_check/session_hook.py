"""Follows the sessions of our Accelerator: what only they know, beside what the recorder sees of torch."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from accel_check.batches import widened
from accel_check.digests import digests_of, sample_digests
from accel_check.models import Models, piece_of
from accel_check.records import TensorPart
from accel_check.scratch_session import ScratchHook
from accel_check.training_state import training_state
from accel_data.hooks import LoaderHook
from accel_plugins.layers import extract_model_from_parallel, strategy_model
from accel_plugins.prepared import add_hook
from accel_plugins.shards import Shards
from accel_plugins.single.strategy import SingleStrategy
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.mesh import ParallelismConfig
from accel_torch.loading import load_state
from accel_torch.saving import save_state
from accel_torch.step import unscale_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from accel_check.recorder import StepRecorder
    from accel_check.resume_notes import ResumeNotes
    from accel_plugins.context import Context
    from accel_torch.options import Options
    from accel_torch.session import Session

__all__ = ("SessionHook",)


class SessionHook(ScratchHook):
    """Records what the sessions of one process do.

    Args:
        recorder: the recorder of this process.
        notes: the notes of a check of a resumed run; None in another check.
    """

    def __init__(self, recorder: StepRecorder, notes: ResumeNotes | None) -> None:
        super().__init__(recorder.task.scratch, () if notes is None else (notes.task.checkpoints,))
        self._recorder, self._notes = recorder, notes
        self._session: weakref.ref[Session] | None = None
        self._loaders = 0
        self._names_automatically = self._loaded = self._begun = False
        self._saves = 0
        self._waiting: int | None = None

    # ------------------------------------------------------------------ called by the session

    def configure(self, options: Options) -> Options:
        """Keep the run out of the user's folders and trackers; in the run of one process, remove the plan."""
        options = super().configure(options)
        if self._notes is not None:
            # The folders of both runs are named by `folder_to_save` and `folder_to_load`.
            self._names_automatically = options.project.automatic_checkpoint_naming
            project = dataclasses.replace(options.project, automatic_checkpoint_naming=False)
            options = options._replace(project=project)
        if not self._recorder.task.is_reference:
            return options
        has_axes = options.parallelism_config is not None or "ACCELERATE_USE_PARALLELISM_CONFIG" in os.environ
        has_axes = has_axes or "torch_tp_plugin" in options.plugins or self._planned("axes")
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
        plugins = {name: one for name, one in options.plugins.items() if name != "torch_tp_plugin"}
        return options._replace(
            backend="single",
            backend_config=None,
            backends={},
            plugins=plugins,
            # Every rank on an axis is 0 in a world of one process.
            parallelism_config=ParallelismConfig() if has_axes else None,
        )

    def start(self, session: Session) -> None:
        """Note the data shard of this process."""
        self._session = weakref.ref(session)
        recorder = self._recorder
        if self._notes is not None:
            recorder.more_state.append(self._registered)
            recorder.compared_objects.append(self._prepared)
            if self._notes.task.resumed_at:
                add_hook(session.prepared.load_hooks, self._before_load)
            return
        shards = session.strategy.shards()
        if recorder.task.is_reference:
            if self._planned("shards"):
                session.strategy = _OneOfMany(session.strategy.context, Shards(self._planned("shards"), 0))
            return
        facts = recorder.facts
        facts.shards_known = True
        facts.more["shards"] = shards.count
        facts.more["axes"] = session.state.device_mesh is not None
        facts.more["shard"] = shards.index
        if shards.count < facts.world:
            mesh = session.state.device_mesh
            recorder.read_alike([facts.rank] if mesh is None else _alike(mesh, facts.rank))
        if session.strategy.overrides("gradients"):
            facts.more["clips_in_step"] = True
            session.strategy.on_gradients = self._engine_steps
            recorder.read_gradients = self._gradients
            recorder.read_parameters = self._parameters

    def after_backward(self, loss: Tensor) -> None:
        """Complete the step that an engine has made within backward."""
        self._recorder.after_engine_steps()

    def before_clip(self, session: Session) -> None:
        """Record the gradients before they are clipped."""
        unscale_gradients(session)
        self._recorder.before_clip()
        self._recorder.clipping = True

    def after_clip(self, norm: Any) -> None:
        """Record their norm."""
        self._recorder.clipping = False
        self._recorder.after_clip(norm)

    def loader_prepared(self, session: Session, loader: Any) -> None:
        """Record the passes and batches of a prepared loader from now on."""
        if hasattr(loader, "between_batches"):
            follower = _LoaderFollower(self._recorder, self._loaders)
            self._loaders += 1
            loader.hook = follower
            if self._notes is not None:
                session.pauses.used = self._notes.by_command = True
                follower.begins = self._epoch_begins
            if self._notes is None:
                loader.device_transfer = follower.replaced

    def folder_to_save(self, session: Session, output_dir: Any) -> Any:
        """The counterpart of a folder in the scratch folder."""
        if output_dir is None and self._names_automatically:
            self._saves += 1
            output_dir = os.path.join(self.scratch, f"checkpoint_{self._saves}")
        return super().folder_to_save(session, output_dir)

    def folder_to_load(self, session: Session, input_dir: Any, missing_ok: bool) -> Any:
        """The counterpart in the scratch folder; the folder itself if it has none and must exist."""
        resume = self._notes
        if input_dir is None and resume is not None and self._names_automatically:
            return resume.task.checkpoint or os.path.join(self.scratch, "checkpoint_0")
        return super().folder_to_load(session, input_dir, missing_ok)

    # ------------------------------------------------------------------ resumed runs

    def after_boundary(self, loader: Any, first: bool) -> None:
        """Save a checkpoint between two batches if the check asks for it."""
        resume, session = self._notes, None if self._session is None else self._session()
        if first or resume is None or session is None:
            return
        before, self._waiting = self._waiting, resume.due() if resume.task.in_window else None
        step = before if resume.task.in_window else resume.due()
        if step is None:
            return
        if step != resume.due():
            raise SystemExit("check-resume: the script steps after each batch: it has no window. Remove --in_window.")
        save_state(session, resume.folder_of(step), safe_serialization=True)
        resume.saved(step)
        self._waiting = None

    def _epoch_begins(self) -> None:
        """Load the checkpoint unless the script has done it."""
        resume, session = self._notes, None if self._session is None else self._session()
        if self._begun or resume is None or session is None:
            return
        self._begun = True
        if not resume.task.resumed_at or self._loaded:
            return
        if resume.task.resumes_itself:
            raise SystemExit("check-resume: the script did not load the checkpoint that --resume_args names.")
        # The generators of processes are not restored on another number of processes.
        same = session.state.num_processes == resume.task.saved_on
        load_state(session, resume.task.checkpoint, {"allow_missing": () if same else ("random_states",)})

    def _before_load(self, models: Any, folder: str) -> None:
        self._loaded = True
        session = None if self._session is None else self._session()
        if session is not None:
            for model in session.prepared.models:
                self._recorder.adopt(model)
            self._recorder.facts.more["fresh"] = training_state(self._recorder)

    def _registered(self) -> dict[str, dict[str, str]]:
        session = None if self._session is None else self._session()
        custom = [] if session is None else session.prepared.custom
        return {
            f"registered object {index} ({type(item).__name__})": digests_of(item.state_dict())
            for index, item in enumerate(custom)
        }

    def _prepared(self) -> list[Any]:
        session = None if self._session is None else self._session()
        if session is None:
            return []
        prepared = session.prepared
        objects = [*prepared.custom, *prepared.loaders, *prepared.schedulers, *prepared.optimizers]
        objects += [*prepared.models, *map(extract_model_from_parallel, prepared.models)]
        objects += [inner_optimizer(item) for item in prepared.optimizers]
        return objects + [getattr(item, "scheduler", item) for item in prepared.schedulers]

    # ------------------------------------------------------------------ what engines have

    def _engine_steps(self, model: Any) -> None:
        self._recorder.step.after_backward |= self._gradients()

    def _models(self) -> Iterator[tuple[str, Any]]:
        session = None if self._session is None else self._session()
        for index, model in enumerate(session.prepared.models if session is not None else ()):
            yield Models.prefix(index), strategy_model(model)

    def _gradients(self) -> dict[str, TensorPart]:
        session = None if self._session is None else self._session()
        pieces: dict[str, TensorPart] = {}
        for prefix, model in self._models():
            assert session is not None
            pieces |= {prefix + name: piece_of(one) for name, one in session.strategy.gradients(model).items()}
        return pieces

    def _parameters(self) -> dict[str, TensorPart]:
        session = None if self._session is None else self._session()
        pieces: dict[str, TensorPart] = {}
        for prefix, model in self._models():
            assert session is not None
            buffers = {name for name, _ in session.strategy.unwrap(model).named_buffers()}
            weights = session.strategy.state_dict(model)
            if session.strategy.writes_weights():
                pieces |= {prefix + name: piece_of(one) for name, one in weights.items() if name not in buffers}
        return pieces

    def _planned(self, name: str) -> Any:
        """A fact about the run of several processes."""
        other = self._recorder.other
        return None if other is None or not other.ranks else other.ranks[0].more.get(name)


def _alike(mesh: Any, rank: int) -> list[int]:
    """The ranks of a mesh that read the same samples as a rank: they differ only on other axes than those of data."""
    place = [int(at[0]) for at in (mesh.mesh == rank).nonzero(as_tuple=True)]
    names = mesh.mesh_dim_names
    index = tuple(at if name.startswith("dp") else slice(None) for at, name in zip(place, names, strict=True))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


class _OneOfMany(SingleStrategy):
    """The strategy of the one process, whose loaders have the length of one shard of the plan's data.

    Its schedules advance by one for each step, as those of one process do.
    """

    def __init__(self, context: Context, own: Shards) -> None:
        super().__init__(context)
        self._own = own

    def shards(self) -> Shards:
        return self._own

    def batches_per_step(self) -> int:
        return 1


class _LoaderFollower(LoaderHook):
    """Follows one loader; see `accel_data.hooks.LoaderHook` and `DeviceTransfer`."""

    def __init__(self, recorder: StepRecorder, number: int) -> None:
        self._recorder, self._number = recorder, number
        self._epoch, self._batch = -1, 0
        self.begins: Callable[[], None] | None = None

    @property
    def _key(self) -> str:
        return f"loader {self._number} {self._epoch}"

    def epoch_begins(self) -> None:
        self._epoch, self._batch = self._epoch + 1, 0
        if self.begins is not None:
            self.begins()

    def batch_given(self, batch: Any) -> None:
        recorder = self._recorder
        if recorder.task.is_reference:
            recorder.batch_given(self._key, [])
        else:
            recorder.batches.record_batch(self._key, self._batch, batch, sample_digests(batch))
        self._batch += 1

    def replaced(self, pairs: Iterator[tuple[Any, Any]], ahead: bool) -> Iterator[tuple[Any, Any]]:
        for number, (batch, rest) in enumerate(pairs):
            if self._recorder.task.is_reference:
                joined = self._recorder.batches.joined_batch(self._key, number)
                batch = batch if joined is None else joined
            yield widened(batch), rest
