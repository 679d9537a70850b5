"""Whatever is typed or written: a launch is understood, or refused by a typed error, and never ends in a traceback."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_cli.launch.interface import LaunchPlan, Machine, Script
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.options import add_launch_arguments
from accel_cli.launch.request import read_request
from accel_cli.parser import Parser
from accel_state.errors import AccelError
from accel_state.settings.schema import settings_of
from accel_testing.launchers import make_plan

KNOWN = [known for cls in launch_classes() for known in settings_of(cls).values()]
FLAGS = sorted({known.flag for known in KNOWN if known.flag})
KEYS = sorted({known.key for known in KNOWN if known.key})
NAMES = sorted({name for known in KNOWN for name in known.variables})
VALUES = st.one_of(
    st.sampled_from(
        ["true", "no", "0", "1", "2", "-1", "4.5", "nan", "bf16", "FSDP", "all", "1,2", "[]", "{}", "null"]
    ),
    st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8),
)


def attempt(words, environ):
    parser = Parser("accel launch")
    add_launch_arguments(parser)
    try:
        request = read_request(parser.parse_args(words), environ)
        machine = Machine("python", 8, lambda: 2, environ)
        return make_plan(replace(request, machine=machine, script=Script("script", "job.py")))
    except AccelError as error:
        return error


def understood_or_refused(answer, given=True):
    """Whether a launch is understood; an error has its parts, and there is none where nothing was given."""
    understood = isinstance(answer, LaunchPlan)
    assert understood or (given and answer.failure and answer.remedy)
    return understood


@pytest.fixture(autouse=True)
def no_mpirun(monkeypatch):
    monkeypatch.setattr("accel_cli.launch.mpi.find_mpi", lambda: "Hydra")


@pytest.fixture
def nowhere(tmp_path):
    return {"HF_HOME": str(tmp_path)}


ODD = (
    *("--", "-", "", "=", "--=", "a=b=c", ",", "[", "{", "[" * 3000, "9" * 5000, "9" * 25, "1e9999", "nan", "inf"),
    *("-1", "1_000", "\u0663", "\uff11", "a\0b", "\ud800", "\x1b[2J", " ", "\n", "null", "*" * 1000, "2147483648", ":"),
)


@pytest.mark.parametrize("number", range(2))
def test_every_flag_with_odd_values(nowhere, number):
    # Each flag meets some of the values; which ones changes from flag to flag.
    understood = [
        understood_or_refused(attempt([f"{flag}={value}"], nowhere))
        for position, flag in enumerate(FLAGS)
        for value in ODD[(position + 5 * number) % 10 :: 10]
    ]
    # Texts, paths and numbers without a limit take a good part of them.
    assert len(understood) > 2 * len(FLAGS)
    assert 50 < sum(understood) < len(understood) / 2


@pytest.mark.parametrize("flag", FLAGS)
def test_two_dashes_after_an_equals_sign_are_the_value_of_a_flag(flag, nowhere):
    understood_or_refused(attempt([f"{flag}=--"], nowhere))


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.lists(st.tuples(st.sampled_from(FLAGS), st.one_of(st.none(), VALUES)), max_size=5))
def test_launch_with_any_flags(nowhere, pairs):
    words = [word for flag, value in pairs for word in ((flag,) if value is None else (f"{flag}={value}",))]
    understood_or_refused(attempt(words, nowhere), words)


@FUZZ
@given(st.lists(VALUES, max_size=5).filter(lambda words: not {"-h", "--help"} & set(words)))
def test_launch_with_any_arguments(nowhere, words):
    understood_or_refused(attempt(words, nowhere), words)


@FUZZ
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_launch_with_any_environment_variables(nowhere, variables):
    understood_or_refused(attempt([], {**nowhere, **variables}), variables)


@FUZZ
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_launch_with_any_config_file(nowhere, tmp_path, keys):
    path = tmp_path / "run.yaml"
    lines = (f"{table}:\n  {key}: {value}" if key else f"{table}: {value}" for table, key, value in split(keys))
    path.write_text("\n".join(lines), encoding="utf-8")
    understood_or_refused(attempt(["--config_file", str(path)], nowhere), keys)


def split(keys):
    for name, value in keys.items():
        table, _, key = name.partition(".")
        yield table, key, value
