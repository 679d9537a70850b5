"""What our packages log is heard under the old names."""

from __future__ import annotations

import importlib
import logging
from unittest import mock

import pytest

from accelerate import PartialState  # noqa: F401 - reading a name joins the loggers
from accelerate.names import LOGGERS, NAMES, PACKAGES


def chain(name: str) -> list[str]:
    logger: logging.Logger | None = logging.getLogger(name)
    names = []
    while logger is not None:
        names.append(logger.name)
        logger = logger.parent
    return names


@pytest.mark.parametrize("package", sorted(LOGGERS))
def test_loggers_of_every_package_have_the_parent_accelerate(package: str) -> None:
    for name in (package, f"{package}.any.module"):
        heard = chain(name)
        assert heard[-2:] == ["accelerate", "root"]
        assert LOGGERS[package] in heard
        assert package in heard


def test_a_module_is_heard_under_its_old_name_and_its_package() -> None:
    heard = chain("accel_bigmodel.device_map")
    assert heard[:3] == ["accel_bigmodel.device_map", "accelerate.utils.modeling", "accel_bigmodel"]
    assert heard[3:] == ["accelerate.big_modeling", "accelerate", "root"]
    assert "accelerate.utils.dataclasses" in chain("accel_plugins.fsdp.config")


def test_a_module_for_older_scripts_is_heard_under_its_old_name() -> None:
    assert chain("accelerate.legacy.environment")[1] == "accelerate.utils.environment"
    assert chain("accelerate.legacy.fsdp2_configs")[1] == "accelerate.commands.to_fsdp2"


def test_records_arrive_with_the_name_they_were_made_under(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("accel_data.some_module").warning("here")
    assert [record.name for record in caplog.records] == ["accel_data.some_module"]
    with caplog.at_level(logging.ERROR, logger="accelerate.data_loader"):
        assert not logging.getLogger("accel_data.some_module").isEnabledFor(logging.WARNING)
    assert logging.getLogger("accel_data.some_module").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("address", sorted(set(NAMES) - PACKAGES))
def test_old_modules_have_loggers_that_can_be_replaced(address: str) -> None:
    module = importlib.import_module(address)
    assert module.logger.logger.name == address
    with mock.patch(f"{address}.logger") as replaced:
        assert module.logger is replaced
    assert module.logger is not replaced


@pytest.mark.parametrize("address", sorted(PACKAGES))
def test_packages_have_no_logger(address: str) -> None:
    with pytest.raises(AttributeError, match="logger"):
        _ = importlib.import_module(address).logger


def test_a_handler_of_an_old_logger_gets_them() -> None:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Keep()
    old = logging.getLogger("accelerate.utils.modeling")
    old.addHandler(handler)
    try:
        logging.getLogger("accel_bigmodel.device_map").warning("moved")
        logging.getLogger("accel_data.loader").warning("elsewhere")
    finally:
        old.removeHandler(handler)
    assert seen == ["moved"]


def test_loggers_that_are_made_later_keep_their_place() -> None:
    logging.getLogger("accelerate.utils.modeling.deeper")
    logging.getLogger("accel_bigmodel.device_map.deeper")
    assert chain("accel_bigmodel.device_map.deeper")[1:4] == [
        "accel_bigmodel.device_map",
        "accelerate.utils.modeling",
        "accel_bigmodel",
    ]
