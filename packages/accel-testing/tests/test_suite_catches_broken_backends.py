"""The suite itself is tested: every kind of breakage is caught by the test that is named for it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from accel_state.errors import PluginError
from accel_testing.backends import BackendSuite, Case, loss_of, make_optimizer
from accel_testing.backends.base import MicroBatches
from accel_testing.processes import Processes, ProcessesFailed, run_command

HERE = Path(__file__).parent


def _load() -> ModuleType:
    """The module of broken backends, under the name by which the processes import it."""
    spec = importlib.util.spec_from_file_location("broken_backends", HERE / "broken_backends.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["broken_backends"] = module
    spec.loader.exec_module(module)
    return module


broken = _load()


@pytest.fixture(scope="module")
def two(processes: Callable[[int], Processes]) -> Iterator[Processes]:
    sys.path.insert(0, str(HERE))
    try:
        yield processes(2)
    finally:
        sys.path.remove(str(HERE))


def suite_of(manifest: Any) -> BackendSuite:
    class Suite(BackendSuite):
        target = "accel_plugins.ddp.manifest:MANIFEST"

        def reference(
            self, case: Case, batches_of_ranks: Sequence[Sequence[MicroBatches]]
        ) -> list[Mapping[str, Tensor]]:
            model = case.make()
            optimizer = make_optimizer(case, model)
            for micro_batches_of_ranks in zip(*batches_of_ranks, strict=True):
                for micro_batches in micro_batches_of_ranks:
                    for inputs, targets in micro_batches:
                        loss = loss_of(model, inputs, targets)
                        (loss / len(micro_batches) / len(micro_batches_of_ranks)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [model.state_dict() for _ in batches_of_ranks]

    Suite.manifest = manifest  # type: ignore[assignment, method-assign]
    return Suite()


@pytest.mark.parametrize(
    ("strategy", "changes", "test", "arguments"),
    broken.CAUGHT_BY,
    ids=[f"{strategy.__name__}-{test[5:40]}" for strategy, _, test, _ in broken.CAUGHT_BY],
)
def test_what_is_broken_is_caught(
    two: Processes, tmp_path: Path, strategy: Any, changes: dict[str, Any], test: str, arguments: tuple[Any, ...]
) -> None:
    method = getattr(suite_of(broken.manifest(strategy, **changes)), test)
    given = [tmp_path if argument == "folder" else argument for argument in arguments]
    if "run" in inspect.signature(method).parameters:
        given.insert(0, two.run)

    # A comparison that fails, processes that fail where the breakage makes one raise, or settings that cannot be made.
    with pytest.raises((AssertionError, TypeError)) as caught:
        method(*given)
    assert not (isinstance(caught.value, ProcessesFailed) and any(outcome.hung for outcome in caught.value.outcomes))


def test_a_sound_backend_follows_its_reference(two: Processes) -> None:
    suite_of(broken.manifest(broken.Sound)).test_weights_follow_the_reference_after_every_step(two.run)


def test_every_test_of_the_suite_catches_something() -> None:
    tests = {name for name in vars(BackendSuite) if name.startswith("test_")}
    assert tests - {test for _, _, test, _ in broken.CAUGHT_BY} == set()


def test_what_a_manifest_declares_away_is_skipped() -> None:
    class Request:
        function = BackendSuite.test_processes_may_run_out_of_batches

    suite = suite_of(broken.LACKING)
    skip = inspect.unwrap(BackendSuite._skip_what_is_declared_away)
    with pytest.raises(pytest.skip.Exception, match="lacks"):
        getattr(skip, "__wrapped__", skip)(suite, Request())


def test_a_failure_shows_the_values_that_were_compared(tmp_path: Path) -> None:
    """Pytest rewrites assertions of an installed package only where the package registers its module."""
    (tmp_path / "test_wrong.py").write_text(
        """
from dataclasses import replace
from accel_plugins.ddp.manifest import MANIFEST
from accel_testing.backends import BackendSuite

WRONG = replace(MANIFEST, protocol=9)

class TestWrong(BackendSuite):
    manifest = WRONG
    target = "unused:unused"
"""
    )
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    done = run_command([*command, "-k", "fits_this_version", str(tmp_path)], timeout=240)
    assert "assert 9 <= 3" in done.stdout


def test_a_test_may_not_be_overridden_in_silence() -> None:
    with pytest.raises(PluginError, match="overrides test_checking_changes_nothing"):

        class Quiet(BackendSuite):
            def test_checking_changes_nothing(self) -> None:  # type: ignore[override]
                """Nothing."""

    with pytest.raises(PluginError, match="strict expected failure"):

        class Loose(BackendSuite):
            @pytest.mark.xfail(reason="not strict")
            def test_checking_changes_nothing(self) -> None:  # type: ignore[override]
                """Nothing."""

    class Honest(BackendSuite):
        @pytest.mark.xfail(strict=True, reason="the engine changes what it checks")
        def test_checking_changes_nothing(self) -> None:  # type: ignore[override]
            raise AssertionError

    assert Honest.test_checking_changes_nothing is not BackendSuite.test_checking_changes_nothing


def test_members_that_stay_pass_the_test_of_elastic_backends(two: Processes) -> None:
    suite_of(
        broken.manifest(broken.SharesSteps, **broken.ELASTIC)
    ).test_shares_of_each_step_make_up_its_samples_and_steps_are_counted(two.run)
