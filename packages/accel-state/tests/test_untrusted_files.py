"""What readers of files that somebody else wrote are protected from."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from accel_state.untrusted import (
    anything,
    dict_of,
    integer,
    list_of,
    number,
    open_regular,
    parse_json,
    path_inside,
    printable,
    read_json,
    read_limited,
    record,
    text,
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b"[" + b"9" * 100_000 + b"]", "100000 digits"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (b"\xff\xfe[]", "UTF-8"),
        ("[]".encode("utf-16"), "UTF-8"),
        (b"[" * 65 + b"]" * 65, "deeper than 64"),
        (b"[" * 1_000_000, "deeper than 64"),
        (b'{"a":' * 100_000, "deeper than 64"),
        (b'["\\"", ' + b"[" * 65 + b"]" * 65 + b"]", "deeper than 64"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_text_that_is_not_plain_json_is_a_value_error(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        parse_json(content)
    assert len(str(raised.value)) < 400


def test_brackets_in_texts_do_not_count_as_depth() -> None:
    deepest = "[" * 64 + "]" * 64
    assert parse_json(deepest) is not None
    assert parse_json('["' + "[" * 1000 + '", "\\\\", "\\"' + "]" * 1000 + '"]')
    assert parse_json("[" + ",".join("[{}]" for _ in range(1000)) + "]")
    assert parse_json('["\\ud83d\\ude00"]') == ["\N{GRINNING FACE}"]
    assert parse_json("\ufeff[1, -2.5]".encode()) == [1, -2.5]


@pytest.mark.parametrize("content", ["1e9999", "-1e9999", "NaN", "Infinity"])
def test_a_number_that_is_not_finite_has_the_shape_of_none(content: str) -> None:
    with pytest.raises(ValueError, match="not a number from"):
        parse_json(content, number())
    with pytest.raises(ValueError, match="not an integer from"):
        parse_json(content, integer())


SHAPE = record(
    {"files": dict_of(record({"size": integer(), "hash": text("[0-9a-f]{4}")}), text("[a-z]+"))},
    {"written": number(0, 10), "names": list_of(text(), 3), "facts": dict_of(anything)},
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", r"It is \[\], not an object"),
        ("{}", "It has no 'files'"),
        ('{"files": {"a": {"size": -1, "hash": "00ff"}}}', r"It\['files'\]\['a'\]\['size'\] is -1, not an integer"),
        ('{"files": {"a": {"size": true, "hash": "00ff"}}}', "True, not an integer"),
        ('{"files": {"a": {"size": 1.0, "hash": "00ff"}}}', "1.0, not an integer"),
        ('{"files": {"a": {"size": 1, "hash": "00ff0"}}}', "does not match"),
        ('{"files": {"A": {"size": 1, "hash": "00ff"}}}', "has a key that is 'A'"),
        ('{"files": {}, "written": 11}', "11, not a number"),
        ('{"files": {}, "written": false}', "False, not a number"),
        ('{"files": {}, "names": ["a", 3]}', r"\['names'\]\[1\] is 3, not a text"),
        ('{"files": {}, "names": ["\\ud800"]}', "half of a surrogate pair"),
        ('{"files": {}, "names": ["a", "b", "c", "d"]}', "has 4 items; at most 3 are allowed"),
        ('{"files": {}, "facts": 3}', "3, not an object"),
    ],
)
def test_a_value_of_another_shape_is_named_with_its_place(content: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(content, SHAPE)


def test_a_value_of_the_shape_passes() -> None:
    good = '{"files": {"a": {"size": 1, "hash": "00ff"}}, "more": 1, "written": 2.5, "names": ["x"], "facts": {"b": 1}}'
    assert parse_json(good, SHAPE)["files"]["a"]["size"] == 1


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").write_bytes(b"1" * 101)
    (tmp_path / "good").write_bytes(b"[1]".ljust(100))
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "socket"))
    for name in ("pipe", "zero", "loop", "large", "socket", ".", "absent", "nul\0", "half\ud800"):
        with pytest.raises(OSError, match=r".") as raised:
            read_json(tmp_path / name, limit=100)
        assert not isinstance(raised.value, ValueError)
    assert read_json(tmp_path / "good", limit=100) == [1]
    assert len(read_limited(tmp_path / "large", 101)) == 101
    with open_regular(tmp_path / "good") as file:
        assert file.read(3) == b"[1]"


def test_a_name_stays_in_its_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "below").mkdir(parents=True)
    outside.mkdir()
    (folder / "away").symlink_to(outside)
    (folder / "near").symlink_to("below")
    for name in (
        "", "..", "../folder", "below/../../outside", "/etc/passwd", "//host/share", "C:/x", "C:x", "below\\x",
        "\\x", "a\0b", "half\ud800", 3, None,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="not the name of a file"):
            path_inside(folder, name)  # type: ignore[arg-type]
    for name in ("away", "away/file"):
        with pytest.raises(ValueError, match="leads out of the folder"):
            path_inside(folder, name)
        assert path_inside(folder, name, links_out=True) == os.path.join(folder, name)
    for name in ("file", "below/file", "near/file", "...", "a b", "\N{SNOWMAN}"):
        assert path_inside(folder, name) == os.path.join(folder, name)


def test_a_folder_that_is_a_link_itself_holds_its_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert path_inside(tmp_path / "link", "file") == str(tmp_path / "link" / "file")


def test_characters_that_control_a_terminal_are_escaped() -> None:
    hostile = "a\x1b[2J\r\x07\x9b31m\u202e\u2028\x00b"
    shown = printable(hostile)
    assert shown == "a\\x1b[2J\\r\\x07\\x9b31m\\u202e\\u2028\\x00b"
    assert shown.isprintable()
    assert printable("two\nlines", keep="\n") == "two\nlines"
    assert printable("Grüße \N{SNOWMAN}") == "Grüße \N{SNOWMAN}"
