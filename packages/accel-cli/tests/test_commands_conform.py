"""The commands of this package pass the kit for commands."""

from __future__ import annotations

import pytest

from accel_cli.command import BUILT_IN
from accel_testing.commands import CommandSuite


class TestCompletion(CommandSuite):
    target = "accel_cli.commands.completion:COMMAND"
    calls = ((["bash"], 0), (["fish"], 0))


@pytest.mark.parametrize("target", [target for _, target, _ in BUILT_IN], ids=[name for name, *_ in BUILT_IN])
def test_help_and_arguments_of_every_command(target: str) -> None:
    class Suite(CommandSuite):
        pass

    Suite.target = target
    Suite().test_its_help_is_one_line_of_the_list_of_commands()
    Suite().test_every_argument_is_described_in_the_help_text()
    Suite().test_its_arguments_can_be_declared_several_times()
