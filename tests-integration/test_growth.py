"""The page about growth shows what was measured, gives a reason for what grows, and its counts are those of today."""

from __future__ import annotations

import json

import pytest

import growth


def facts() -> dict[str, object]:
    found: dict[str, object] = json.loads(growth.FACTS.read_text(encoding="utf-8"))
    return found


def test_the_page_is_made_of_the_facts_that_were_measured() -> None:
    assert growth.PAGE.read_text(encoding="utf-8") == growth.document(facts())


def test_everything_that_grows_has_a_reason() -> None:
    assert growth.UNEXPLAINED not in growth.document(facts())


def test_a_cost_that_grows_without_a_reason_is_said_to_be_unexplained() -> None:
    values = {name: [1.0, 1.0, 1.0, 1.0] for name in growth.QUANTITIES}
    shown = growth.document({"worlds": list(growth.WORLDS), "machine": "here", "values": values})
    assert shown.endswith("Nothing.\n")
    values["epoch of indices"] = [1.0, 1.0, 1.0, 9.0]
    shown = growth.document({"worlds": list(growth.WORLDS), "machine": "here", "values": values})
    assert shown.endswith(f"- **epoch of indices**: {growth.UNEXPLAINED}\n")


@pytest.mark.parametrize("world", [2, 64, 1024])
def test_a_rank_that_meets_the_others_makes_at_most_seven_requests(world: int) -> None:
    assert growth.requests_of_start(world) <= 7
