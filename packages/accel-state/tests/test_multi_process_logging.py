"""A record goes out once, or from every process in turn."""

from __future__ import annotations

import logging

import pytest

from accel_state import PartialState, get_logger
from accel_state.errors import NotReady
from accel_testing.fresh import fresh
from accel_testing.processes import Processes


def records() -> list[tuple[str, str]]:
    PartialState(cpu=True)
    logger = get_logger("accel.test.records", log_level="INFO")
    seen: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.getMessage(), record.funcName))

    logger.logger.addHandler(Keep())
    logger.info("once")
    logger.info("everywhere", main_process_only=False)
    logger.info("in turn", in_order=True)
    logger.debug("never", main_process_only=False)
    return seen


def test_records_are_logged_by_main_process_all_or_in_order(two: Processes) -> None:
    first, second = two.run(records)
    assert first == [(f"[RANK 0] {said}", "records") for said in ("once", "everywhere", "in turn")]
    assert second == [(f"[RANK 1] {said}", "records") for said in ("everywhere", "in turn")]


def test_logging_before_the_first_state_raises() -> None:
    with fresh(), pytest.raises(NotReady, match="before logging"):
        get_logger("accel.test.early").warning("lost")


def test_the_level_of_the_stack_counts_from_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    class Wrapped(logging.LoggerAdapter):  # type: ignore[type-arg]
        def log(self, level: int, msg: object, *args: object, **kwargs: object) -> None:
            self.logger.log(level, msg, *args, **{**kwargs, "stacklevel": 3})  # type: ignore[arg-type]

    with fresh():
        PartialState(cpu=True)
        logger = get_logger("accel.test.levels")
        logger.warning("by default", stacklevel=2)
        Wrapped(logger, {}).warning("through a wrapper")
        Wrapped(logger, {}).warning("in turn", in_order=True)
    names = [record.funcName for record in caplog.records]
    assert names == ["test_the_level_of_the_stack_counts_from_the_logger"] * 3


def test_each_way_to_log_names_the_line_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    def once(**kwargs: object) -> None:
        logger.warning_once("through a function", **kwargs)

    caplog.set_level("INFO")
    with fresh():
        PartialState(cpu=True)
        logger = get_logger("accel.test.callers")
        logger.warning_once("once")
        logger.warning_once("once")
        logger.log(logging.INFO, "log")
        logger.info("in turn", in_order=True)
        logger.error("error", main_process_only=False)
        once(stacklevel=3)
        try:
            raise ValueError
        except ValueError:
            logger.exception("exception")
    assert [record.message.removeprefix("[RANK 0] ") for record in caplog.records] == [
        *("once", "log", "in turn", "error", "through a function", "exception")
    ]
    assert {record.filename for record in caplog.records} == {"test_multi_process_logging.py"}
    assert {record.funcName for record in caplog.records} == {"test_each_way_to_log_names_the_line_of_the_caller"}
