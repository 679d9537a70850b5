"""Planted faults with known truths, against which detectors are measured; README.md says how each is run."""

from __future__ import annotations
