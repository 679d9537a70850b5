"""The order of a mixture: how near each source stays to its share, and what a position costs."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_data.interleave import Interleaving, Permutation
from accel_testing.profiling import count_calls

Schedule = list[tuple[int, list[int]]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Segments of any length, down to one sample, with weights that may be 0."""
    sources = draw(st.integers(1, 9))
    weights = st.lists(st.integers(0, 1000) | st.just(0), min_size=sources, max_size=sources).filter(any)
    entries, start = [], 0
    for length in draw(st.lists(st.integers(1, 30), min_size=1, max_size=6)):
        entries.append((start, draw(weights)))
        start += length
    return entries


def order_of(schedule: Schedule) -> Interleaving:
    order = Interleaving(schedule[0][1])
    for start, weights in schedule[1:]:
        order.change(start, weights)
    return order


@settings(deadline=None, max_examples=50)
@given(schedules())
def test_each_source_stays_within_k_samples_of_its_share_at_every_prefix(schedule: Schedule) -> None:
    order, sources = order_of(schedule), len(schedule[0][1])
    starts = [start for start, _ in schedule]
    given_so_far, share = [0] * sources, [0.0] * sources
    weights = schedule[0][1]
    for n in range(schedule[-1][0] + 60):
        if n in starts:
            weights = schedule[starts.index(n)][1]
        source, occurrence = order.locate(n)
        assert occurrence == given_so_far[source]
        given_so_far[source] += 1
        total = sum(weights)
        share = [asked + weight / total for asked, weight in zip(share, weights, strict=True)]
        worst = max(abs(count - asked) for count, asked in zip(given_so_far, share, strict=True))
        assert worst < sources
    assert order.counts(n + 1) == given_so_far
    assert [float(asked) for asked in order.shares(n + 1)] == pytest.approx(share)


def test_a_schedule_that_changes_at_every_sample_keeps_to_the_bound() -> None:
    # In the first of two samples the pair (1, 2) is read, and only 1 may be; in the second only 2 would be.
    order = Interleaving([51, 49, 0])
    pairs = [[51, 49, 0], [70, 0, 30]]
    for n in range(1, 400):
        order.change(n, pairs[n % 2])
    for n in range(0, 400, 7):
        assert max(abs(count - share) for count, share in zip(order.counts(n), order.shares(n), strict=True)) < 3


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=2), st.integers(0, 10**18))
def test_two_sources_stay_within_half_a_sample(weights: list[int], n: int) -> None:
    order = Interleaving(weights)
    for count, share in zip(order.counts(n), order.shares(n), strict=True):
        assert abs(count - share) <= Fraction(1, 2)


def test_a_source_whose_weight_becomes_0_gives_no_further_sample() -> None:
    for at in range(1, 50):
        order = Interleaving([3, 7])
        order.change(at, [1, 0])
        before = order.counts(at)[1]
        assert order.counts(at + 1000)[1] == before


def test_weights_that_began_later_are_forgotten() -> None:
    order = Interleaving([1, 1])
    order.change(10, [1, 0])
    order.change(4, [0, 1])
    assert [order.locate(n)[0] for n in range(20)] == [0, 1, 0, 1, *[1] * 16]


@settings(deadline=None, max_examples=40)
@given(schedules(), st.integers(0, 30), st.data())
def test_the_end_of_an_epoch_is_where_counting_finds_it(schedule: Schedule, start: int, data: st.DataObject) -> None:
    order, sources = order_of(schedule), len(schedule[0][1])
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=sources, max_size=sources))
    starts = [begin for begin, _ in schedule]
    begun = order.counts(start)
    limits = [count + size for count, size in zip(begun, sizes, strict=True)]
    n, counts = start, begun.copy()
    while True:
        if n in starts and n > start:
            # The weights before would have ended the epoch here.
            source = order_of([entry for entry in schedule if entry[0] < n]).locate(n)[0]
            if counts[source] == limits[source]:
                break
        source = order.locate(n)[0]
        if counts[source] == limits[source]:
            break
        counts[source] += 1
        n += 1
    assert order.first_exhausted(start, sizes) == n
    n, counts = start, begun.copy()
    while any(count < limit for count, limit in zip(counts, limits, strict=True)):
        if n > 2000:
            return
        counts[order.locate(n)[0]] += 1
        n += 1
    assert order.all_exhausted(start, sizes) in ([n] if all(schedule[-1][1]) else [n, None])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 1500), st.text(max_size=5))
def test_a_permutation_has_each_number_once(size: int, key: str) -> None:
    order = Permutation(size, key)
    assert sorted(map(order, range(size))) == list(range(size))


def test_permutations_of_other_keys_differ() -> None:
    drawn = {tuple(map(Permutation(10, str(key)), range(10))) for key in range(200)}
    assert len(drawn) == 200


@pytest.mark.parametrize("size", [5, 16, 40])
def test_each_number_comes_to_each_place_about_equally_often(size: int) -> None:
    keys = 2000
    found = [[0] * size for _ in range(size)]
    for key in range(keys):
        order = Permutation(size, f"{key}")
        for place in range(size):
            found[place][order(place)] += 1
    expected = keys / size
    chi_square = sum((count - expected) ** 2 / expected for row in found for count in row)
    freedom = (size - 1) ** 2
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5


def test_a_far_position_costs_what_a_near_one_costs() -> None:
    order = Interleaving([5, 3, 2, 7])
    order.change(1000, [1, 2, 3, 4])
    near, far = (count_calls(lambda at=at: order.locate(at)) for at in (2000, 10**18))  # type: ignore[misc]
    assert near == far
    near, far = (count_calls(lambda at=at: order.counts(at)) for at in (2000, 10**18))  # type: ignore[misc]
    assert near == far
    counted = list(islice((order.locate(n) for n in range(10**18, 10**18 + 3)), 3))
    assert [at for _, at in counted] == [
        order.counts(10**18 + number)[source] for number, (source, _) in enumerate(counted)
    ]
