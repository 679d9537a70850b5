"""Plain config files are read as the YAML library reads them, and all others by that library."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from accel_cli.config import file as document
from accel_cli.config.file import ConfigEntry, plain_entries
from accel_state.errors import SettingError

USUAL = """\
# written by a wizard
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
dynamo_config: {}
fsdp_config:
  fsdp_version: 2
  # how blocks are found
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP

main_process_ip: null
mpirun_config:
num_processes: -1
log_dir: '/data/my runs'
"""


def test_plain_entries_reads_a_usual_config_file():
    assert plain_entries(USUAL) == (
        ConfigEntry("compute_environment", "LOCAL_MACHINE", 2),
        ConfigEntry("distributed_type", "NO", 3),
        ConfigEntry("dynamo_config", None, 4),
        ConfigEntry("fsdp_config.fsdp_version", "2", 6),
        ConfigEntry("fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", 8),
        ConfigEntry("main_process_ip", None, 10),
        ConfigEntry("mpirun_config", None, 11),
        ConfigEntry("num_processes", "-1", 12),
        ConfigEntry("log_dir", "/data/my runs", 13),
    )


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2",
        "a:\n  x: 1\nb: 2\na:\n  y: 1",
        "a:\n  x: 1\n  x: 2",
        "a: 1\n  b: 2",
        "a:\n  b: 1\n    c: 2",
        "a:\n    b: 1\n  c: 2",
        "  a: 1",
        "a: [1, 2]",
        "a:\n- 1",
        'a: "1"',
        "a: 'it''s'",
        "a: b c",
        "a: b # c",
        "a: 1:2",
        "a: &x b",
        "a: *x",
        "a:1",
        "a: é",
        "\ta: 1",
        "---\na: 1",
        "a: ~",
        "a: -",
    ],
)
def test_plain_entries_leaves_these_files_to_the_yaml_library(text):
    assert plain_entries(text) is None


PIECES = ["a", "b", "key", ":", ": ", "'", "''", "{}", " ", "  ", "\n", "\n", "\n  ", "- ", "-", "1", ".", "no", "null"]
PIECES += ["'NO'", "#", " # x", "/x", "~", "*a", "&a", "%", "?", "!", "é", "\t", "...", "---", ",", "a: 1\n", "b:\n  "]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example(USUAL)
def test_plain_entries_equal_those_of_the_yaml_library(tmp_path, text):
    entries = plain_entries(text)
    if entries is None:
        return
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "plain_entries", lambda text: None)
        try:
            read = document.read_document(str(path))
        except SettingError as error:
            raise AssertionError(f"{text!r} was read although it is wrong") from error
    assert entries == read


def test_the_library_is_not_loaded_for_a_plain_file(accel, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_processes: 2\n", encoding="utf-8")
    finished = accel("explain", "--config_file", path, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert finished.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert "accel_cli.config.file" in loaded
    assert "yaml" not in loaded
