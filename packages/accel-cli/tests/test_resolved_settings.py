"""Flag before environment before file before default, and the flags that settings become."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from accel_cli.config.file import read_config
from accel_cli.config.resolved import label, resolve_settings
from accel_cli.launch.launchers import carried_classes, launcher_settings
from accel_cli.launch.options import add_launch_arguments, add_settings, flag_values
from accel_cli.launch.settings import LAUNCH_CLASSES, LAUNCHER_ONLY
from accel_cli.parser import Parser
from accel_state.errors import SettingError
from accel_state.settings.environ import Given, from_environment, read_setting
from accel_state.settings.run import ProcessSettings, RunSettings
from accel_state.settings.schema import BOOLEAN, INTEGER, SWITCH, setting, settings_of

OF_LAUNCH = tuple(dict.fromkeys((*LAUNCH_CLASSES, *launcher_settings())))
OF_PROCESSES = tuple(one for one in OF_LAUNCH if one not in LAUNCHER_ONLY)

# Settings that exclude others of their class, or that look closer at what they are given.
EXCLUSIVE = ("sp_size", "sp_attn_implementation")

FLAG = {"mixed_precision": Given("fp8", "--mixed_precision")}
FILE = {"mixed_precision": Given("fp16", "run.yaml:3")}
VARIABLE = {"ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.parametrize(
    ("flags", "environ", "file", "expected"),
    [
        (
            FLAG,
            VARIABLE,
            FILE,
            [("fp8", "--mixed_precision"), ("bf16", "$ACCELERATE_MIXED_PRECISION"), ("fp16", "run.yaml:3")],
        ),
        ({}, VARIABLE, FILE, [("bf16", "$ACCELERATE_MIXED_PRECISION"), ("fp16", "run.yaml:3")]),
        ({}, {}, FILE, [("fp16", "run.yaml:3")]),
        (FLAG, {}, FILE, [("fp8", "--mixed_precision"), ("fp16", "run.yaml:3")]),
        ({}, {"ACCELERATE_MIXED_PRECISION": " "}, {}, []),
    ],
)
def test_flag_wins_over_environment_over_file_over_default(flags, environ, file, expected):
    effect = resolve_settings([RunSettings], flags, environ, file)["mixed_precision"]
    assert [(given.value, given.origin) for given in effect.candidates] == [*expected, ("no", "default")]
    assert effect.is_set == bool(expected)
    assert [given.value for given in effect.overridden] == [value for value, _ in expected[1:]]


def test_a_given_value_that_equals_the_default_is_still_given():
    settings = resolve_settings([RunSettings], {"mixed_precision": Given("no", "--mixed_precision")}, {}, {})
    assert settings.variables(RunSettings) == {"ACCELERATE_MIXED_PRECISION": "no"}
    assert resolve_settings([RunSettings], {}, {}, {}).variables(RunSettings) == {}


def test_a_variable_of_the_wrong_kind_is_named():
    with pytest.raises(SettingError, match=r"\$ACCELERATE_MIXED_PRECISION"):
        resolve_settings([RunSettings], {}, {"ACCELERATE_MIXED_PRECISION": "half"}, {})


def text_for(known):
    """A text that is not the default and that the setting takes."""
    candidates = (*reversed(known.type.choices), "3", "true", "false", "true,false,true", "pp=2", "text")
    for text in candidates:
        try:
            if known.type.parse(text) != known.default:
                return text
        except ValueError:
            continue
    raise AssertionError(f"no text for {known}")


def parse(*arguments, classes=OF_LAUNCH):
    parser = Parser("accel launch")
    add_settings(parser, classes)
    return {name: given.value for name, given in flag_values(parser.parse_args(arguments), classes).items()}


@pytest.mark.parametrize("known", [known for cls in OF_LAUNCH for known in settings_of(cls).values() if known.flag])
def test_every_flag_is_understood_in_both_spellings(known):
    alone = known.type is SWITCH or (known.type is BOOLEAN and known.default is False)
    for flag in {known.flag, known.flag.replace("_", "-")}:
        assert label(known) in parse(flag, *(() if alone else (text_for(known),)))


def test_switch_flags_have_negated_flags():
    assert parse("--cpu") == {"cpu": True}
    assert parse("--no_cpu") == {"cpu": False}
    assert parse("--no-prefix-output") == {"prefix_output": False}
    assert parse("--cpu", "--no-cpu") == {"cpu": False}


def test_flags_that_are_not_given_have_no_values():
    assert parse() == {}


@dataclass
class Backend:
    """Settings of a backend, some of which look like those of the launcher."""

    sharded: bool | None = setting(
        None, type=BOOLEAN, flag="--sharded", key="rocket.sharded", variable="ROCKET_SHARDED"
    )
    gradient_accumulation_steps: int = setting(
        5, type=INTEGER, flag="--gradient_accumulation_steps", key="rocket.steps", variable="ROCKET_STEPS"
    )
    debug: str = setting("own")


def test_an_open_boolean_takes_a_value():
    assert parse("--sharded", "true", classes=(Backend,)) == {"rocket.sharded": True}
    assert parse("--sharded=no", classes=(Backend,)) == {"rocket.sharded": False}
    with pytest.raises(SettingError, match="sharded='maybe'"):
        parse("--sharded", "maybe", classes=(Backend,))


def test_settings_of_backends_do_not_take_the_place_of_the_launchers():
    classes = (*OF_LAUNCH, Backend)
    given = parse("--gradient_accumulation_steps", "3", classes=classes)
    assert (given["gradient_accumulation_steps"], given["rocket.steps"]) == (3, 3)
    settings = resolve_settings(classes, {}, {"ROCKET_STEPS": "7", "ACCELERATE_DEBUG_MODE": "1"}, {})
    assert settings.instance(RunSettings).gradient_accumulation_steps == 1
    assert settings.instance(Backend).gradient_accumulation_steps == 7
    assert settings.variables(Backend) == {"ROCKET_STEPS": "7"}
    assert settings.instance(ProcessSettings).debug is True
    assert settings.instance(Backend).debug == "own"


def test_short_spellings_of_torchrun():
    assert parse("-t", "3") == {"tee": "3"}


def test_abbreviations_are_refused():
    with pytest.raises(SettingError, match="Did you mean --mixed_precision"):
        parse("--mixed_prec", "no")


@pytest.mark.parametrize(
    "arguments",
    [
        ["job.py"],
        ["job.py", "--num_processes", "7", "--cpu"],
        ["job.py", "--", "-m", "--help", "-q", "--config_file"],
        ["job.py", "-h"],
        ["job.py", "job.py", "--x=y", "-5", "", "a b"],
    ],
)
def test_everything_after_the_script_is_the_scripts(arguments):
    parser = Parser("accel launch")
    add_launch_arguments(parser)
    parsed = parser.parse_args(["--num_processes", "2", *arguments])
    assert (parsed.script, parsed.module) == (arguments, False)
    assert flag_values(parsed, OF_LAUNCH)["num_processes"].value == 2


def test_no_two_settings_of_a_launch_share_a_label_a_flag_a_key_or_a_variable():
    settings = [known for cls in OF_LAUNCH for known in settings_of(cls).values()]
    # DeepSpeed's table of a config file holds a setting that others have as well.
    settings = [known for known in settings if known.key != "deepspeed_config.gradient_accumulation_steps"]
    for values in (
        [label(known) for known in settings],
        [known.flag for known in settings if known.flag],
        [known.key for known in settings if known.key],
        [variable for known in settings for variable in known.variables],
    ):
        assert len(values) == len(set(values))


def own(known):
    """The variables that a setting is carried by."""
    if known.name == "override_linear_precision":
        return [f"ACCELERATE_FP8_OVERRIDE_{name}" for name in ("FPROP", "DGRAD", "WGRAD")]
    return [known.variable] if known.variable else []


@pytest.mark.parametrize(
    ("cls", "known"),
    [
        pytest.param(cls, known, id=f"{cls.__name__}.{known.name}")
        for cls in carried_classes()
        for known in settings_of(cls).values()
    ],
)
def test_flag_file_and_variable_reach_the_process_alike(cls, known, tmp_path):
    text = text_for(known)
    ways = []
    if known.flag:
        alone = known.type is SWITCH or (known.type is BOOLEAN and known.default is False)
        parser = Parser("accel launch")
        add_settings(parser, [cls])
        words = [known.flag] if alone else [known.flag, text]
        ways.append(resolve_settings([cls], flag_values(parser.parse_args(words), [cls]), {}, {}))
    if known.key:
        *tables, key = known.key.split(".")
        lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(tables)]
        path = tmp_path / "run.yaml"
        path.write_text("\n".join([*lines, f"{'  ' * len(tables)}{key}: {text}"]))
        ways.append(resolve_settings([cls], {}, {}, read_config(str(path), [cls]).values))
    if known.variable:
        ways.append(resolve_settings([cls], {}, {known.variable: text}, {}))
    carried = [settings.variables(cls) for settings in ways]
    assert all(sorted(variables) == sorted(own(known)) for variables in carried)
    assert all(variables == carried[0] for variables in carried)
    if known.variable and carried:
        value = read_setting(known, carried[0]).value
        assert value == known.parse(text, "test")
        assert value != known.default


@pytest.mark.parametrize("cls", [cls for cls in OF_PROCESSES if cls.__name__ != "FP8Settings"])
def test_what_is_carried_is_read_back_as_the_same_settings(cls):
    given = {
        label(known): Given(known.parse(text_for(known), "test"), "test")
        for known in settings_of(cls).values()
        if known.variable and known.name not in EXCLUSIVE
    }
    settings = resolve_settings([cls], given, {}, {})
    there = from_environment(cls, settings.variables(cls))
    for name, known in settings_of(cls).items():
        if label(known) in given:
            assert getattr(there, name) == given[label(known)].value, name
