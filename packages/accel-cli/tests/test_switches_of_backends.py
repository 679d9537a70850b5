"""A backend of a third party brings a switch of `accel launch`, as the built-in ones do."""

from __future__ import annotations

import pytest

BACKEND = """
from dataclasses import dataclass
from accel_plugins.manifest import Manifest
from accel_state.settings.schema import BOOLEAN, INTEGER, Setting, setting

@dataclass
class Config:
    stage: int = setting(
        2, type=INTEGER, flag="--rockets", variable="ROCKET_STAGE", key="rocket_config.stage", group="Rockets"
    )

MANIFEST = Manifest(
    "rocket",
    "rocket:Strategy",
    "rocket:Config",
    switch=Setting("use_rocket", BOOLEAN, False, variable="USE_ROCKET", flag="--use_rocket", help="Fly."),
    protocol=3,
)
"""


@pytest.fixture
def rocket(script):
    script("[accel.backends]\nrocket = rocket:MANIFEST\n", "site/rocket-1.0.dist-info/entry_points.txt")
    return {"PYTHONPATH": str(script(BACKEND, "site/rocket.py").parent)}


def test_it_is_an_option_that_chooses_the_backend_and_reaches_the_process(accel, script, rocket):
    assert "--use_rocket" in accel("launch", "--help-all", env=rocket).stdout
    body = script("import os; print(os.environ.get('ACCEL_BACKEND'), os.environ.get('USE_ROCKET'))")
    done = accel("launch", "--use_rocket", "--rockets", "3", body, env=rocket)
    assert (done.returncode, done.stdout) == (0, "rocket true\n"), done.stderr
    assert done.stderr == "accel launch: 1 process, device cpu, backend rocket, precision no.\n"


def test_options_of_the_backend_without_its_switch_are_pointed_out(accel, script, rocket):
    done = accel("launch", "--rockets", "3", script("print('ran')"), env=rocket)
    assert done.stdout == "ran\n"
    assert "--use_rocket" in done.stderr


def test_two_switches_contradict_each_other(accel, script, rocket):
    done = accel("launch", "--use_rocket", "--use_fsdp", script("print('ran')"), env=rocket)
    assert (done.returncode, done.stdout) == (2, "")
    assert "use_rocket (--use_rocket)" in done.stderr
