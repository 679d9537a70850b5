"""What an audit says of an epoch that is not as it should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import audit, prepare_data_loader
from accel_state import GradientState, PartialState
from accel_state.errors import UnknownKind
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.streams import Stream


def in_the_middle() -> None:
    state = PartialState(cpu=True)
    torch.manual_seed(state.process_index)
    loader: Any = prepare_data_loader(DataLoader(range(9), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    loader.set_epoch(1)
    before = torch.get_rng_state(), str(loader.state_dict()["draw"])
    found = audit(loader)
    assert (found.per_process, found.added, found.exact) == ((5, 4), 3, True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (loader.iteration, str(loader.state_dict()["draw"])) == (1, before[1])
    assert not GradientState().in_dataloader


def test_audit_leaves_a_loader_in_the_middle_of_an_epoch(two: Processes) -> None:
    two.run(in_the_middle)


def test_only_prepared_loaders_can_be_audited() -> None:
    with pytest.raises(UnknownKind, match="prepared loader"):
        audit(DataLoader(range(3)))


def test_an_audit_finds_what_is_wrong() -> None:
    with fresh():
        whole = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=1, process_index=0)
        found = audit(whole, whole)
        assert (found.twice, found.missing, found.exact) == ((0, 1, 2, 3, 4), (), False)
        half = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=1)
        found = audit(half)
        assert (found.per_process, found.added, found.missing) == ((2,), 2, (0, 1, 4))
        stream = prepare_data_loader(
            DataLoader(Stream(torch.arange(7)), batch_size=2), num_processes=2, process_index=1
        )
        assert audit(stream).missing == ("0:0", "0:1", "0:4", "0:5")
