from __future__ import annotations

import contextlib
import json
import os
import pickle
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_bigmodel.weight_files import (
    find_weights,
    load_weights,
    load_weights_file,
    read_index,
    save_weights,
    save_weights_file,
)
from accel_bigmodel.weight_files.reading import Copy, WeightSource, copy_all, open_weights
from accel_state.errors import CheckpointError

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1.5)}


class Runs:
    """A pickle of this creates a file when it is loaded carelessly."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_file_a_folder_and_an_index_are_found(tmp_path: Path) -> None:
    save_weights(STATE, tmp_path, 16)
    index = tmp_path / "model.safetensors.index.json"
    for path in (tmp_path, index, str(index)):
        assert [source.path.name for source in find_weights(path)] == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]
    single = tmp_path / "model-00001-of-00002.safetensors"
    assert load_weights(single).keys() == {"a"}


@pytest.mark.parametrize("limits", [("10GB", "10GB"), ("10GB", 20), (20, "10GB"), (20, 20)])
@pytest.mark.parametrize("safe", [True, False])
def test_of_both_formats_in_a_folder_the_last_saved_is_read(
    tmp_path: Path, safe: bool, limits: tuple[int | str, int | str]
) -> None:
    for value, limit, is_safe in zip((1.0, 7.0), limits, (safe, not safe), strict=True):
        weights = {"a": torch.full((4,), value), "b": torch.full((4,), value)}
        save_weights(weights, tmp_path, limit, is_safe)
        for path in tmp_path.iterdir():
            # The clock of a file system may be too coarse for two saves of a test.
            os.utime(path, ns=(0, path.stat().st_mtime_ns if value == 7.0 and path.stat().st_mtime_ns > 1 else 1))
    assert {value.unique().item() for value in load_weights(tmp_path).values()} == {7.0}


def test_of_equal_times_the_torch_file_is_read(tmp_path: Path) -> None:
    for safe in (True, False):
        save_weights({"a": torch.full((4,), float(safe))}, tmp_path, safe_serialization=safe)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(1, 1))
    assert load_weights(tmp_path)["a"].tolist() == [0.0] * 4


def test_a_folder_without_weights_or_with_two_indexes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no index file"):
        load_weights(tmp_path)
    for name in ("a.index.json", "b.index.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"2 index files: a\.index\.json, b\.index\.json"):
        load_weights(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        load_weights(tmp_path / "missing")


def test_only_what_the_index_names_is_taken(tmp_path: Path) -> None:
    save_weights(STATE, tmp_path, 16)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"]["b"]
    index.write_text(json.dumps(document))
    assert load_weights(tmp_path).keys() == {"a"}


@pytest.mark.parametrize("named", ["a", "weight_map"])
def test_an_index_may_be_the_weight_map_alone(tmp_path: Path, named: str) -> None:
    for file, name in (("1.bin", named), ("2.bin", "b")):
        torch.save({name: STATE["b"]}, tmp_path / file)
    (tmp_path / "own.index.json").write_text(json.dumps({named: "1.bin", "b": "2.bin"}))
    assert load_weights(tmp_path / "own.index.json").keys() == load_weights(tmp_path).keys() == {named, "b"}


@pytest.mark.parametrize("document", [{}, [], {"weight_map": 3}, {"a": {"file": "1.bin"}}, {"metadata": {}}])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, document: object) -> None:
    (tmp_path / "own.index.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="It is damaged"):
        read_index(tmp_path / "own.index.json")


def test_an_index_that_places_a_weight_in_the_wrong_file_names_both(tmp_path: Path) -> None:
    save_weights(STATE, tmp_path, 16)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["b"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"Cannot read 'b' from .*model-00001-of-00002\.safetensors"):
        load_weights(tmp_path)


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    save_weights(STATE, tmp_path, 16)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of the 2 files .* missing: model-00002-of-00002\.safetensors"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "x/../../secret",
        "/etc/passwd",
        "..\\secret",
        "C:\\secret",
        "C:secret",
        "\\\\h\\s",
        "",
        "a\0b",
        3,
        None,
    ],
)
def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path, file: object) -> None:
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match=r"not the name of a file in or below|not a text"):
        load_weights(tmp_path)


def test_an_index_may_name_links_and_files_below(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "snapshot" / "part").mkdir(parents=True)
    save_weights_file({"a": STATE["a"]}, tmp_path / "cache" / "blob.safetensors")
    (tmp_path / "snapshot" / "one.safetensors").symlink_to(tmp_path / "cache" / "blob.safetensors")
    save_weights_file({"b": STATE["b"]}, tmp_path / "snapshot" / "part" / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "part/two.safetensors"}
    (tmp_path / "snapshot" / "m.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load_weights(tmp_path / "snapshot").keys() == {"a", "b"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: json.dumps({"weight_map": value}).encode())
)
def test_whatever_an_index_holds_only_typed_errors_come_out(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "m.index.json"
    path.write_bytes(content)
    # Whatever it names is missing, so that it can be read only when it names nothing.
    with contextlib.suppress(CheckpointError):
        assert not read_index(path).weight_map


FINITE = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(names=st.lists(st.text(max_size=8)), others=st.dictionaries(st.text(max_size=8), FINITE, max_size=3))
def test_read_index_takes_any_names_of_weights_and_passes_over_other_tables(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], others: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "w.safetensors").touch()
    weight_map = dict.fromkeys(names, "w.safetensors")
    (folder / "m.index.json").write_text(json.dumps({**others, "weight_map": weight_map}))
    assert read_index(folder / "m.index.json").weight_map == weight_map


def test_a_deeply_nested_index_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "m.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="deeper than 64"):
        load_weights(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 20, -1, -5])
def test_a_truncated_safetensors_file_is_refused_before_it_is_mapped(tmp_path: Path, cut: int) -> None:
    save_weights(STATE, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_weights(path)


def outcomes_of_changed_bytes(path: Path, positions: range) -> Counter[str]:
    """Load two weights from a file once for each change of a byte; what is not refused has one weight as it was."""
    state = {"left": STATE["a"], "right": STATE["b"]}
    outcomes: Counter[str] = Counter()
    for position in positions:
        for flipped in (0x01, 0x20, 0xFF):
            save_weights_file(state, path)
            content = bytearray(path.read_bytes())
            content[position] ^= flipped
            path.write_bytes(content)
            try:
                loaded = load_weights(path)
            except CheckpointError:
                outcomes["refused"] += 1
                continue
            kept = [name for name, weight in state.items() if name in loaded and torch.equal(loaded[name], weight)]
            assert len(loaded) == 2, (position, flipped)
            assert kept, (position, flipped)
            outcomes["both as they were" if len(kept) == 2 else "one changed"] += 1
    return outcomes


def test_a_changed_byte_of_a_safetensors_header_is_refused_or_changes_one_weight(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_weights_file({"left": STATE["a"], "right": STATE["b"]}, path)
    outcomes = outcomes_of_changed_bytes(path, range(8 + int.from_bytes(path.read_bytes()[:8], "little")))
    # Letters of the two names may change, and little else.
    assert outcomes["one changed"] >= 9
    assert outcomes["refused"] > 300


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        3,
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"Cannot read the weights in .*w\.safetensors"):
        load_weights(path)


def test_a_compressed_torch_file_is_read_and_not_mapped(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as plain,
        zipfile.ZipFile(tmp_path / "small.bin", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    assert torch.equal(load_weights(tmp_path / "small.bin")["a"], torch.zeros(1000))


@pytest.mark.parametrize("cut", [0, 10, 100, -30])
def test_a_truncated_torch_file_is_a_typed_error(tmp_path: Path, cut: int) -> None:
    save_weights(STATE, tmp_path, safe_serialization=False)
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_weights(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_a_changed_byte_of_a_torch_file_is_refused_or_changes_one_weight(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    save_weights_file({"left": STATE["a"], "right": STATE["b"]}, path)
    outcomes = outcomes_of_changed_bytes(path, range(0, path.stat().st_size, 11))
    # Most of the file is padding, which nobody reads.
    assert outcomes["both as they were"] > 100
    assert outcomes["one changed"] > 0
    assert outcomes["refused"] > 50


def test_a_torch_file_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    torch.save({"a": Runs(str(tmp_path / "ran"))}, tmp_path / "evil.bin")
    with open(tmp_path / "old.bin", "wb") as file:
        pickle.dump({"a": Runs(str(tmp_path / "ran"))}, file, protocol=2)
    for name in ("evil.bin", "old.bin"):
        with pytest.raises(CheckpointError, match="not a plain file of tensors"):
            load_weights(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_the_torch_format_before_zip_files_is_read(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_weights(tmp_path / "old.bin")["a"], STATE["a"])


@pytest.mark.parametrize(
    "content", [[torch.zeros(1)], {"model": {"a": torch.zeros(1)}}, {1: torch.zeros(1)}, torch.zeros(1)]
)
def test_a_torch_file_that_is_no_state_dict_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "odd.bin")
    with pytest.raises(CheckpointError, match="mapping of names to tensors"):
        load_weights(tmp_path / "odd.bin")


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
def test_single_weights_of_a_file(tmp_path: Path, name: str) -> None:
    save_weights_file(STATE, tmp_path / name)
    assert load_weights_file(tmp_path / name, names=["b"]).keys() == {"b"}
    assert load_weights_file(tmp_path / name, device="meta")["a"].is_meta
    with pytest.raises(CheckpointError, match="Cannot read 'c' from"):
        load_weights_file(tmp_path / name, names=["b", "c"])


@pytest.mark.parametrize("kind", ["mapped", "before zip files"])
def test_a_weight_under_two_names_is_copied_to_both(tmp_path: Path, kind: str) -> None:
    weight = torch.arange(3.0 * (1 << 20)).reshape(3, -1)
    torch.save({"a": weight, "b": weight}, tmp_path / "a.bin", _use_new_zipfile_serialization=kind == "mapped")
    stored = open_weights([WeightSource(tmp_path / "a.bin")])
    targets = {name: torch.zeros_like(weight) for name in "ab"}
    for name, target in targets.items():
        # One after the other: what was let go of after the first copy is there for the second.
        assert copy_all([Copy(target, stored[name])]) == weight.nbytes
    assert torch.equal(targets["a"], weight)
    assert torch.equal(targets["b"], weight)


def mapped_bytes() -> int:
    """Memory of this process that is of mapped files."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssFile:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="The system does not tell it.")
@pytest.mark.parametrize("safe", [True, False])
def test_what_was_copied_from_a_file_is_not_kept_in_memory(tmp_path: Path, safe: bool) -> None:
    saved = {str(number): torch.full((1 << 10, 1 << 10), float(number)) for number in range(8)}
    save_weights(saved, tmp_path, safe_serialization=safe)
    stored = open_weights(find_weights(tmp_path))
    targets = {name: torch.zeros_like(weight) for name, weight in saved.items()}
    before = mapped_bytes()
    copy_all([Copy(targets[name], weight) for name, weight in stored.items()])

    assert mapped_bytes() - before < 4 << 20
    assert all(torch.equal(targets[name], weight) for name, weight in saved.items())
