"""Loggers: what our packages log is heard, and its level is set, under the old names as well.

A record of `accel_bigmodel.hooks` passes that logger, then `accelerate.hooks`, `accel_bigmodel`,
`accelerate.big_modeling`, `accelerate` and the root, in this order; it keeps the name under which it was made.
"""

from __future__ import annotations

import logging
from collections import Counter
from itertools import accumulate

from accelerate.names import LOGGERS, NAMES

__all__ = ("join_loggers",)


def join_loggers() -> None:
    """Hang the loggers of our packages under those of the old modules."""
    for old in NAMES:
        _logger(old)
    for package, old in LOGGERS.items():
        _logger(package).parent = _logger(old)
    for old, sources in NAMES.items():
        # Most of what an old module had has one owner; the others log under their own names.
        packages = Counter(source.partition(".")[0] for source in sources if source.partition(".")[0] in LOGGERS)
        if packages and old not in LOGGERS.values():
            ((owner, _),) = packages.most_common(1)
            _put_between(old, owner, [source for source in sources if source.startswith(f"{owner}.")])
        for source in sources:
            logger = _logger(source)
            if logger.parent is not None and logger.parent.name == "accelerate.legacy":
                logger.parent = _logger(old)


def _put_between(old: str, package: str, sources: list[str]) -> None:
    """Let what some of our modules log pass an old logger on its way to the logger of their package."""
    between = _logger(old)
    between.parent = _logger(package)
    for source in sources:
        logger = _logger(source)
        if logger.parent is not None and logger.parent.name.startswith(package):
            logger.parent = between


def _logger(name: str) -> logging.Logger:
    """A logger and all above it: one that is made later would take the place that its children were given here."""
    *_, logger = (logging.getLogger(part) for part in accumulate(name.split("."), "{}.{}".format))
    return logger
