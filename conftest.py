"""The order in which files of tests are given to the workers of pytest-xdist."""

from __future__ import annotations

import pytest

STARTS_PROCESSES = frozenset({"accel", "four", "one", "preloaded_python", "processes", "start", "three", "two"})
"""Fixtures of the tests that take longest: they start processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take long first, so that no worker is left alone with one of them at the end."""
    long = {item.path for item in items if STARTS_PROCESSES.intersection(getattr(item, "fixturenames", ()))}
    items.sort(key=lambda item: item.path not in long and "tests-integration" not in item.path.parts)
