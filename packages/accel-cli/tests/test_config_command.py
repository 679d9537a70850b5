"""`accel config`: files by questions, the usual file, and old files in today's form."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import yaml

from accel_cli.config.file import read_config
from accel_cli.config.wizard import AUTOMATIC, Lines, questions
from accel_cli.config.write import config_text, differing, meanings, modernised, nested, usual_config, write_config
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.settings import ASKED
from accel_state.errors import SettingError
from accel_state.settings.schema import BOOLEAN, choice, setting


@dataclass
class Rocket:
    """Settings of a stranger's backend."""

    fuel: str = setting(
        "kerosene", type=choice("kerosene", "hydrogen"), key="rocket_config.fuel", question="Which fuel?"
    )
    reusable: bool = setting(False, type=BOOLEAN, key="rocket_config.reusable", question="Does it come back?")
    secret: str | None = setting(None, key="rocket_config.secret")


class Answers:
    """A prompter that knows the answers to some questions and takes the default for the others."""

    def __init__(self, **known):
        self.known = known
        self.asked = []

    def _answer(self, question, default):
        self.asked.append(question)
        return next((answer for part, answer in self.known.items() if part in question.replace(" ", "_")), default)

    def choose(self, question, options, default):
        answer = self._answer(question, default)
        assert answer in options
        return answer

    def ask(self, question, default, problem):
        answer = self._answer(question, default)
        assert problem(answer) is None
        return answer


def test_answers_make_a_file_that_can_be_read_back(tmp_path):
    answers = questions(Answers(only_on_the_CPU="yes", in_total="4", mixed="bf16"), ASKED, {})
    path = tmp_path / "run.yaml"
    write_config(str(path), answers)
    values = {name: given.value for name, given in read_config(str(path), launch_classes()).values.items()}
    assert (values["cpu"], values["num_processes"], values["mixed_precision"]) == (True, 4, "bf16")
    assert "machine_rank" not in values
    assert "backend" not in values


def test_questions_follow_from_answers():
    asked = Answers(machines_do="2", address="10.0.0.1")
    answers = questions(asked, ASKED, {})
    assert answers["main_process_ip"] == "10.0.0.1"
    assert answers["machine_rank"] == 0
    assert any("Which devices" in question for question in asked.asked)
    on_cpu = Answers(only_on_the_CPU="yes")
    questions(on_cpu, ASKED, {})
    assert not any("Which devices" in question for question in on_cpu.asked)
    assert not any("rank of this machine" in question for question in on_cpu.asked)


def test_a_file_is_shown_with_what_reads_each_entry(accel, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_processes: 2\nfsdp_config:\n  fsdp_version: 2\nprofile: me\n")
    done = accel("config", "show", "--config_file", path)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert (done.returncode, lines[0]) == (0, [f"{path}:"])
    assert ["num_processes", "2", "1", "yes"] in lines
    assert ["fsdp_config.fsdp_version", "2", "3", "yes"] in lines
    assert accel("config", "show", "--config_file", tmp_path / "none.yaml").returncode == 2


def test_how_to_compile_is_asked_of_those_who_compile(tmp_path):
    asked = Answers(dynamo_backend="INDUCTOR", mode_of="max-autotune", repeated_blocks="yes")
    answers = questions(asked, ASKED, {})
    path = tmp_path / "run.yaml"
    write_config(str(path), answers)
    values = {name: given.value for name, given in read_config(str(path), launch_classes()).values.items()}
    assert {name: value for name, value in values.items() if name.startswith("dynamo")} == {
        "dynamo_config.dynamo_backend": "INDUCTOR",
        "dynamo_config.dynamo_mode": "max-autotune",
        "dynamo_config.dynamo_use_fullgraph": False,
        "dynamo_config.dynamo_use_dynamic": False,
        "dynamo_config.dynamo_use_regional_compilation": True,
    }
    others = Answers()
    assert not any(key.startswith("dynamo") for key in questions(others, ASKED, {}))
    assert sum("compile" in question for question in others.asked) == 0


def test_questions_of_a_strangers_backend():
    prompter = Answers(Which_backend="rocket", come_back="yes")
    answers = questions(prompter, (), {"rocket": Rocket, "plain": None})
    assert answers == {"backend": "rocket", "rocket_config.fuel": "kerosene", "rocket_config.reusable": True}
    assert questions(Answers(), (), {"rocket": Rocket}) == {}
    assert questions(Answers(Which_backend="plain"), (), {"plain": None}) == {"backend": "plain"}
    assert AUTOMATIC not in questions(Answers(), (), {}).values()


def run(*arguments, typed, cwd):
    argv = [sys.executable, "-m", "accel_cli.main", "config", *map(str, arguments)]
    return subprocess.run(argv, input=typed, capture_output=True, text=True, timeout=250, cwd=cwd)


def test_plain_lines_take_numbers_names_and_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed = iter(["7", "b", "2", "", "zero", "3"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    lines = Lines()
    assert lines.choose("Which?", ["a", "b"], "a") == "b"
    assert lines.choose("Which?", ["a", "b"], "a") == "b"
    assert lines.choose("Which?", ["a", "b"], "a") == "a"
    assert lines.ask("How many?", "", lambda text: None if text.isdecimal() else "No.") == "3"


def test_the_wizard_reads_its_answers_from_a_pipe(tmp_path):
    finished = run("--config_file", "run.yaml", typed="yes\n" + "\n" * 30, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.endswith("Config file written to run.yaml.\n")
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert written["use_cpu"] is True
    assert written["num_processes"] == 1


def test_a_wizard_without_answers_leaves_no_file(tmp_path):
    finished = run("--config_file", "run.yaml", typed="yes\n", cwd=tmp_path)
    assert finished.returncode == 2
    assert "The input ended before the answer." in finished.stderr
    assert list(tmp_path.glob("run.yaml*")) == []


def test_arrow_keys_choose_in_a_terminal(terminal, tmp_path, monkeypatch):
    pytest.importorskip("questionary", reason="menus need the extra accel-cli[wizard]")
    # The terminal of the test cannot tell where its cursor is.
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    down = "\x1b[B"
    keys = {"only on the CPU": down, "mixed precision": down * 2}
    expected = Answers(only_on_the_CPU="yes", mixed_precision="bf16")
    questions(expected, ASKED, {"ddp": None})
    opened = terminal("config", "--config_file", "run.yaml")
    for question in expected.asked:
        opened.until(question)
        opened.type(next((pressed for part, pressed in keys.items() if part in question), "") + "\r")
    opened.until("Config file written to run.yaml")
    assert opened.end()[0] == 0
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert (written["use_cpu"], written["mixed_precision"]) == (True, "bf16")


def test_the_usual_file(accel, tmp_path):
    finished = accel("config", "default", "--mixed_precision", "bf16")
    path = tmp_path / "home" / "accelerate" / "default_config.yaml"
    assert (finished.returncode, finished.stdout) == (0, f"Config file written to {path}.\n")
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    again = accel("config", "default")
    assert again.returncode == 2
    assert "The file already exists." in again.stderr


def test_the_usual_file_follows_from_the_devices():
    one = usual_config({"name": "cpu", "count": 1, "label": "MULTI_CPU"}, "no")
    assert (one["distributed_type"], one["num_processes"]) == ("NO", 1)
    eight = usual_config({"name": "cuda", "count": 8, "label": "MULTI_GPU"}, "no")
    assert (eight["distributed_type"], eight["num_processes"]) == ("MULTI_GPU", 8)


def test_an_old_file_in_todays_form(accel, tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("fp16: true\ndynamo_backend: 'no'\nfsdp_config:\n  version: 2\ntpu_env: [1, x]\nnum_machines: 1\n")
    assert accel("config", "update", "--config_file", path).returncode == 0
    assert yaml.safe_load(path.read_text()) == {
        "mixed_precision": "fp16",
        "dynamo_config": {"dynamo_backend": "NO"},
        "fsdp_config": {"fsdp_version": 2},
        "tpu_env": ["1", "x"],
        "num_machines": 1,
    }


def test_an_updated_file_says_the_same(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"num_processes": 2,\n\t"downcast_bf16": "no", "fsdp_config": {"fsdp_offload_params": false}}')
    values = modernised(str(path), launch_classes())
    write_config(str(path), values)
    assert json.loads(path.read_text()) == json.loads(
        '{"num_processes": 2, "downcast_bf16": false, "fsdp_config": {"fsdp_offload_params": false}}'
    )


def test_a_file_with_an_unknown_key_is_not_rewritten(accel, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_proceses: 2\n")
    finished = accel("config", "update", "--config_file", path)
    assert finished.returncode == 2
    assert "Did you mean 'num_processes'?" in finished.stderr
    assert path.read_text() == "num_proceses: 2\n"


def test_a_file_has_what_differs_from_the_defaults_with_a_comment_each(tmp_path):
    classes = (Rocket,)
    answers = {"rocket_config.fuel": "kerosene", "rocket_config.reusable": True, "log_dir": "my runs"}
    told = {**meanings(classes), "rocket_config.reusable": "Whether it comes back.", "log_dir": "Folder."}
    write_config(str(tmp_path / "run.yaml"), differing(answers, classes), told)
    assert (tmp_path / "run.yaml").read_text() == (
        "# Folder.\nlog_dir: my runs\nrocket_config:\n  # Whether it comes back.\n  reusable: true\n"
    )
    assert yaml.safe_load(config_text({})) == {}


def test_the_default_file_says_little(accel, tmp_path):
    finished = accel("config", "default", "--config_file", "run.yaml")
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert (finished.returncode, set(written)) == (0, {"distributed_type", "num_processes"})
    lines = (tmp_path / "run.yaml").read_text().splitlines()
    assert sum(line.startswith("# ") for line in lines) == 2


def test_nested_tables():
    assert nested({"a.b.c": 1, "a.b.d": (1, 2), "e": None}) == {"a": {"b": {"c": 1, "d": [1, 2]}}, "e": None}


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="The system reports"):
        write_config(str(tmp_path / "file" / "run.yaml"), {})
