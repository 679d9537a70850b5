"""Settings of the backend: plain data without torch, so that the launcher can read them.

Each field made with `setting` is at once a flag of `accel launch`, a key of the config file, a variable of the started
processes and an argument of this class.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.errors import SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.schema import BOOLEAN, FLOAT, setting

__all__ = ("ExampleConfig",)

_GROUP = "Example backend"


@dataclass
class ExampleConfig(KwargsHandler):
    """How much of the gradients is sent.

    Args:
        keep: share of the entries of each gradient that is sent, in (0, 1]; with 1 training is exact.
        feedback: keep what was not sent and add it to the next gradients.

    Raises:
        SettingError: `keep` is not in (0, 1].

    Example:
        >>> ExampleConfig(keep=0.05)
        ExampleConfig(keep=0.05, feedback=True)
    """

    keep: float = setting(
        1.0,
        type=FLOAT,
        variable="ACCEL_EXAMPLE_1_KEEP",
        flag="--example_1_keep",
        key="example_1_config.keep",
        help="Share of the entries of each gradient that is sent.",
        group=_GROUP,
    )
    feedback: bool = setting(
        True,
        type=BOOLEAN,
        variable="ACCEL_EXAMPLE_1_FEEDBACK",
        flag="--example_1_feedback",
        key="example_1_config.feedback",
        help="Keep what was not sent and add it to the next gradients.",
        group=_GROUP,
    )

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise SettingError(
                f"Cannot use ExampleConfig(keep={self.keep!r}).",
                "It is the share of the gradients that is sent.",
                "Give a number above 0 and at most 1.",
            )
