"""`accel runs diff`: planted differences are named by their keys, and what always differs is none."""

from __future__ import annotations

import copy
import json
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_cli.commands.runs import COMMAND
from accel_state.errors import NotFound
from accel_tracking import JSONLinesTracker
from accel_tracking.record import attempt_entry, write_run_record


def content(folder: Path) -> dict[str, Any]:
    """A record with this folder in all places where a run's own folder stands."""
    words = ["accel", "launch", f"--project_dir={folder}", "train.py", "--output", f"{folder}/out", "--lr", "0.1"]
    return {
        "code": {
            "script": "/x/train.py",
            "script_sha256": "a",
            "repository": "/x",
            "revision": "1" * 40,
            "difference": "",
            "difference_sha256": "",
            "untracked": {},
        },
        "command": {"words": words, "folder": str(folder.parent), "launched": True, "python": "/python"},
        "settings": {
            "num_processes": {"value": 2, "source": "--num_processes"},
            "mixed_precision": {"value": "no", "source": "default"},
            "gradient_accumulation_steps": {"value": 1, "source": "run.yaml:3"},
            "project_dir": {"value": str(folder), "source": "--project_dir"},
            "project_config.logging_dir": {"value": str(folder), "source": "argument"},
        },
        "packages": {"python": "3.11.7", "numpy": "2.0.0", "torch": "2.9.0"},
        "devices": {"device": "cuda:0", "description": "H100", "software": {"driver": "1"}, "torch": {"cuda": "12.8"}},
        "world": {"processes": 2, "mesh": {"dp_shard": 2}, "host": "node1"},
        "seeds": {"torch": 3, "given": True},
        "data": [{"class": "a.Digits", "length": 100, "fingerprint": "f"}],
        "environment": {"NCCL_ALGO": "Ring"},
    }


def run(folder: Path, plant: Callable[[dict[str, Any]], None] = lambda facts: None, **logged: Any) -> Path:
    facts = copy.deepcopy(content(folder))
    plant(facts)
    for restart in range(logged.get("starts", 1)):
        assert write_run_record(folder, facts, {**attempt_entry("launch", restart, "node1"), "id": str(restart)}) == ""
    tracker = JSONLinesTracker("digits", folder)
    tracker.start()
    tracker.store_init_configuration({"lr": logged.get("lr", 0.1), "output": f"{folder}/out"})
    for step in range(6):
        loss = 1 / (step + 1) if step < logged.get("same_until", 6) else 7.0
        tracker.log({"loss": loss, "epoch_seconds": id(folder)}, step=step)
    tracker.finish()
    return folder


def call(*arguments: object) -> int:
    parser = ArgumentParser()
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args(["diff", *map(str, arguments)]))


def test_equal_runs_in_two_folders_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run(tmp_path / "one" / "run"), run(tmp_path / "other" / "run-2")
    assert call(one, other) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Nothing differs.",
        "Not compared, because they count time: epoch_seconds.",
    ]


def assign(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def plant(facts: dict[str, Any]) -> None:
        for key in path[:-1]:
            facts = facts[key]
        facts[path[-1]] = to

    return plant


PLANTED: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any]]] = {
    "code.revision": (assign("code", "revision", to="2" * 40), {}),
    "code.difference_sha256": (assign("code", "difference_sha256", to="b"), {}),
    "code.untracked.new.py": (assign("code", "untracked", to={"new.py": "c"}), {}),
    "code.script_sha256": (assign("code", "script_sha256", to="b"), {}),
    "command.words": (lambda facts: facts["command"]["words"].append("--shuffle"), {}),
    "settings.mixed_precision": (assign("settings", "mixed_precision", to={"value": "bf16", "source": "argument"}), {}),
    "settings.gradient_accumulation_steps.source": (
        assign("settings", "gradient_accumulation_steps", "source", to="argument"),
        {},
    ),
    "packages.numpy": (assign("packages", "numpy", to="2.1.0"), {}),
    "packages.python": (assign("packages", "python", to="3.12.1"), {}),
    "devices.software.driver": (assign("devices", "software", "driver", to="2"), {}),
    "devices.torch.cuda": (assign("devices", "torch", "cuda", to="13.0"), {}),
    "world.mesh.tp": (assign("world", "mesh", to={"dp_shard": 2, "tp": 2}), {}),
    "seeds.torch": (assign("seeds", "torch", to=4), {}),
    "data.0.length": (assign("data", 0, "length", to=99), {}),
    "data.0.fingerprint": (assign("data", 0, "fingerprint", to="g"), {}),
    "environment.NCCL_ALGO": (assign("environment", to={}), {}),
    "hyperparameters.lr": (lambda facts: None, {"lr": 0.2}),
    "attempts": (lambda facts: None, {"starts": 2}),
    "metrics.loss": (lambda facts: None, {"same_until": 4}),
}


def test_each_planted_difference_is_named_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run(tmp_path / "one")
    named = {}
    for number, (key, (plant, logged)) in enumerate(PLANTED.items()):
        other = run(tmp_path / f"other-{number}", plant, **logged)
        assert call(one, other, "--json") == 1
        found = json.loads(capsys.readouterr().out)
        named[key] = [row["key"] for row in found["differences"]]
    assert named == {key: [key] for key in PLANTED}


def test_the_most_telling_difference_is_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plant(facts: dict[str, Any]) -> None:
        for key in ("code.revision", "settings.mixed_precision", "packages.numpy", "world.mesh.tp", "data.0.length"):
            PLANTED[key][0](facts)

    one, other = run(tmp_path / "one"), run(tmp_path / "other", plant, same_until=3)
    assert call(one, other) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[1:7]] == [
        "code.revision",
        "settings.mixed_precision",
        "packages.numpy",
        "data.0.length",
        "world.mesh.tp",
        "metrics.loss",
    ]
    assert " ".join(lines[8]) == "The metrics differ from step 3 on."
    assert lines[2][1:] == ["no", "bf16"]


def test_a_run_without_a_record_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no run\.json"):
        call(tmp_path, tmp_path)


def test_each_action_says_which_question_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    COMMAND.add_arguments(parser)
    (actions,) = [action.choices for action in parser._actions if action.dest == "action"]
    for name, action in actions.items():
        text = action.format_help()
        assert text.partition("?")[1], name
        assert text.count(f"\n  accel runs {name}") == 2, name
