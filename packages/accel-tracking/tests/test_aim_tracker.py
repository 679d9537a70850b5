"""The Aim tracker with a simulated Aim, because Aim publishes wheels for few systems.

If `ACCEL_AIM_WHEEL` names a wheel of Aim, as in `nox -s trackers`, a test compares its source with the simulation.
"""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import os
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from accel_testing.trackers import Curves, TrackerSuite
from accel_tracking.trackers.aim import AimTracker


class Picture:
    """Simulates `aim.Image`."""

    def __init__(self, image: Any, caption: str = "", **options: Any) -> None:
        self.image, self.caption, self.options = image, caption, options


class Words:
    """Simulates `aim.Text`."""

    def __init__(self, text: str) -> None:
        self.text = text


class Run:
    """Simulates `aim.Run`, which tracks only numbers and Aim's objects."""

    def __init__(self, run_hash: str | None = None, *, repo: str | None = None, **options: Any) -> None:
        self.repo, self.options, self.name, self.closed = repo, options, None, False
        self.items: dict[str, Any] = {}
        self.tracked: list[tuple[Any, ...]] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.items[key] = value

    def track(self, value: Any, name: str, step: int | None = None, *, context: Any = None) -> None:
        if not isinstance(value, (int, float, Picture, Words)):
            raise ValueError(f"Input type {type(value)} is neither python number nor AimObject")
        number = sum(name == other for other, *_ in self.tracked)
        self.tracked.append((name, number if step is None else step, value, context))

    def close(self) -> None:
        self.closed = True


# File and class of Aim, the method, and the names of its parameters; those after * are given by name only.
CONTRACT = [
    (
        "aim/sdk/run.py",
        "Run",
        Run.__init__,
        "run_hash * repo read_only experiment force_resume system_tracking_interval log_system_params "
        "capture_terminal_logs",
    ),
    ("aim/sdk/run.py", "BasicRun", Run.track, "value name step epoch * context"),
    ("aim/sdk/run.py", "BasicRun", Run.__setitem__, "key val *"),
    ("aim/sdk/run.py", "BasicRun", Run.close, "*"),
    ("aim/sdk/objects/image.py", "Image", Picture.__init__, "image caption format quality optimize *"),
    ("aim/sdk/objects/text.py", "Text", Words.__init__, "text *"),
]


@pytest.mark.parametrize(("file", "owner", "method", "parameters"), CONTRACT)
def test_parameters_of_the_simulated_aim_are_those_of_aim(file: str, owner: str, method: Any, parameters: str) -> None:
    del file, owner
    by_place, _, by_name = (part.split() for part in parameters.partition("*"))
    own = list(inspect.signature(method).parameters.values())[1:]
    kinds = inspect.Parameter
    places = [parameter.name for parameter in own if parameter.kind is kinds.POSITIONAL_OR_KEYWORD]
    assert len(places) <= len(by_place)
    if method is not Run.__setitem__:
        assert places == by_place[: len(places)]
    assert {parameter.name for parameter in own if parameter.kind is kinds.KEYWORD_ONLY} <= set(by_name)


@pytest.mark.skipif("ACCEL_AIM_WHEEL" not in os.environ, reason="needs a wheel of Aim: see `nox -s trackers`")
@pytest.mark.parametrize(("file", "owner", "method", "parameters"), CONTRACT)
def test_the_contract_is_that_of_the_source_of_aim(file: str, owner: str, method: Any, parameters: str) -> None:
    with zipfile.ZipFile(os.environ["ACCEL_AIM_WHEEL"]) as wheel:
        tree = ast.parse(wheel.read(file))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    (defined,) = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method.__name__)
    by_place, by_name = ([argument.arg for argument in kind] for kind in (defined.args.args, defined.args.kwonlyargs))
    assert " ".join([*by_place[1:], "*", *by_name]) == parameters


@pytest.fixture(autouse=True)
def aim(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("aim")
    module.__spec__ = importlib.machinery.ModuleSpec("aim", None)
    module.Run, module.Image, module.Text = Run, Picture, Words
    monkeypatch.setitem(sys.modules, "aim", module)


class TestAim(TrackerSuite):
    tracker_class = AimTracker

    def make(self, folder: Path) -> AimTracker:
        return AimTracker("run", folder)

    def read(self, folder: Path, tracker: Any) -> Curves:
        assert tracker.writer.closed
        curves: dict[str, list[tuple[float, float]]] = {}
        for name, step, value, _ in tracker.writer.tracked:
            curves.setdefault(name, []).append((step, value))
        return curves

    def read_config(self, folder: Path, tracker: Any) -> Any:
        return tracker.writer.items["hparams"]

    def test_aim_receives_repository_name_text_context_and_options(self, tmp_path: Path) -> None:
        tracker = AimTracker("run", tmp_path, experiment="digits")
        tracker.start()
        tracker.log({"loss": 1.0, "note": "first"}, step=1, context={"subset": "eval"})
        tracker.finish()
        run = tracker.tracker
        assert (run.repo, run.name, run.options) == (str(tmp_path), "run", {"experiment": "digits"})
        assert run.tracked[0] == ("loss", 1, 1.0, {"subset": "eval"})
        assert run.tracked[1][2].text == "first"

    def test_images_have_captions_and_options(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        options = {"aim_image": {"format": "png"}, "track": {"context": {"subset": "eval"}}}
        tracker.log_images({"a": ("pixels", "a cat"), "b": "more"}, step=2, kwargs=options)
        (_, step, first, context), (_, _, second, _) = tracker.tracker.tracked
        assert (step, first.image, first.caption, first.options) == (2, "pixels", "a cat", {"format": "png"})
        assert context == {"subset": "eval"}
        assert (second.image, second.caption) == ("more", "")
