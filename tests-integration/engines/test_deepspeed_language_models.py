"""DeepSpeed with models of transformers: built in parts, and with sequences divided among processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(
        not (importable("deepspeed") and importable("transformers")),
        reason="needs deepspeed and transformers: nox -s engines-deepspeed",
    ),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("preloaded_python"),
]
PRELOADED = ("deepspeed", "transformers", "accel_torch.accelerator")

SCENES = "deepspeed_language_models.py"
Play = Callable[..., Any]


def test_a_model_is_built_in_parts_and_trains_as_a_whole_one(play: Play, tmp_path: Path) -> None:
    done = play(SCENES, "built_in_parts", folder=str(tmp_path))
    whole, held = done["sizes"]
    assert whole > 0
    assert held == 0
    assert done["equal"]
    assert done["filled"]["reduce_bucket_size"] == 16 * 16
    assert done["losses"] == pytest.approx(play(SCENES, "plain", folder=str(tmp_path)), abs=1e-4)


@pytest.mark.parametrize(("stage", "fixed"), [(1, False), (3, True)])
def test_divided_sequences_give_the_losses_of_whole_ones(play: Play, stage: int, fixed: bool) -> None:
    done = play(SCENES, "divided_sequences", stage=stage, fixed=fixed)
    assert done["shapes"] == [[2, 4]]  # samples, and half of the tokens
    assert done["batches"] == 4
    assert done["losses"] == pytest.approx(play(SCENES, "undivided_sequences", processes=1), abs=1e-4)


def test_groups_that_divide_sequences_read_different_samples(play: Play) -> None:
    done = play(SCENES, "divided_sequences", processes=4, stage=2)
    assert done["shapes"] == [[2, 4]]
    assert done["batches"] == 2
    assert done["losses"][-1] < done["losses"][0]


def test_sequences_that_cannot_be_divided_are_refused(play: Play) -> None:
    model, attention, heads, early, second, tokens, positions = play(SCENES, "refused_sequences")
    assert model.startswith("NotOffered")
    assert "sp_backend='torch'" in model
    assert attention.startswith("Conflict")
    assert "attn_implementation='sdpa'" in attention
    assert "head count 1 is not divisible" in heads
    assert early.startswith("NotReady")
    assert "for only one model" in second
    assert "sequences of 5 tokens" in tokens
    assert "It has no position_ids" in positions
