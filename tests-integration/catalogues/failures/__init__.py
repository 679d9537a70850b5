"""Scripted failures of launched runs, with the action and the culprit that a restart policy has to find."""

from __future__ import annotations

from catalogues.failures.corpus import CATALOGUE, Action, Failure

__all__ = ("CATALOGUE", "Action", "Failure")
