"""Tests of what a backend declares: its manifest, its settings, the signatures of its strategy."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from accel_plugins.manifest import OLDEST_PROTOCOL, PROTOCOL, Manifest
from accel_plugins.resolve import strategy_class
from accel_plugins.strategy import Strategy
from accel_state import current
from accel_state.errors import AccelError
from accel_state.labels import DistributedType
from accel_state.process import PartialState
from accel_state.settings.environ import from_environment, to_environment
from accel_state.settings.schema import settings_of
from accel_testing.backends.base import Run, SuiteBase
from accel_testing.backends.reference_loop import Case

__all__ = ("DeclarationTests",)


class DeclarationTests(SuiteBase):
    """Tests of what a backend declares: its manifest, its settings, the signatures of its strategy."""

    def test_the_manifest_fits_this_version_of_the_interface(self) -> None:
        assert isinstance(self.manifest, Manifest)
        oldest, newest = self.manifest.protocols
        assert oldest <= PROTOCOL
        assert newest >= OLDEST_PROTOCOL
        assert self.manifest.label is None or self.manifest.label in DistributedType

    def test_the_strategy_is_one_and_keeps_the_signatures(self) -> None:
        strategy = strategy_class(self.manifest)
        for name, value in inspect.getmembers(Strategy, inspect.isfunction):
            if name.startswith("_"):
                continue
            expected = inspect.signature(value).parameters
            offered = inspect.signature(getattr(strategy, name)).parameters
            open_ended = {parameter.kind for parameter in offered.values()}
            if not {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} <= open_ended:
                assert list(offered)[: len(expected)] == list(expected), (
                    f"{name} has the parameters {list(offered)}, expected {list(expected)}"
                )

    def test_manifest_and_settings_load_without_torch(self) -> None:
        modules = {self.target, self.manifest.config, self.manifest.present or ""}
        imports = ", ".join(sorted(target.partition(":")[0] for target in modules if target))
        code = f"import sys; sys.path[:] = {sys.path!r}; import {imports}; sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], timeout=250, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"importing {imports} imports torch, or fails:\n{done.stderr}"

    def test_settings_have_defaults_and_survive_pickling(self) -> None:
        if self.manifest.config:
            settings = _imported(self.manifest.config)()
            assert pickle.loads(pickle.dumps(settings)) == settings

    def test_settings_survive_the_way_through_the_environment(self) -> None:
        if self.manifest.config and settings_of(_imported(self.manifest.config)):
            config = _imported(self.manifest.config)
            usual, changed = from_environment(config, {}), list(_changed_by_one_variable(config))
            for settings in (usual, *changed):
                assert from_environment(config, to_environment(settings)) == settings
            if any(setting.variable for setting in settings_of(config).values()):
                assert any(settings != usual for settings in changed), "no environment variable changes a setting"

    def test_presence_is_answered_by_yes_or_no(self, run: Run) -> None:
        if self.manifest.present is not None:
            assert all(isinstance(answer, bool) for answer in run(is_present, self.case()))

    def test_settings_of_another_backend_are_refused(self, run: Run) -> None:
        if self.manifest.config:
            assert set(run(refuse_foreign_settings, self.case())) == {"Conflict"}


def is_present(case: Case) -> object:
    """The result of the manifest's `present` for this process."""
    assert case.manifest.present is not None
    PartialState(cpu=True)
    module, _, function = case.manifest.present.partition(":")
    return getattr(importlib.import_module(module), function)(current.process())


def refuse_foreign_settings(case: Case) -> str:
    """The name of the error when the backend is started with settings of another class."""
    try:
        case.but(config=nullcontext()).open()
    except AccelError as error:
        return type(error).__name__ if error.remedy else "an error without a remedy"
    return "nothing was raised"


def _imported(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _changed_by_one_variable(config: type) -> Iterator[Any]:
    """Settings objects that differ from the default in one field, for each field that has an environment variable."""
    for setting in settings_of(config).values():
        for text in (*reversed(setting.type.choices), "3", "0.5", "true", "false", "text") if setting.variable else ():
            with contextlib.suppress(AccelError, ValueError):
                if setting.type.parse(text) != setting.default:
                    yield from_environment(config, {str(setting.variable): text})
                    break
