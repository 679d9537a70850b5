"""What the checkpoints of an Accelerator are called, what they hold, and which of them is taken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_plugins.checkpoint.manifest import damage_in, verify
from accel_plugins.checkpoint.recovery import located
from accel_plugins.checkpoint.retention import available, find_newest
from accel_plugins.checkpoint.state import Contents
from accel_plugins.checkpoint.store import is_url
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import Duty
from accel_state.errors import CheckpointError, SettingError

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_ops.agreement import StoreBarrier
    from accel_plugins.checkpoint.config import ProjectConfiguration
    from accel_state.current import Process
    from accel_torch.parts import Parts

__all__ = ("Chosen", "automatic_folder", "chosen", "contents", "next_folder", "unwrapped")

_TOLD: Final = 10
"""How many damaged ranges each process tells the others of."""


def unwrapped(parts: Parts) -> list[Module]:
    """The user's models, whose parameters have the names that the user gave them."""
    return [parts._engine.strategy.unwrap(strategy_model(model)) for model in parts._registry.models]


def contents(parts: Parts) -> Contents:
    """What a checkpoint of this Accelerator holds."""
    registry, engine = parts._registry, parts._engine
    return Contents(
        models=registry.models,
        optimizers=registry.optimizers,
        schedulers=registry.schedulers,
        loaders=registry.loaders,
        scaler=None if engine.owns(Duty.PRECISION) else engine.precision,
        custom=registry.custom,
    )


def _decided_by_main(
    parts: Parts, barrier: StoreBarrier, phase: str, decide: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What `decide` returns on the main process, on every process; its error is raised on every process too."""
    with barrier.reporting():
        mine = json.dumps(decide()) if parts.state._process.rank == 0 else ""
    decided: dict[str, Any] = json.loads(barrier.wait(phase, mine))
    return decided


def automatic_folder(project: ProjectConfiguration) -> Path:
    """The folder of automatically named checkpoints."""
    return Path(project.project_dir or ".") / "checkpoints"


def next_folder(parts: Parts, output_dir: str | os.PathLike[str] | None) -> str:
    """What the next checkpoint is called; that of the first process counts.

    Raises:
        SettingError: no folder was given and naming is not automatic.
        CheckpointError: the name is taken.
    """
    project = parts._options.project
    if not project.automatic_checkpoint_naming:
        return _named(output_dir, "save_state")
    return str(_next_automatic(project)) if parts.state._process.rank == 0 else ""


def _next_automatic(project: ProjectConfiguration) -> Path:
    target = automatic_folder(project) / f"checkpoint_{project.iteration}"
    if target.exists():
        raise CheckpointError(
            f"save_state() was to write {target} by automatic naming.",
            "It is there already.",
            "Call load_state() first to go on after it, set project_configuration.iteration to a free number, or use "
            "another project_dir.",
        )
    return target


@dataclass(frozen=True)
class Chosen:
    """A checkpoint to load.

    Args:
        folder: where its files are on this node.
        place: the folder or URL that it was saved to.
    """

    folder: Path
    place: str


def chosen(
    parts: Parts,
    barrier: StoreBarrier,
    input_dir: str | os.PathLike[str] | None,
    missing_ok: bool,
    stack: ExitStack,
) -> Chosen | None:
    """The checkpoint to load, verified; None when there is none and that is right. Called on every process.

    Args:
        parts: the Accelerator.
        barrier: of the load.
        input_dir: a folder, the URL of a checkpoint, or None for the newest one of the project.
        missing_ok: whether there may be none.
        stack: removes local copies of a checkpoint on a store when it is closed.

    Raises:
        SettingError: no folder was given and naming is not automatic.
        CheckpointError: it cannot be trusted, or there is none.
    """
    if input_dir is None and parts._options.project.automatic_checkpoint_naming:
        return _newest_good(parts, barrier, missing_ok, stack)
    named = _named(input_dir, "load_state")
    if is_url(named):
        from accel_torch.remote import fetch

        copy = fetch(parts, barrier, named, "fetch", stack, missing_ok)
        return None if copy is None else Chosen(copy, named)
    folder = Path(named)
    mains = Path(barrier.wait("name", str(folder)))
    if folder.is_dir() and not any(folder.iterdir()):
        # Saving to folders of different names has put everything into that of the main process.
        folder = mains
    found = _found(parts, barrier, folder)
    if found is None and missing_ok:
        return None
    asked = f"Cannot load the checkpoint {folder}."
    if found is None:
        raise CheckpointError(asked, "There is no such folder.", "Name a folder that save_state() wrote.")
    if damage := _damage(parts, barrier, found, "contents"):
        raise CheckpointError(asked, damage, "Load an older checkpoint.")
    return Chosen(found, str(found))


def _found(parts: Parts, barrier: StoreBarrier, folder: Path) -> Path | None:
    """Where a named checkpoint is read; the first process of each node puts back what a dead run had moved aside.

    Raises:
        CheckpointError: some processes see it and others do not.
    """
    process = parts.state._process
    with barrier.reporting():
        found = located(folder) if process.topology.is_local_main else None
        barrier.wait("recover")
        if not process.topology.is_local_main:
            found = located(folder)

    def seen_by_all(answers: Sequence[str]) -> str:
        blind = [str(rank) for rank, seen in enumerate(answers) if not seen]
        if 0 < len(blind) < len(answers):
            raise CheckpointError(
                f"Cannot load the checkpoint {folder}.",
                f"There is no such folder on process {', '.join(blind)}; the others see it.",
                "Save to a file system that all nodes share, or copy the checkpoint to each.",
            )
        return ""

    barrier.wait("find", "" if found is None else "seen", seen_by_all)
    return found


def _newest_good(parts: Parts, barrier: StoreBarrier, missing_ok: bool, stack: ExitStack) -> Chosen | None:
    """The newest checkpoint of the project that no process finds damaged, from the store where that has a newer one."""
    project = parts._options.project
    damaged: dict[Path, str] = {}
    while True:
        turn = len(damaged)
        told = _decided_by_main(parts, barrier, f"choose {turn}", lambda: _newest(parts, damaged, missing_ok))
        project.iteration = max(project.iteration, told["following"])
        if told["url"] is not None:
            from accel_torch.remote import fetch

            copy = fetch(parts, barrier, told["url"], f"fetch {turn}", stack, missing_ok=False)
            return None if copy is None else Chosen(copy, told["url"])
        if told["folder"] is None:
            return None
        folder = Path(told["folder"])
        damage = _damage(parts, barrier, folder, f"contents {turn}")
        if not damage:
            return Chosen(folder, str(folder))
        damaged[folder] = damage


def _damage(parts: Parts, barrier: StoreBarrier, folder: Path, phase: str) -> str:
    """What the processes find wrong with a folder, on every process; each compares its share of the contents."""
    with barrier.reporting():
        found = _own_damage(folder, parts.state._process, parts._options.project.verify == "hashes")
    return barrier.wait(phase, json.dumps(found[:_TOLD]), _in_one_text)


def _in_one_text(answers: Sequence[str]) -> str:
    return " ".join(dict.fromkeys(sentence for answer in answers for sentence in json.loads(answer)))


def _own_damage(folder: Path, process: Process, hashes: bool) -> list[str]:
    verdict = verify(folder)
    if verdict.damage or verdict.manifest is None or not hashes:
        return list(verdict.damage)
    return damage_in(folder, verdict.manifest, process)


def _newest(parts: Parts, damaged: Mapping[Path, str], missing_ok: bool) -> dict[str, Any]:
    """The newest checkpoint whose files have the right sizes, and a number that is free for the next."""
    folder = automatic_folder(parts._options.project)
    known = available(folder)
    following = known[-1].number + 1 if known else 0
    found, failure = None, None
    try:
        found = find_newest(folder, damaged=damaged)
    except CheckpointError as error:
        failure = error
    stored = None
    if parts._uploader is not None:
        from accel_torch.remote import newest_on_store

        stored = newest_on_store(parts, local=found is not None)
    if stored is not None:
        following = max(following, stored.number + 1)
        numbers = {checkpoint.path: checkpoint.number for checkpoint in known}
        if found is None or stored.number > numbers[found]:
            return {"folder": None, "url": stored.path, "following": following}
    if failure is not None and not (missing_ok and not known):
        raise failure
    return {"folder": None if found is None else str(found), "url": None, "following": following}


def _named(given: str | os.PathLike[str] | None, method: str) -> str:
    if given is None:
        raise SettingError(
            f"{method}() was called without a folder.",
            "Checkpoints are not named automatically.",
            "Name a folder, or give ProjectConfiguration(automatic_checkpoint_naming=True) to the Accelerator.",
        )
    return os.path.expanduser(os.fspath(given))
