"""Mixtures of data sets: what an epoch gives, when it ends, weights that change, and what cannot be mixed."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import MixtureDataset, MixtureStream
from accel_state.errors import AccelError, CheckpointError, DataError, SettingError, UnknownKind

CODE = [f"code {number}" for number in range(30)]
TEXT = [f"text {number}" for number in range(12)]
SOURCES = {"code": CODE, "text": TEXT}
WEIGHTS = {"code": 0.7, "text": 0.3}


def kinds(samples: Any) -> dict[str, int]:
    return dict(Counter(sample.split()[0] for sample in samples))


def test_an_epoch_gives_each_source_its_share_until_the_first_is_exhausted() -> None:
    mixture = MixtureDataset(SOURCES, WEIGHTS)
    epoch = list(mixture)
    assert len(epoch) == len(set(epoch)) == len(mixture) == 41
    assert kinds(epoch) == {"code": 29, "text": 12}
    assert kinds(epoch[:10]) == {"code": 7, "text": 3}
    with pytest.raises(IndexError):
        mixture[41]
    with pytest.raises(IndexError):
        mixture[-1]
    with pytest.raises(IndexError):
        mixture.__getitems__([40, 41])


def test_all_samples_come_before_an_epoch_ends_with_all_exhausted() -> None:
    mixture = MixtureDataset(SOURCES, WEIGHTS, stop="all_exhausted")
    epoch = list(mixture)
    assert set(epoch) == {*CODE, *TEXT}
    assert kinds(epoch)["code"] == 30
    text = [sample for sample in epoch if sample.startswith("text")]
    assert sorted(text[:12]) == sorted(TEXT)
    # The smaller source began again, in another order.
    assert len(text) == 13
    assert epoch[-1].startswith("code")


def test_repeated_sources_have_epochs_of_their_own() -> None:
    mixture = MixtureDataset(SOURCES, WEIGHTS, stop="repeat", num_samples=50)
    run = []
    for epoch in range(4):
        mixture.set_epoch(epoch)
        assert len(mixture) == 50
        run += [mixture[n] for n in range(50)]
    text = [sample for sample in run if sample.startswith("text")]
    assert len(text) == 60
    passes = [text[at : at + 12] for at in range(0, 60, 12)]
    assert all(sorted(one) == sorted(TEXT) for one in passes)
    assert len({tuple(one) for one in passes}) == 5


def test_the_order_of_a_pass_depends_on_seed_source_and_epoch_alone() -> None:
    def texts(epoch: int = 0, **options: Any) -> list[str]:
        mixture = MixtureDataset(**{"sources": SOURCES, "weights": WEIGHTS, **options})
        mixture.set_epoch(epoch)
        return [sample for sample in mixture if sample.startswith("text")]

    assert texts() == texts(sources={"text": TEXT, "code": CODE}, weights={"text": 6, "code": 14})
    assert texts() == texts(sources={**SOURCES, "other": CODE}, weights={"text": 0.5, "code": 0.25, "other": 0.25})
    assert texts() != texts(seed=1)
    assert texts(1) != texts()
    assert texts(3) == texts(3)
    assert texts(shuffle=False) == texts(5, shuffle=False) == TEXT


def test_weights_are_exact() -> None:
    given = [
        {"code": Fraction(2, 3), "text": Fraction(1, 3)},
        {"code": 2, "text": 1},
        {"code": numpy.float32(0.5), "text": numpy.float64(0.25)},
    ]
    for weights in given:
        mixture = MixtureDataset(SOURCES, weights)
        assert mixture.schedule == [(0, {"code": Fraction(2, 3), "text": Fraction(1, 3)})]
    assert MixtureDataset(SOURCES, WEIGHTS).schedule[0][1]["code"] == Fraction(7, 10)
    assert MixtureDataset(SOURCES, {"code": 1e-7, "text": 1}).schedule[0][1]["code"] == Fraction(1, 10**7 + 1)


def test_a_schedule_changes_the_weights_at_a_sample() -> None:
    mixture = MixtureDataset(SOURCES, WEIGHTS, [(0, {"text": 1}), (5, {"code": 1, "text": 1}), (11, {"code": 1})])
    epoch = list(mixture)
    assert kinds(epoch[:5]) == {"text": 5}
    assert kinds(epoch[5:11]) == {"code": 3, "text": 3}
    assert kinds(epoch[11:]) == {"code": 27}
    assert [start for start, _ in mixture.schedule] == [0, 5, 11]


def test_samples_are_counted_from_the_beginning_of_the_run() -> None:
    mixture = MixtureDataset(SOURCES, {"code": 1, "text": 1}, [(40, {"text": 1})], shuffle=False)
    assert len(mixture) == 25
    mixture.set_epoch(1)
    assert kinds(mixture[n] for n in range(15)) == {"code": 7, "text": 8}
    assert len(mixture) == 19
    assert kinds(mixture[n] for n in range(15, 19)) == {"text": 4}
    counts = mixture.counts(19)
    assert (counts["code"].samples, counts["text"].samples) == (20, 24)
    assert counts["text"].epochs == 2
    assert counts["text"].share == pytest.approx(24 / 44)
    assert counts["text"].target_share == pytest.approx(24 / 44)
    mixture.set_epoch(0)
    assert len(mixture) == 25


def test_the_first_sample_of_a_mixture_has_shares_of_nothing() -> None:
    counts = MixtureDataset(SOURCES, WEIGHTS).counts(0)
    assert (counts["code"].samples, counts["code"].target_share, counts["code"].share) == (0, 0, 0)


class Read(list[Any]):
    """A data set that knows which of its samples were read."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        self.indices: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.indices.append(index)
        return super().__getitem__(index)


def test_a_far_sample_is_read_alone() -> None:
    code, text = Read(CODE), Read(TEXT)
    mixture = MixtureDataset({"code": code, "text": text}, WEIGHTS, stop="repeat", num_samples=10**12)
    mixture[10**9]
    assert len(code.indices) + len(text.indices) == 1
    assert mixture.counts(10**9)["text"].samples == 300_000_000


def test_changed_weights_begin_where_nothing_was_read_yet() -> None:
    mixture = MixtureDataset(SOURCES, {"code": 1}, stop="repeat", num_samples=100)
    before = [mixture[n] for n in range(7)]
    assert mixture.set_weights({"text": 1}) == 7
    assert [mixture[n] for n in range(7)] == before
    assert kinds(mixture[n] for n in range(7, 100)) == {"text": 93}
    assert mixture.set_weights({"code": 1, "text": 1}) == 100
    assert [start for start, _ in mixture.schedule] == [0, 7, 100]


def test_later_entries_of_the_schedule_come_after_changed_weights() -> None:
    mixture = MixtureDataset(SOURCES, {"code": 1}, [(20, {"code": 1})], stop="repeat", num_samples=30)
    mixture.__getitems__(list(range(10)))
    mixture.set_weights({"text": 1})
    assert kinds(mixture[n] for n in range(30)) == {"code": 20, "text": 10}


def test_an_epoch_that_ends_with_its_sources_keeps_its_weights() -> None:
    mixture = MixtureDataset(SOURCES, {"code": 1, "text": 1})
    epoch = list(mixture)
    mixture = MixtureDataset(SOURCES, {"code": 1, "text": 1})
    assert mixture[0] == epoch[0]
    assert mixture.set_weights({"code": 1}) == 25
    assert list(mixture) == epoch
    mixture.set_epoch(1)
    assert list(mixture) == [sample for sample in mixture if sample.startswith("code")]
    assert len(mixture) == 30
    assert mixture.set_weights({"text": 1}) == 55


def test_weights_that_change_before_an_epoch_hold_in_it() -> None:
    mixture = MixtureDataset(SOURCES, {"code": 1, "text": 1})
    assert mixture.set_weights({"text": 1}) == 0
    assert sorted(mixture) == sorted(TEXT)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_reads_a_mixture_in_order(workers: int) -> None:
    mixture = MixtureDataset(SOURCES, WEIGHTS)
    loader = DataLoader(mixture, batch_size=5, num_workers=workers)
    assert [sample for batch in loader for sample in batch] == list(mixture)


class Together(list[Any]):
    """A data set that reads many samples at once."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [self[index] for index in indices]


def test_sources_that_read_many_samples_at_once_do_so() -> None:
    text = Together(TEXT)
    mixture = MixtureDataset({"code": CODE, "text": text}, WEIGHTS)
    expected = [mixture[n] for n in range(20)]
    assert mixture.__getitems__(list(range(20))) == expected
    assert [len(call) for call in text.calls] == [6]
    assert mixture.__getitems__([]) == []


def test_a_hugging_face_data_set_is_a_source() -> None:
    datasets = pytest.importorskip("datasets", reason="reads data sets of Hugging Face, an optional library")
    text = datasets.Dataset.from_dict({"x": TEXT})
    code = datasets.Dataset.from_dict({"x": CODE}).with_format("torch")
    mixture = MixtureDataset({"code": code, "text": text}, WEIGHTS)
    plain = MixtureDataset(SOURCES, WEIGHTS)
    batches = DataLoader(mixture, batch_size=4)
    assert [sample for batch in batches for sample in batch["x"]] == list(plain)


def test_a_state_continues_the_schedule() -> None:
    mixture = MixtureDataset(SOURCES, WEIGHTS, stop="repeat", num_samples=60)
    [mixture[n] for n in range(20)]
    mixture.set_weights({"text": 1})
    state = pickle.loads(pickle.dumps(mixture.mixture_state()))
    again = MixtureDataset(dict(reversed(SOURCES.items())), WEIGHTS, stop="repeat", num_samples=60)
    again.load_mixture_state(state, 0, 20)
    assert again.schedule == mixture.schedule
    assert list(again) == list(mixture)
    again.load_mixture_state(state, 0, 20)
    assert again.set_weights({"code": 1}) == 20


def test_a_copy_has_a_schedule_of_its_own() -> None:
    mixture = MixtureDataset(SOURCES, WEIGHTS)
    other = copy.deepcopy(mixture)
    other.set_weights({"code": 1})
    assert len(mixture.schedule) == 1


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a source is gone": (
        {"sources": {"code": CODE}, "weights": {"code": 1}},
        "'text': the saved .* had 12 .* has none",
    ),
    "a source is new": ({"sources": {**SOURCES, "web": CODE}}, "'web': the saved .* had no such source.* has 30"),
    "a source has another size": ({"sources": {"code": CODE, "text": TEXT[1:]}}, "'text': .* had 12 .* has 11"),
    "another seed": ({"seed": 5}, "seed=0; this one has seed=5"),
    "another end": ({"stop": "all_exhausted"}, "stop='first_exhausted'; this one has stop='all_exhausted'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_other_sources_is_refused(name: str) -> None:
    changes, message = OTHERS[name]
    state = MixtureDataset(SOURCES, WEIGHTS).mixture_state()
    other = MixtureDataset(**{"sources": SOURCES, "weights": WEIGHTS, **changes})
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        other.load_mixture_state(state)
    assert caught.value.remedy


WRONG: dict[str, tuple[dict[str, Any], type[AccelError], str]] = {
    "negative": ({"weights": {"code": 1, "text": -0.5}}, SettingError, "'text' is -0.5"),
    "infinite": ({"weights": {"code": 1, "text": float("inf")}}, SettingError, "'text' is inf"),
    "no number": ({"weights": {"code": 1, "text": float("nan")}}, SettingError, "'text' is nan"),
    "text": ({"weights": {"code": 1, "text": "much"}}, UnknownKind, "'text' is of type str"),
    "bool": ({"weights": {"code": True}}, UnknownKind, "'code' is of type bool"),
    "all 0": ({"weights": {"code": 0, "text": 0}}, SettingError, "All weights are 0"),
    "empty": ({"weights": {}}, SettingError, "All weights are 0"),
    "unknown source": ({"weights": {"code": 1, "tekst": 1}}, SettingError, "no source 'tekst'.*Did you mean 'text'"),
    "no dict": ({"weights": [0.5, 0.5]}, UnknownKind, "not a dict"),
    "no weights": ({"weights": None}, SettingError, "No weights are given for sample 0"),
    "late weights": ({"weights": None, "schedule": [(5, {"code": 1})]}, SettingError, "No weights are given"),
    "out of order": ({"schedule": [(9, {"code": 1}), (5, {"text": 1})]}, SettingError, "the samples 9, 5"),
    "twice": ({"schedule": [(5, {"code": 1}), (5, {"text": 1})]}, SettingError, "the samples 5, 5"),
    "before sample 0": ({"schedule": [(-1, {"code": 1})]}, SettingError, "the samples -1"),
    "wrong later": ({"schedule": [(7, {"code": -1})]}, SettingError, "'code' is -1"),
    "no sample": ({"sources": {"code": CODE, "text": []}}, DataError, "'text'"),
    "no source": ({"sources": {}}, UnknownKind, "at least one data set"),
    "a list": ({"sources": [CODE, TEXT]}, UnknownKind, "a dict"),
    "a stream": ({"sources": {"code": CODE, "text": iter(TEXT)}}, UnknownKind, "'text'.*MixtureStream"),
    "an unknown end": ({"stop": "never"}, SettingError, "stop='never'"),
    "no length": ({"stop": "repeat"}, SettingError, "num_samples=None"),
    "a needless length": ({"num_samples": 10}, SettingError, "num_samples=10"),
    "never exhausted": ({"stop": "all_exhausted", "weights": {"code": 1}}, SettingError, "weight of text is 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_with_what_to_do(name: str) -> None:
    changes, kind, message = WRONG[name]
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        MixtureDataset(**{"sources": SOURCES, "weights": WEIGHTS, **changes})
    assert caught.value.obstacle
    assert caught.value.remedy


def test_changed_weights_are_checked() -> None:
    mixture = MixtureDataset(SOURCES, WEIGHTS)
    with pytest.raises(SettingError, match="no source 'tekst'"):
        mixture.set_weights({"tekst": 1})
    with pytest.raises(SettingError, match="All weights are 0"):
        mixture.set_weights()
    assert len(mixture.schedule) == 1


class Stream(IterableDataset[str]):
    def __init__(self, samples: list[str]) -> None:
        self.samples, self.epochs = samples, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return iter(self.samples)


def test_streams_are_mixed_in_the_order_of_data_sets(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "accel_data"):
        stream = MixtureStream({"code": Stream(CODE), "text": Stream(TEXT)}, WEIGHTS, [(20, {"text": 1})])
    assert "cannot seek" in caplog.text
    data_set = MixtureDataset(SOURCES, WEIGHTS, [(20, {"text": 1})], shuffle=False)
    assert list(stream) == list(stream) == list(data_set)
    assert [sample for batch in DataLoader(stream, batch_size=3) for sample in batch] == list(data_set)


def test_streams_begin_again_where_the_mixture_goes_on() -> None:
    text = Stream(TEXT)
    stream = MixtureStream({"code": CODE, "text": text}, WEIGHTS, stop="all_exhausted")
    data_set = MixtureDataset(SOURCES, WEIGHTS, stop="all_exhausted", shuffle=False)
    epoch = list(stream)
    # A stream is known to be exhausted when a sample after its last one would come, which here is at once.
    assert epoch == list(data_set)
    assert text.epochs == [0, 1]
    stream.set_epoch(5)
    endless = MixtureStream({"code": CODE, "text": text}, WEIGHTS, stop="repeat")
    assert kinds(itertools.islice(endless, 1000)) == {"code": 700, "text": 300}
    assert len(list(MixtureStream(SOURCES, WEIGHTS, stop="repeat", num_samples=300))) == 300


def test_streams_that_cannot_be_mixed() -> None:
    with pytest.raises(DataError, match="'text'"):
        list(MixtureStream({"code": CODE, "text": []}, WEIGHTS))
    with pytest.raises(UnknownKind, match="'text'"):
        MixtureStream({"code": CODE, "text": iter(TEXT)}, WEIGHTS)
    with pytest.raises(UnknownKind, match="'text'"):
        MixtureStream({"code": CODE, "text": 5}, WEIGHTS)
    with pytest.raises(SettingError, match="'text' is 0"):
        MixtureStream(SOURCES, {"code": 1}, stop="all_exhausted")
    with pytest.raises(SettingError, match="'text' is -1"):
        MixtureStream(SOURCES, {"code": 1, "text": -1})


def test_tensors_are_sources() -> None:
    mixture = MixtureDataset({"a": torch.zeros(4), "b": torch.ones(4)}, {"a": 1, "b": 1})
    assert next(iter(DataLoader(mixture, batch_size=8))).tolist() == [0, 1] * 4
