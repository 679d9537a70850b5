"""What tools/release.py is made of: one module for each question that a release asks."""

from __future__ import annotations
