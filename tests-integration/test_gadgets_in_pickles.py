"""Pickles made to attack the readers of checkpoints are read or refused, and do nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import reliability_gadgets as attacks
from accel_testing.processes import run_command


@pytest.mark.parametrize(("reader", "every"), [("metadata", 53), ("torch", 97), ("old torch", 101)])
def test_pickle_attacks_are_survived_by_every_reader(reader: str, every: int) -> None:
    tally = attacks.sweep(reader, every)
    assert tally.lost == []
    assert tally.injected == tally.survived > 150


UNCHECKED = """
import pathlib, pickle, sys
import reliability_gadgets as attacks

folder = pathlib.Path(sys.argv[1])
form = attacks.READERS["metadata"]._replace(read=lambda path: pickle.loads(path.read_bytes()))
hook = attacks.AuditHook()
sys.addaudithook(hook)
print(attacks.outcome(form, attacks.code_in_a_field("os.mkdir('it ran')"), folder, hook))
"""


def test_attack_sweep_notices_a_reader_without_checks(tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-c", UNCHECKED, str(tmp_path)], cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
    assert "os.mkdir ('it ran'" in done.stdout
