"""Every setting of every built-in backend: from a flag, a file or a call to the same object in the process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accel_cli.launch.backends import backend_settings
from accel_cli.launch.interface import Machine
from accel_cli.launch.request import request_of
from accel_state.settings.schema import BOOLEAN, SWITCH, plain_value, settings_of
from accel_testing.launchers import make_plan

CANDIDATES = ("3", "true", "false", "text")

# What the first text that a setting takes would not do.
TEXTS = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu", "attention_backend": "flash"}

# A setting that runs without the engine have too, and read from a file only with the engine.
IN_USE = {"gradient_accumulation_steps": ["--use_deepspeed"]}

# Settings that say nothing, or are refused, without another one.
WITH = {"zero3_init_flag": {"zero_stage": "3"}, "sequence_parallelism": {"tp_degree": "2"}}

FIELDS = [
    pytest.param(cls, name, id=f"{cls.__name__}.{name}")
    for cls in backend_settings()
    # Launchers of other packages hand over settings in their own way.
    if cls.__module__.startswith("accel_plugins.")
    for name, known in settings_of(cls).items()
    if known.variable
]


def texts_of(cls, name, tmp_path):
    """Texts by setting: of the one that is looked at, which differs from what holds anyway, and of those it needs."""
    known = settings_of(cls)[name]
    return {name: text_of(cls, known, tmp_path), **WITH.get(name, {})}


def text_of(cls, known, tmp_path):
    if known.name == "hf_ds_config":
        path = tmp_path / "engine.json"
        path.write_text('{"zero_optimization": {"stage": 1}}')
        return str(path)
    usual = called_with(cls, WITH.get(known.name, {}))[known.name]
    for text in (TEXTS.get(known.name), *reversed(known.type.choices), *CANDIDATES):
        try:
            if text is not None and known.type.parse(text) != usual:
                return text
        except ValueError:
            continue
    raise AssertionError(f"no text for {known}")


def flags(settings, texts):
    for name, text in texts.items():
        known = settings[name]
        alone = known.type is SWITCH or (known.type is BOOLEAN and known.default is False)
        opposite = f"--no_{known.flag.removeprefix('--')}"
        yield from ([opposite if text == "false" else known.flag] if alone else [known.flag, text])


def lines(settings, texts):
    """A config file; all settings of a backend stand in one table."""
    tables = {settings[name].key.rpartition(".")[0] for name in texts}
    assert len(tables) == 1, tables
    yield f"{tables.pop()}:"
    yield from (f"  {settings[name].key.rpartition('.')[2]}: {text}" for name, text in texts.items())


def arrived(cls, words, home, monkeypatch):
    """What the process makes of what a launch hands over, by setting."""
    request = request_of(words, {"HF_HOME": str(home)})
    plan = make_plan(replace(request, machine=Machine("python", 8, lambda: 1, {})))
    with monkeypatch.context() as patch:
        for variable, value in plan.environment.items():
            patch.setenv(variable, value)
        return values(cls())


def called_with(cls, texts):
    return values(cls(**{name: settings_of(cls)[name].parse(text, "call") for name, text in texts.items()}))


def values(settings):
    found = {name: plain_value(settings, name) for name in settings_of(type(settings))}
    return {name: getattr(value, "config", value) for name, value in found.items()}


@pytest.mark.parametrize(("cls", "name"), FIELDS)
def test_a_setting_arrives(cls, name, tmp_path, monkeypatch):
    settings, texts = settings_of(cls), texts_of(cls, name, tmp_path)
    called = called_with(cls, texts)
    assert called[name] != called_with(cls, WITH.get(name, {}))[name]
    if settings[name].key:
        path = tmp_path / "run.yaml"
        path.write_text("\n".join(lines(settings, texts)))
        words = ["--config_file", str(path), *IN_USE.get(name, [])]
        assert arrived(cls, words, tmp_path, monkeypatch) == called
    if settings[name].flag:
        assert arrived(cls, list(flags(settings, texts)), tmp_path, monkeypatch) == called
