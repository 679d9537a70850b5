"""Loggers: handlers and levels of the old loggers also apply to records of this project's packages.

A record of `accel_bigmodel.hooks` propagates to that logger, then `accelerate.hooks`, `accel_bigmodel`,
`accelerate.big_modeling`, `accelerate` and the root logger, in this order. The name in the record does not change.
"""

from __future__ import annotations

import logging
from collections import Counter
from itertools import accumulate

from accelerate.names import LOGGERS, NAMES

__all__ = ("join_loggers",)


def join_loggers() -> None:
    """Set the old modules' loggers as parents of the loggers of this project's packages."""
    for old in NAMES:
        _logger(old)
    for package, old in LOGGERS.items():
        _logger(package).parent = _logger(old)
    for old, sources in NAMES.items():
        # The package with most of an old module's names gets its logger; other packages use their own loggers only.
        packages = Counter(source.partition(".")[0] for source in sources if source.partition(".")[0] in LOGGERS)
        if packages and old not in LOGGERS.values():
            ((owner, _),) = packages.most_common(1)
            _put_between(old, owner, [source for source in sources if source.startswith(f"{owner}.")])
        for source in sources:
            logger = _logger(source)
            if logger.parent is not None and logger.parent.name == "accelerate.legacy":
                logger.parent = _logger(old)


def _put_between(old: str, package: str, sources: list[str]) -> None:
    """Insert an old logger between the loggers of some modules and that of their package."""
    between = _logger(old)
    between.parent = _logger(package)
    for source in sources:
        logger = _logger(source)
        if logger.parent is not None and logger.parent.name.startswith(package):
            logger.parent = between


def _logger(name: str) -> logging.Logger:
    """Create a logger and all its parents; a parent created later would replace the one set here for its children."""
    *_, logger = (logging.getLogger(part) for part in accumulate(name.split("."), "{}.{}".format))
    return logger
