"""Seeding, synchronising, saving and restoring generators."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from accel_ops import gather_object, set_seed, synchronize_rng_state, synchronize_rng_states
from accel_ops.rng import restore, snapshot
from accel_state import PartialState, RNGType
from accel_state.errors import CheckpointError, SettingError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    state = np.random.get_state()
    with fresh():
        yield
    np.random.set_state(state)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_fixes_python_numpy_and_torch() -> None:
    set_seed(7)
    first = draws()
    set_seed(7)
    assert draws() == first
    set_seed(np.int64(8))
    assert all(new != old for new, old in zip(draws(), first, strict=True))


def test_set_seed_uses_the_seed_unchanged() -> None:
    set_seed(7)
    expected = random.Random(7).random(), np.random.RandomState(7).rand()
    assert draws()[:2] == expected
    assert torch.initial_seed() == 7


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", None, True])
def test_invalid_seeds_are_refused_and_change_no_generator(seed: Any) -> None:
    before = random.getstate()
    with pytest.raises(SettingError, match="seed"):
        set_seed(seed)
    assert random.getstate() == before


def test_deterministic_algorithms_are_switched_on() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_snapshot_holds_what_a_checkpoint_does_and_restores_it() -> None:
    PartialState(cpu=True)
    states = snapshot()
    assert set(states) == {"random_state", "numpy_random_seed", "torch_manual_seed"}
    first = draws()
    assert restore(pickle.loads(pickle.dumps({**states, "step": 3}))) == ()
    assert draws() == first


def test_taking_a_snapshot_draws_nothing() -> None:
    PartialState(cpu=True)
    set_seed(3)
    first = draws()
    set_seed(3)
    snapshot()
    assert draws() == first


def test_restore_returns_missing_states_and_refuses_invalid_ones() -> None:
    PartialState(cpu=True)
    states = snapshot()
    del states["random_state"]
    assert restore(states) == ("random_state",)
    for key, bad in (("random_state", ("no", "state")), ("numpy_random_seed", 3), ("torch_manual_seed", torch.ones(2))):
        with pytest.raises(CheckpointError, match=key):
            restore({**snapshot(), key: bad})


def test_numpy_states_are_restored_and_saved_without_numpy_objects() -> None:
    PartialState(cpu=True)
    of_numpy = np.random.get_state(), np.random.get_state(legacy=False)
    states = snapshot()
    first = draws()
    for saved in (*of_numpy, states["numpy_random_seed"]):
        restore({**states, "numpy_random_seed": saved})
        assert draws() == first
    assert b"numpy" not in pickle.dumps(states["numpy_random_seed"])
    np.random.set_state(states["numpy_random_seed"])  # as whoever reads the file without this library does


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, "PCG64"), (1, torch.zeros(3, dtype=torch.int64)), (1, torch.full((624,), -1)), (2, 625), (2, -1), (3, 2)],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_state_of_numpy_that_leads_beyond_its_key_is_refused(place: int, value: Any, named: bool) -> None:
    PartialState(cpu=True)
    states = snapshot()
    name, key, position, *rest = [value if index == place else one for index, one in enumerate(np.random.get_state())]
    state: Any = (name, key, position, *rest)
    if named:
        state = {"bit_generator": name, "state": {"key": key, "pos": position}, "has_gauss": rest[0], "gauss": rest[1]}
    with pytest.raises(CheckpointError, match="numpy_random_seed"):
        restore({**states, "numpy_random_seed": state})


@pytest.mark.parametrize("kind", ["dice", "cuda:7", "", "hpu"])
def test_unknown_generator_types_are_refused(kind: str) -> None:
    PartialState(cpu=True)
    with pytest.raises(SettingError, match="'torch'"):
        synchronize_rng_states([kind])


def test_a_generator_must_be_given_to_be_synchronised() -> None:
    PartialState(cpu=True)
    with pytest.raises(SettingError, match="`generator` is missing"):
        synchronize_rng_states(["generator"])


def test_synchronising_generators_of_one_process_changes_nothing() -> None:
    PartialState(cpu=True)
    set_seed(5)
    synchronize_rng_states([RNGType.TORCH, "python", "numpy", RNGType.GENERATOR], torch.Generator())
    synchronize_rng_state()
    first = draws()
    set_seed(5)
    assert draws() == first


def seeded_apart() -> tuple[Any, Any, Any]:
    state = PartialState(cpu=True)
    set_seed(40, device_specific=True)
    apart = gather_object([draws()])
    expected = torch.Generator().manual_seed(40 + state.process_index)
    set_seed(40, device_specific=True)
    assert torch.equal(torch.get_rng_state(), expected.get_state())
    synchronize_rng_states(["torch", RNGType.TORCH, "python", "numpy"])
    together = gather_object([draws()])
    set_seed(40)
    first = draws()
    return apart, together, first


def test_device_specific_seeds_differ_and_synchronised_generators_agree(two: Processes) -> None:
    for apart, together, first in two.run(seeded_apart):
        assert all(a != b for a, b in zip(*apart, strict=True))
        assert together[0] == together[1] == first


def own_generators() -> list[Any]:
    state = PartialState(cpu=True)
    generator = torch.Generator().manual_seed(state.process_index)
    before = torch.get_rng_state()
    synchronize_rng_state(generator=generator)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = torch.rand((), generator=generator).item()
    assert drawn == torch.rand((), generator=torch.Generator().manual_seed(0)).item()
    return gather_object([drawn])


def test_a_user_s_generator_gets_the_state_of_process_0(two: Processes) -> None:
    first, second = two.run(own_generators)
    assert first == second
    assert first[0] == first[1]


def only_one_kind() -> list[Any]:
    state = PartialState(cpu=True)
    set_seed(state.process_index)
    synchronize_rng_state("numpy")
    return gather_object([draws()])


def test_generator_types_that_are_not_named_are_unchanged(two: Processes) -> None:
    for zero, one in two.run(only_one_kind):
        assert zero[0] != one[0]
        assert zero[1] == one[1]
        assert zero[2] != one[2]
