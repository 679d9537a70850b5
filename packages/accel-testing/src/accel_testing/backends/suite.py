"""The tests that every backend passes.

    class TestExample(BackendSuite):
        target = "accel_example.manifest:MANIFEST"

The suite runs the backend in real processes over gloo on the CPU and compares it with plain torch on the same global
batches. Tests of capabilities that the manifest lacks are skipped. A subclass may override a test only with the mark
`pytest.mark.xfail(strict=True, reason=...)`.

A backend that does not compute what one process computes is compared with the author's own `reference`, and with runs
whose result is known whatever the algorithm: all processes have equal data and settings that switch it off (`neutral`),
the learning rate is zero, the loss is convex, another model trains beside.
"""

from __future__ import annotations

from typing import Any

from accel_state.errors import PluginError
from accel_testing.backends.checkpoints import CheckpointTests
from accel_testing.backends.declaring import DeclarationTests
from accel_testing.backends.gradients import GradientTests
from accel_testing.backends.lifetime import LifetimeTests
from accel_testing.backends.preparing import PreparationTests
from accel_testing.backends.training import TrainingTests

__all__ = ("BackendSuite",)


class BackendSuite(DeclarationTests, PreparationTests, TrainingTests, GradientTests, CheckpointTests, LifetimeTests):
    """The tests of a backend; subclass this in a test file and set `target`.

    Settings that change what is computed, such as a period, get a subclass each.

    Attributes:
        target: the manifest as "module:attribute".
        config: the settings object for the tests; None: read from the environment.
        neutral: settings with which processes that have equal data train as one process does; None: `config`, if the
            backend computes what one process computes.
        lacks: capabilities of the manifest that are missing with these settings, such as "exact_gradients".
        model: a class of a model as "module:class", for backends of certain models. It is created with a seed, which
            determines its weights, and maps inputs of shape (samples, 6) to logits of shape (samples, 3). "usual": the
            model of the kit.
        parallelism_config: the axes of the runs, for backends that have some; they are made of `processes` processes.
        processes: number of processes to start.
        tolerance: maximum relative difference between losses, weights and gradients of the backend and of plain
            PyTorch.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in vars(cls).items():
            if name.startswith("test_") and hasattr(BackendSuite, name) and not _expected_to_fail(value):
                raise PluginError(
                    f"{cls.__name__} overrides {name}.",
                    "A test of the suite may only be overridden by a strict expected failure with a reason.",
                    "Mark it pytest.mark.xfail(strict=True, reason=...), or set the missing capability to False in the "
                    "manifest.",
                )


def _expected_to_fail(test: Any) -> bool:
    marks = getattr(test, "pytestmark", ())
    return any(mark.name == "xfail" and mark.kwargs.get("strict") and mark.kwargs.get("reason") for mark in marks)
