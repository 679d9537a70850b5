"""transformers sees the DeepSpeed configuration in use, of one and of several."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(
        not (importable("transformers") and importable("deepspeed")),
        reason="needs transformers and deepspeed: nox -s clients-transformers",
    ),
    pytest.mark.timeout(900),
]

# The stage, and whether models are built in parts: what is selected counts, whatever was before.
SELECTED = {
    "at first": (2, False),
    "teacher": (3, True),
    "whole": (1, False),
    "student": (2, False),
    "at last": (3, True),
}


def test_a_student_and_its_teacher_have_configurations_of_their_own(compare: Any) -> None:
    ours, original = compare("deepspeed_plugins.py", "torchrun alone")
    assert ours["looks"] == original["looks"]
    assert {name: (look["stage"], look["in parts"]) for name, look in ours["looks"].items()} == SELECTED
    assert ours["losses"] == pytest.approx(original["losses"], rel=1e-5)
    assert (ours["kind"], ours["lengths"]) == (original["kind"], original["lengths"])


def test_processes_generate_different_lengths_with_a_divided_teacher(run: Any, tmp_path: Any) -> None:
    """Two processes, on a CPU, are more than the original's DeepSpeed knows of."""
    two, one = (run("deepspeed_plugins.py", how, folder=str(tmp_path)) for how in ("torchrun", "torchrun alone"))
    assert two["looks"] == one["looks"]
    assert two["lengths"] == [4, 8]
    assert len(two["losses"]) * 2 == len(one["losses"])


def test_models_are_built_whole_where_dividing_is_switched_off(run: Any, tmp_path: Any) -> None:
    """The original divides them all the same."""
    told = run("deepspeed_whole.py", "torchrun", folder=str(tmp_path))
    assert told["in parts"] == {"by the flag": False, "within the block": True, "after the block": False}
    assert told["divided"]
    assert told["lengths"] == [4, 8]
