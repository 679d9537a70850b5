"""What the tests that need several packages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_state.testing.fresh import fresh

# A package of its own, which is tested where it is installed.
collect_ignore = ["accel-backend-example"]


@pytest.fixture
def clean_state() -> Iterator[None]:
    """No process, no run and no settings in the environment, before the test and after it."""
    with fresh():
        yield
