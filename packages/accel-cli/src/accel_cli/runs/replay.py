"""`accel runs replay RUN --step N`: one step of a run twice more, from the newest checkpoint before it.

If both replays give the same bits and the step is bad again, the data or the numerics are the cause. If they are the
same and the step is good, or if they differ, it was the machine or a race.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from accel_cli.report.collect import GUARD_EVENTS, lines_of
from accel_cli.runs.repeat import plan_repeat, run_plan
from accel_plugins.checkpoint.manifest import read_manifest
from accel_plugins.checkpoint.retention import checkpoints
from accel_state.errors import NotFound, SettingError
from accel_state.untrusted import printable, read_json
from accel_tracking.record import read_run_record
from accel_tracking.trackers.jsonl import read_run

__all__ = ("Replay", "judge", "replay_step", "show_replay")

_LOSS_TOLERANCE: Final = 1e-2
"""Relative difference up to which a loss is the recorded one: the recorded run may not have been deterministic."""


class Replay(NamedTuple):
    """The outcome of two replays of a step.

    Args:
        step: the step.
        checkpoint: the checkpoint from which both began.
        repeats: whether both gave the same bits on all processes.
        bad_before: whether the step was bad in the recorded run: a bad step that its guard saw, or a loss that is not
            finite.
        bad_again: whether it was bad in both replays.
        recorded: loss of the step in the recorded run, or None.
        losses: the losses of each replay, on all processes.
        verdict: the conclusion.
    """

    step: int
    checkpoint: str
    repeats: bool
    bad_before: bool
    bad_again: bool
    recorded: float | None
    losses: tuple[Sequence[str], Sequence[str]]
    verdict: str


def replay_step(run: str, step: int, output: str | None = None) -> Replay:
    """Replay a step twice.

    Args:
        run: folder of the run.
        step: number of the step, from 1.
        output: folder for both replays; None for one beside the run.

    Raises:
        NotFound: there is no checkpoint before the step, or a replay did not reach it.
        SettingError: the step is not valid, or the command cannot be started.
    """
    failure = f"Cannot replay step {step} of the run {run!r}."
    if step < 1:
        raise SettingError(failure, "Steps count from 1.", "Choose a step that the run has made.")
    record = read_run_record(run)
    begin = _checkpoint_before(record["folder"], step, failure)
    notes: list[dict[str, Any]] = []
    for number in (1, 2):
        plan = plan_repeat(run, None if output is None else os.path.join(output, str(number)), step, note=True)
        if plan.obstacle:
            raise SettingError(failure, plan.obstacle, f"The command is: {plan.shown}")
        target = Path(plan.output, "checkpoints", begin.name)
        # Links, because a checkpoint may be large and its files are never changed.
        shutil.copytree(begin, target, copy_function=_link)
        # The standard output is that of the conclusion.
        code = run_plan(plan, output_to=2)
        noted = _notes(plan.output)
        if not noted:
            remedy = (
                "Read its output. The script must call load_state(missing_ok=True) with automatic checkpoint naming."
            )
            obstacle = f"Replay {number} ended with exit code {code} before it reached the step."
            raise NotFound(failure, obstacle, remedy)
        notes.append({"ranks": noted, "guarded": _guarded(plan.output, step)})
    recorded = _recorded_loss(record["folder"], step)
    before = _guarded(record["folder"], step) or (recorded is not None and not math.isfinite(recorded))
    return judge(step, begin.name, before, recorded, notes)


def judge(
    step: int, checkpoint: str, bad_before: bool, recorded: float | None, notes: Sequence[Mapping[str, Any]]
) -> Replay:
    """The conclusion from what two replays noted.

    Args:
        step: the step.
        checkpoint: where they began.
        bad_before: whether the step was bad in the run.
        recorded: its loss in the run, or None.
        notes: for each replay, `ranks` with what each process noted, and whether it was `guarded`.
    """
    one, other = notes
    repeats = one["ranks"] == other["ranks"]
    losses = tuple([loss for rank in sorted(note["ranks"]) for loss in note["ranks"][rank]["losses"]] for note in notes)
    bad = [note["guarded"] or not all(rank["finite"] for rank in note["ranks"].values()) for note in notes]
    again = all(bad) or (bad_before and all(_is_near(recorded, note["ranks"]) for note in notes))
    if not repeats:
        verdict = "The two replays differ: the machine, a race, or random numbers that nothing seeds."
    elif again:
        verdict = "The step repeats bit-equal and is bad again: the data or the numerics."
    elif bad_before:
        verdict = "The step repeats bit-equal and is not bad: it was the machine or a race."
    else:
        verdict = "The step repeats bit-equal, and it was not bad in the run either."
    return Replay(step, checkpoint, repeats, bad_before, again, recorded, (losses[0], losses[1]), verdict)


def _is_near(recorded: float | None, ranks: Mapping[str, Any]) -> bool:
    """Whether the main process had the recorded loss again."""
    losses = [float(loss) for loss in ranks[min(ranks)]["losses"]]
    if recorded is None or not losses or not math.isfinite(recorded):
        return False
    return any(
        math.isclose(loss, recorded, rel_tol=_LOSS_TOLERANCE) for loss in (losses[-1], sum(losses) / len(losses))
    )


def _checkpoint_before(folder: str, step: int, failure: str) -> Path:
    """The newest complete checkpoint after fewer steps."""
    best: tuple[int, Path] | None = None
    for one in checkpoints(Path(folder, "checkpoints")):
        manifest = read_manifest(one.path)
        saved_step = None if manifest is None else manifest.facts.get("run_step")
        if isinstance(saved_step, int) and saved_step < step and (best is None or saved_step > best[0]):
            best = (saved_step, one.path)
    if best is None:
        remedy = "Save automatically: ProjectConfiguration(automatic_checkpoint_naming=True, save_policy=...)."
        raise NotFound(failure, f"{folder} has no automatic checkpoint from before this step.", remedy)
    return best[1]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _notes(folder: str) -> dict[str, Any]:
    """What each process noted, by the name of its file."""
    notes = {}
    for path in sorted(Path(folder, "replay").glob("rank_*.json")):
        notes[path.stem] = read_json(path)
    return notes


def _guarded(folder: str, step: int) -> bool:
    return any(line.get("step") == step for line in lines_of(folder, GUARD_EVENTS))


def _recorded_loss(folder: str, step: int) -> float | None:
    """The loss of a step that the run logged, under the first name with "loss" in it."""
    try:
        curves = read_run(folder).curves()
    except SettingError:
        return None
    named = sorted((name for name in curves if "loss" in name.lower()), key=len)
    return dict(curves[named[0]]).get(step) if named else None


def show_replay(run: str, step: int, output: str | None, as_json: bool) -> int:
    """Replay a step, print the conclusion, and return 0 if it repeats bit-equal and is not bad again, else 1."""
    replay = replay_step(run, step, output)
    if as_json:
        recorded = replay.recorded
        shown = recorded if recorded is None or math.isfinite(recorded) else str(recorded)
        print(json.dumps({**replay._asdict(), "recorded": shown}))
    else:
        print(printable(f"Step {step}, from {replay.checkpoint}: {replay.verdict}"))
        for number, losses in enumerate(replay.losses, 1):
            print(printable(f"loss of replay {number}: {', '.join(losses)}"))
        print(f"loss in the run: {'not logged' if replay.recorded is None else replay.recorded}")
    return int(not replay.repeats or replay.bad_again)
