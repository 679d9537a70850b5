"""Backends of kinds that the project has not itself pass the kit: a spread optimizer, and an engine that clips."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from kinds_of_backends import EngineConfig
from suites_of_the_catalogues import SuiteOfACatalogue

from accel_testing.backends import Case


@pytest.fixture(scope="module")
def importable() -> Any:
    """The processes import the backends from this folder."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))


class TestSpreadOptimizer(SuiteOfACatalogue):
    target = "kinds_of_backends:SPREAD"


class TestEngineThatClips(SuiteOfACatalogue):
    target = "kinds_of_backends:ENGINE"
    config: ClassVar[Any] = EngineConfig()

    def settings(self, case: Case) -> EngineConfig:
        return EngineConfig(case.clip_norm or 0.0)
