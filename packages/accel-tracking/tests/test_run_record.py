from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import NotFound, SettingError
from accel_tracking import record
from accel_tracking.record import (
    RECORD,
    attempt_entry,
    describe_code,
    describe_command,
    describe_environment,
    describe_packages,
    leaves_by_key,
    read_run_record,
    write_run_record,
)

SECRET = "hunter2xyz"
EMPTY: dict[str, Any] = {
    **{part: {} for part in ("code", "command", "settings", "packages", "devices", "world", "seeds", "environment")},
    "data": [],
}


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "train.py").write_text("print(1)\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_the_revision_and_what_is_not_committed(repository: Path) -> None:
    clean = describe_code(str(repository / "train.py"))
    assert clean["revision"] == git(repository, "rev-parse", "HEAD")
    assert (clean["branch"], clean["difference"], clean["untracked"]) == ("trunk", "", {})
    (repository / "train.py").write_text("print(2)\n")
    (repository / "new file.py").write_text("x = 1\n")
    changed = describe_code(str(repository / "train.py"))
    assert "+print(2)" in changed["difference"]
    assert list(changed["untracked"]) == ["new file.py"]
    assert changed["difference_sha256"] != clean["difference_sha256"]
    assert changed["script_sha256"] != clean["script_sha256"]


def test_a_detached_revision_and_changed_submodules(repository: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "submodule", "add", "-q", str(repository), "inner")
    git(outer, "commit", "-q", "-m", "with a submodule")
    git(outer, "checkout", "-q", "--detach")
    (outer / "inner" / "train.py").write_text("print(3)\n")
    (outer / "run.py").touch()
    found = describe_code(str(outer / "run.py"))
    assert found["branch"] == ""
    assert "+print(3)" in found["difference"]
    assert "inner" in found["submodules"]


def test_a_huge_difference_is_bounded_and_still_told_apart(repository: Path) -> None:
    hashes = set()
    for last in "ab":
        (repository / "train.py").write_text("x = 1\n" * 200_000 + last)
        found = describe_code(str(repository / "train.py"))
        assert len(found["difference"]) <= 100_000 < found["difference_bytes"]
        hashes.add(found["difference_sha256"])
    assert len(hashes) == 2


def test_without_git_and_with_a_git_that_hangs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    found = describe_code(str(repository / "train.py"))
    assert "git cannot be started" in found["unknown"]
    assert found["script_sha256"]
    program = tools / "git"
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    program.chmod(0o755)
    monkeypatch.setattr(record, "_GIT_TIMEOUT_S", 0.2)
    began = time.monotonic()
    assert "took longer" in describe_code(str(repository / "train.py"))["unknown"]
    # Not the minutes for which it sleeps.
    assert time.monotonic() - began < 300


def test_restarts_append_and_say_what_changed(tmp_path: Path) -> None:
    first = attempt_entry("launch-1", 0, "node1")
    assert write_run_record(tmp_path, EMPTY, first) == ""
    second = {**attempt_entry("launch-1", 1, "node1"), "id": "another"}
    assert write_run_record(tmp_path, {**EMPTY, "world": {"processes": 2}}, second) == ""
    assert write_run_record(tmp_path, {**EMPTY, "world": {"processes": 2}, "data": [{"length": 3}]}, second) == ""
    found = read_run_record(tmp_path)
    assert [(one["restarts"], one["changed"]) for one in found["attempts"]] == [(0, []), (1, ["world"])]
    assert found["data"] == [{"length": 3}]
    assert read_run_record(tmp_path / RECORD) == found
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


def test_a_record_that_is_damaged_is_replaced(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text('{"format": 1, "attempts": 3}')
    with pytest.raises(SettingError, match="is not a record"):
        read_run_record(tmp_path)
    assert write_run_record(tmp_path, EMPTY, attempt_entry("", 0, "node1")) == ""
    assert len(read_run_record(tmp_path)["attempts"]) == 1
    with pytest.raises(NotFound, match="no such folder"):
        read_run_record(tmp_path / "none" / "a" / "b")


def test_secrets_are_hidden_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HUB_TOKEN", SECRET)
    monkeypatch.setenv("NCCL_PASSWORD", "very-secret")
    content = {
        **EMPTY,
        "command": describe_command(["train.py", "--name", SECRET, "--api_key", "other-key"], "/x", False),
        "code": {"difference": f"+url = 'https://me:pw@host'\n+x = {SECRET}\n"},
        "environment": describe_environment(os.environ),
        "settings": {"tracker.password": {"value": "a b", "source": "argument"}},
        "packages": {"secretstorage": "3.5.0"},
    }
    assert write_run_record(tmp_path, content, attempt_entry("", 0, "node1")) == ""
    text = (tmp_path / RECORD).read_text()
    assert not [secret for secret in (SECRET, "very-secret", "other-key", "me:pw", "a b") if secret in text]
    assert read_run_record(tmp_path)["environment"]["NCCL_PASSWORD"] == "***"
    assert "MY_HUB_TOKEN" not in text
    assert read_run_record(tmp_path)["packages"] == {"secretstorage": "3.5.0"}


@pytest.mark.skipif(os.name != "posix", reason="a full device")
def test_a_folder_that_cannot_be_written_is_told_and_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Error" in write_run_record(tmp_path / "file" / "run", EMPTY, attempt_entry("", 0, "node1"))
    (tmp_path / f".{RECORD}.{os.getpid()}").symlink_to("/dev/full")
    assert "No space left" in write_run_record(tmp_path, EMPTY, attempt_entry("", 0, "node1"))
    assert not (tmp_path / RECORD).exists()


def test_packages_and_python_have_versions() -> None:
    found = describe_packages()
    assert found["python"] == sys.version.split()[0]
    assert found["accel-state"] == "0.1.0"
    assert found["torch"].startswith("2.")


def test_the_leaves_of_nested_data() -> None:
    assert leaves_by_key(json.loads('{"a": {"b": [1, {"c": null}]}, "d": {}}')) == {"a.b.0": 1, "a.b.1.c": None}
