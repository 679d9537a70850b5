"""The checks of `accel test`, on one and on two processes, and that a wrong result is found."""

from __future__ import annotations

import pytest
import torch

from accel_testing.fresh import fresh
from accel_torch import selftest


def passes():
    selftest.main()


def fails_in_training():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "_train_alone", lambda model, inputs, targets: None)
        selftest.main()


def fails_in_gathering():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "gather", lambda tensor: torch.zeros(2))
        selftest.main()


def test_self_test_on_one_process(capsys):
    with fresh():
        selftest.main()
    assert capsys.readouterr().out.rstrip().endswith("All checks passed.")


def test_self_test_on_two_processes(two):
    first, second = two.outcomes(passes)
    assert (first.error, second.error) == (None, None)
    assert "2 process(es)" in first.output
    assert "All checks passed." in first.output


@pytest.mark.parametrize("broken", [fails_in_training, fails_in_gathering])
def test_self_test_fails_on_wrong_training_and_gathering(two, broken):
    for outcome in two.outcomes(broken):
        assert "CollectiveError" in str(outcome.error)
