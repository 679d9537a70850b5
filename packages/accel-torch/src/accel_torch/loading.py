"""Loading a checkpoint: choose it, verify it, and restore its states."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.files import gradients_name, is_ours
from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.manifest import damage_in, read_manifest, verify
from accel_plugins.checkpoint.recovery import located
from accel_plugins.checkpoint.retention import available, find_newest
from accel_plugins.checkpoint.state import load_folder, load_gradients
from accel_plugins.checkpoint.store import is_url
from accel_state.errors import AccelError, CheckpointError, CheckpointNameError, UnknownKind
from accel_state.watch.record import STATUS_RECORD
from accel_torch.folders import automatic_folder, follow_number, given_folder

if TYPE_CHECKING:
    from accel_state.current import Process
    from accel_torch.session import Session

__all__ = ("load_state",)

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 100
"""Attempts of the processes to open the same save of a name under which another run saves."""
_REPORTED: Final = 10
"""The number of damaged ranges that each process reports to the others."""


def load_state(
    session: Session,
    input_dir: str | os.PathLike[str] | None,
    options: dict[str, Any],
    missing_ok: bool = False,
) -> str | None:
    """Read a checkpoint and return its folder, or its URL; called on every process.

    Raises:
        SettingError: no folder was given and naming is not automatic.
        CheckpointError: the checkpoint is incomplete or damaged, or does not fit the prepared objects.
    """
    project, process = session.options.project, session.process
    input_dir = session.place_to_load(input_dir, missing_ok)
    if missing_ok and not session.saves:
        return None
    failure = (
        "Cannot load a checkpoint." if input_dir is None else f"Cannot load the checkpoint {os.fspath(input_dir)}."
    )
    for _ in range(_ATTEMPTS):
        barrier = StoreBarrier(process, "load", failure, project.deadline, CheckpointError)
        with ExitStack() as stack:
            with barrier.reporting():
                if session.saver is not None:
                    session.saver.wait()
                chosen = _chosen(session, barrier, input_dir, missing_ok, stack)
                if chosen is not None:
                    with chosen.as_named():
                        _demand_prepared(session, chosen.folder)
                        manifest = read_manifest(chosen.folder)
                        facts = {} if manifest is None else manifest.facts
                        _demand_same_window(session, chosen.folder, facts)
                        _load(session, chosen, facts, dict(options), barrier)
                        _follow(session, chosen.place, facts)
            displaced = "displaced" if chosen is not None and _is_displaced(chosen) else ""
            if not barrier.wait("read", displaced, max, last=True):
                return None if chosen is None else chosen.place
        logger.warning("%s was replaced by another run while it was read, and is loaded again.", input_dir)
    raise _replaced(Path(os.fspath(input_dir or "the newest checkpoint")))


def _load(
    session: Session, chosen: _Chosen, facts: Mapping[str, Any], options: dict[str, Any], barrier: StoreBarrier
) -> None:
    map_location = _place(session, options.pop("map_location", None))
    allow_missing = options.pop("allow_missing", ())
    allow_unread = options.pop("allow_unread", ())
    trusted = not options.pop("weights_only", True)
    session.accumulation.step = load_folder(
        chosen.folder,
        session.prepared,
        session.strategy,
        session.process,
        map_location=map_location,
        model_options=options,
        trusted=trusted,
        allow_missing=allow_missing,
        allow_unread=allow_unread,
        hooks=list(session.prepared.load_hooks.values()),
        shown=chosen.shown,
        facts=facts,
        # What follows may be collective, so nobody begins it unless all can.
        checked=lambda: barrier.wait("checked"),
    )
    load_gradients(
        session.prepared.unwrapped_models(session.strategy.unwrap),
        chosen.folder,
        session.state.process_index,
    )


_WEIGHTS: Final = ("model", "pytorch_model")
_STATES: Final = (*_WEIGHTS, "optimizer", "scheduler", "dl_state_dict")
"""How the names of files with the states of prepared objects begin."""


def _demand_prepared(session: Session, folder: Path) -> None:
    """Refuse to load nothing, after which a model prepared later would train from the beginning.

    Raises:
        CheckpointError: the checkpoint has weights and no model was prepared, or it has states and nothing was.
    """
    prepared = session.prepared
    # A hook may load the weights itself.
    if prepared.all_models or prepared.load_hooks:
        return
    others = prepared.optimizers or prepared.schedulers or prepared.loaders or prepared.custom
    searched = _WEIGHTS if others else _STATES
    unread = [path.name for path in folder.iterdir() if is_ours(path.name) and path.name.startswith(searched)]
    if unread:
        unread.sort(key=lambda name: (not name.startswith(_WEIGHTS), name))
        raise CheckpointError(
            f"Cannot load the checkpoint {folder}.",
            f"This Accelerator has prepared no {'model' if others else 'objects'}, so it would not read "
            f"{', '.join(unread[:3])}.",
            "Call load_state() after prepare().",
        )


def _demand_same_window(session: Session, folder: Path, facts: Mapping[str, Any]) -> None:
    """Refuse gradients of an unfinished accumulation window that this run cannot add to.

    Raises:
        CheckpointError: this run accumulates over another number of micro-batches, or has fewer processes than the
            checkpoint has gradients.
    """
    if not (folder / gradients_name(0)).is_file():
        return
    now = {"gradient_accumulation_steps": session.gradient.num_steps}
    now["world_size"] = session.state.num_processes
    other = [
        f"{name} was {facts[name]} and is {value}" for name, value in now.items() if facts.get(name, value) != value
    ]
    if other:
        raise CheckpointError(
            f"Cannot load the checkpoint {folder}.",
            f"It was saved in the middle of an accumulation window, and {', and '.join(other)}: this run cannot "
            "continue the window.",
            "Resume with the same numbers, or from a checkpoint that was saved at the end of a window.",
        )


def _follow(session: Session, place: str, facts: Mapping[str, Any]) -> None:
    """Set the counters of steps, windows and automatic names to those of the checkpoint."""
    step = facts.get("run_step")
    if isinstance(step, int) and not isinstance(step, bool):
        STATUS_RECORD.went_back_to(step)
    steps = session.gradient.num_steps
    if facts.get("gradient_accumulation_steps", steps) != steps:
        # It was saved between two windows, so the next micro-batch begins a window.
        session.accumulation.step = 0
    follow_number(session.options.project, place)


def _place(session: Session, place: Any) -> Any:
    """The device to which tensors are read, before they are copied to the devices of the objects."""
    places = {None: "cpu", "cpu": "cpu", "on_device": session.state.device}
    if not isinstance(place, (str, type(None))) or place not in places:
        raise UnknownKind(
            f"Cannot load a state with map_location={place!r}.",
            "The value must be 'cpu' or 'on_device'.",
            "Remove map_location: tensors are moved to the devices of the prepared objects.",
        )
    return places[place]


@dataclass(frozen=True)
class _Chosen:
    """A checkpoint to load.

    Args:
        folder: the folder of its files on this node; it is this save's, whatever its name leads to meanwhile.
        place: the folder or URL to which it was saved.
        lock: keeps the folder from being removed; None for a folder without a manifest.
    """

    folder: Path
    place: str
    lock: FolderLock | None = None

    @property
    def shown(self) -> Path:
        """The path of the folder for people and hooks."""
        return self.folder if self.lock is None else Path(self.place)

    @contextmanager
    def as_named(self) -> Iterator[None]:
        """A block in whose errors the folder has the name that people know."""
        try:
            yield
        except AccelError as error:
            parts = (error.failure, error.obstacle, error.remedy)
            error.args = tuple(part.replace(str(self.folder), str(self.shown)) for part in parts)
            error.failure, error.obstacle, error.remedy = error.args
            raise


def _chosen(
    session: Session,
    barrier: StoreBarrier,
    input_dir: str | os.PathLike[str] | None,
    missing_ok: bool,
    stack: ExitStack,
) -> _Chosen | None:
    """Choose the checkpoint to load and verify it; called on every process.

    Args:
        session: the session.
        barrier: the barrier of the load.
        input_dir: a folder, the URL of a checkpoint, or None for the project's newest checkpoint.
        missing_ok: whether to return None if there is no checkpoint.
        stack: deletes local copies of a checkpoint on a store when it is closed.

    Raises:
        SettingError: no folder was given and naming is not automatic.
        CheckpointError: the checkpoint is incomplete or damaged, or there is none.
    """
    if input_dir is None and session.options.project.automatic_checkpoint_naming:
        return _newest_good(session, barrier, missing_ok, stack)
    named = given_folder(input_dir, "load_state")
    if is_url(named):
        from accel_torch.remote import fetch

        copy = fetch(session, barrier, named, "fetch", stack, missing_ok)
        return None if copy is None else _Chosen(copy, named)
    folder = Path(named)
    mains = Path(barrier.wait("name", str(folder)))
    if folder.is_dir() and not any(folder.iterdir()):
        # If processes gave different names to save_state, the files are in the main process's folder.
        folder = mains
    existing = _named_checkpoint(session, barrier, folder)
    if existing is None and missing_ok:
        return None
    failure = f"Cannot load the checkpoint {folder}."
    if existing is None:
        raise CheckpointNameError(failure, "There is no such folder.", "Give a folder that save_state() wrote.")
    chosen = _opened(barrier, existing, "open", stack)
    if damage := _damage(session, barrier, chosen, "contents"):
        raise CheckpointError(failure, damage, "Load an older checkpoint.")
    return chosen


def _opened(barrier: StoreBarrier, folder: Path, phase: str, stack: ExitStack) -> _Chosen:
    """Open one save on all processes, although another run may be saving under the same name.

    Args:
        barrier: the barrier of the load.
        folder: the checkpoint.
        phase: the phase of the barrier; no other phase begins with this text.
        stack: closes the folder.

    Raises:
        CheckpointError: the processes found different saves, each time.
    """
    for attempt in range(_ATTEMPTS):
        with barrier.reporting():
            lock = FolderLock.share(folder)
            manifest = None if lock is None else read_manifest(lock.path)
        save = "" if manifest is None else str(manifest.facts.get("save", ""))
        if barrier.wait(f"{phase}, attempt {attempt}", save, _whether_equal):
            if lock is not None:
                stack.enter_context(lock)
            return _Chosen(folder if lock is None else lock.path, str(folder), lock)
        if lock is not None:
            lock.close()
    raise _replaced(folder)


def _whether_equal(answers: Sequence[str]) -> str:
    return "equal" if len(set(answers)) == 1 else ""


def _is_displaced(chosen: _Chosen) -> bool:
    """Whether another save may have been read in part, where neither a lock nor an open folder ensures one."""
    lock = chosen.lock
    if lock is None or (lock.is_locked and lock.path != lock.folder):
        return False
    return not lock.is_committed or (lock.path == lock.folder and not lock.is_at(lock.folder))


def _replaced(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"Cannot load the checkpoint {folder}.",
        f"Another run saved it again {_ATTEMPTS} times while the processes read it.",
        "Load it when that run does not save, or save each checkpoint under its own name.",
    )


def _named_checkpoint(session: Session, barrier: StoreBarrier, folder: Path) -> Path | None:
    """The folder of a named checkpoint; each local main process restores one that a crashed run had moved aside.

    Raises:
        CheckpointError: only some processes can see the folder.
    """
    process = session.process
    with barrier.reporting():
        existing = located(folder) if process.topology.is_local_main else None
        barrier.wait("recover")
        if not process.topology.is_local_main:
            existing = located(folder)

    def seen_by_all(answers: Sequence[str]) -> str:
        blind = [str(rank) for rank, seen in enumerate(answers) if not seen]
        if 0 < len(blind) < len(answers):
            raise CheckpointError(
                f"Cannot load the checkpoint {folder}.",
                f"There is no such folder on process {', '.join(blind)}; the other processes have it.",
                "Save to a file system that all nodes share, or copy the checkpoint to each.",
            )
        return ""

    barrier.wait("find", "" if existing is None else "seen", seen_by_all)
    return existing


def _newest_good(session: Session, barrier: StoreBarrier, missing_ok: bool, stack: ExitStack) -> _Chosen | None:
    """The project's newest checkpoint that no process finds damaged; from the store if that one is newer."""
    project = session.options.project
    damaged: dict[Path, str] = {}
    on_store: dict[str, str] = {}
    while True:
        turn = len(damaged) + len(on_store)
        choice = _decided_by_main(
            session, barrier, f"choose {turn}", lambda: _newest(session, damaged, on_store, missing_ok)
        )
        project.iteration = max(project.iteration, choice["following"])
        if choice["url"] is not None:
            from accel_torch.remote import DamagedOnStore, fetch

            try:
                copy = fetch(session, barrier, choice["url"], f"fetch {turn}", stack, missing_ok=False)
            except DamagedOnStore as error:
                logger.warning("%s An older checkpoint is used.", error)
                on_store[choice["url"]] = error.obstacle
                continue
            return None if copy is None else _Chosen(copy, choice["url"])
        if choice["folder"] is None:
            return None
        folder = Path(choice["folder"])
        chosen = _opened(barrier, folder, f"open {turn}", stack)
        damage = _damage(session, barrier, chosen, f"contents {turn}")
        if not damage:
            return chosen
        damaged[folder] = damage


def _damage(session: Session, barrier: StoreBarrier, chosen: _Chosen, phase: str) -> str:
    """The problems that the processes find in a folder, on every process; each verifies its share of the contents."""
    with barrier.reporting():
        damage = _own_damage(chosen.folder, session.process, session.options.project.verify == "hashes")
    return barrier.wait(phase, json.dumps(damage[:_REPORTED]), _in_one_text)


def _in_one_text(answers: Sequence[str]) -> str:
    return " ".join(dict.fromkeys(sentence for answer in answers for sentence in json.loads(answer)))


def _own_damage(folder: Path, process: Process, hashes: bool) -> list[str]:
    verdict = verify(folder)
    if verdict.damage or verdict.manifest is None or not hashes:
        return list(verdict.damage)
    return damage_in(folder, verdict.manifest, process)


def _newest(
    session: Session, damaged: Mapping[Path, str], on_store: Mapping[str, str], missing_ok: bool
) -> dict[str, Any]:
    """The newest checkpoint whose files have the expected sizes, and a free number for the next one.

    Args:
        session: the session.
        damaged: local checkpoints that are known to be damaged.
        on_store: URLs of damaged checkpoints on the store.
        missing_ok: whether there may be none at all.
    """
    folder = automatic_folder(session.options.project)
    local = available(folder)
    following = local[-1].number + 1 if local else 0
    newest, failure = None, None
    try:
        newest = find_newest(folder, damaged=damaged)
    except CheckpointError as error:
        failure = error
    stored = None
    if session.uploader is not None:
        from accel_torch.remote import newest_on_store

        stored = newest_on_store(session, newest is not None, on_store)
    if stored is not None:
        following = max(following, stored.number + 1)
        numbers = {checkpoint.path: checkpoint.number for checkpoint in local}
        if newest is None or stored.number > numbers[newest]:
            return {"folder": None, "url": stored.path, "following": following}
    if failure is not None and (local or on_store or not missing_ok):
        raise failure
    return {"folder": None if newest is None else str(newest), "url": None, "following": following}


def _decided_by_main(
    session: Session, barrier: StoreBarrier, phase: str, decide: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Call `decide` on the main process, and return its result, or raise its error, on every process."""
    with barrier.reporting():
        mine = json.dumps(decide()) if session.process.rank == 0 else ""
    decided: dict[str, Any] = json.loads(barrier.wait(phase, mine))
    return decided
