"""Reading YAML and JSON files: entries with lines, and errors that name file, line and column."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_cli.config.file import ConfigEntry, read_document, read_tables
from accel_state.errors import SettingError


@pytest.fixture
def document(tmp_path):
    def read(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return read_document(str(path))

    return read


def test_scalars_keep_their_text(document):
    entries = document("a: no\nb: '0x10'\nc: 1.50\nd: yes\ne: ~\nf:\n")
    assert [entry.value for entry in entries] == ["no", "0x10", "1.50", "yes", None, None]


def test_nested_tables_are_joined_by_dots_and_keep_their_lines(document):
    assert document("a: 1\n\nfsdp_config:\n  # why\n  fsdp_version: 2\nempty: {}\n") == (
        ConfigEntry("a", "1", 1),
        ConfigEntry("fsdp_config.fsdp_version", "2", 5),
        ConfigEntry("empty", None, 6),
    )


def test_the_last_of_two_entries_with_a_key_counts(document):
    assert document("a: 1\nb: 2\na: 1\n") == (ConfigEntry("b", "2", 2), ConfigEntry("a", "1", 3))
    assert document("a: 1\nb: 2\na: 3\n") == (ConfigEntry("b", "2", 2), ConfigEntry("a", "3", 3, replaces=1))
    assert document("t:\n  x: 1\n  x: 2\n") == (ConfigEntry("t.x", "2", 3, replaces=2),)
    assert document("t:\n  x: 1\nt:\n  y: 2\n") == (ConfigEntry("t.y", "2", 4, replaces=1),)


def test_a_table_can_take_over_another_one(document):
    text = "base: &base\n  x: 1\n  y: 2\nmore:\n  <<: *base\n  y: 3\n"
    assert {entry.key: entry.value for entry in document(text)} == {
        "base.x": "1",
        "base.y": "2",
        "more.x": "1",
        "more.y": "3",
    }


def test_a_list_may_hold_lists_and_tables(document):
    assert document("a: [[1], {b: 2}]\n") == (ConfigEntry("a", [["1"], {"b": "2"}], 1),)


def test_lists_of_scalars(document):
    assert document("vm:\n  - one\n  - 2\n  - null\nnone: []\n") == (
        ConfigEntry("vm", ["one", "2", None], 1),
        ConfigEntry("none", [], 5),
    )


@pytest.mark.parametrize("text", ["", "\n\n", "# only a remark\n", "---\n", "null\n"])
def test_an_empty_file_has_no_entries(document, text):
    assert document(text) == ()


def test_json_has_lines_as_well(document):
    text = '{\n\t"num_processes": 2,\n\t"fsdp_config": {"fsdp_version": 2}\n}\n'
    assert document(text, "run.json") == (
        ConfigEntry("num_processes", "2", 2),
        ConfigEntry("fsdp_config.fsdp_version", "2", 3),
    )


def test_json_text_in_a_yaml_file(document):
    assert document('{\n  "num_processes": 2\n}\n') == (ConfigEntry("num_processes", "2", 2),)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("a: 1\nb: [1\nc: 2\n", "run.yaml", "run.yaml:3, column 2: it is not valid YAML"),
        ("a: 1\n\tb: 2\n", "run.yaml", "run.yaml:2, column 1: it is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "run.yaml", "not valid YAML"),
        ("a: b: c\n", "run.yaml", "run.yaml:1, column 5"),
        ("- 1\n- 2\n", "run.yaml", "run.yaml:1 is not a `key: value` entry"),
        ("just words\n", "run.yaml", "is not a `key: value` entry"),
        ("? [1, 2]\n: 3\n", "run.yaml", "run.yaml:1 has a key that is not a string"),
        ("a: &x\n  b: *x\n", "run.yaml", "too many nested levels"),
        ('{"a": [1,', "run.json", "run.json:1, column "),
        ("[" * 5000, "run.yaml", "run.yaml"),
        ("[" * 10000 + "]" * 10000, "run.json", "too many nested levels"),
    ],
)
def test_what_is_not_valid_is_told_with_its_place(document, text, name, said):
    with pytest.raises(SettingError) as caught:
        document(text, name)
    assert said in caught.value.obstacle
    assert caught.value.remedy


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(SettingError, match="There is no such file"):
        read_document(str(tmp_path / "none.yaml"))
    with pytest.raises(SettingError, match="cannot be read"):
        read_document(str(tmp_path))


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(SettingError, match="cannot be read"):
        read_document(str(path))


@settings(deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab:1 -\n\t[]{},&*!|>'\"#?%@~"), max_size=60), json=st.booleans())
def test_any_text_gives_entries_or_an_error_that_names_the_file(tmp_path_factory, text, json):
    path = tmp_path_factory.getbasetemp() / ("any.json" if json else "any.yaml")
    path.write_text(text, encoding="utf-8")
    try:
        entries = read_document(str(path))
    except SettingError as error:
        refused = error
    else:
        refused = None
        assert all(isinstance(entry.key, str) and entry.line >= 1 for entry in entries)
    assert refused is None or str(path) in refused.obstacle + refused.failure


@settings(deadline=None)
@given(keys=st.dictionaries(st.text("ab_", min_size=1, max_size=5), st.integers(-99, 99)), json=st.booleans())
def test_any_table_of_numbers_is_read_with_its_lines(tmp_path_factory, keys, json):
    path = tmp_path_factory.getbasetemp() / ("table.json" if json else "table.yaml")
    rows = [f'"{key}": {value}' if json else f"{key}: {value}" for key, value in keys.items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}" if json else "\n".join(rows), encoding="utf-8")
    entries = read_document(str(path))
    assert {entry.key: entry.value for entry in entries} == {key: str(value) for key, value in keys.items()}
    assert json or [entry.line for entry in entries] == list(range(1, len(keys) + 1))


@pytest.mark.parametrize(
    "text",
    [
        "a: [" + "1," * 100_000 + "1]\n",
        "".join(f"key_{number}: 'é'\n" for number in range(20_000)),
    ],
    ids=["long list", "many keys"],
)
def test_a_file_that_would_take_seconds_is_refused(document, text):
    with pytest.raises(SettingError, match="limit of 100000 bytes"):
        document(text)


@pytest.mark.skipif(os.name == "nt", reason="no pipes with names")
def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("pipe.yaml", "zero.yaml", "folder.yaml", "a\0b", "half\ud800"):
        with pytest.raises(SettingError):
            read_document(str(tmp_path / name))


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="no descriptors with names")
def test_a_pipe_of_the_shell_is_read():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write("a: 1\n")
    try:
        assert read_document(f"/dev/fd/{reading}") == (ConfigEntry("a", "1", 1),)
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    "value",
    [
        "2026-02-31",
        "9" * 5000,
        "!!binary x",
        "!!python/object:os.system {}",
        "!!int x",
        "!!float [1]",
        "2026-01-01 25:61:61",
    ],
)
def test_a_value_that_yaml_cannot_make_is_a_typed_error(tmp_path, value):
    path = tmp_path / "run.yaml"
    path.write_text(f"a: {value}\n")
    with pytest.raises(SettingError, match="A value cannot be parsed"):
        read_tables(str(path))
