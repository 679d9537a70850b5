"""Says where the interface of this package comes from, in the one field that libraries ask before they use it."""

from __future__ import annotations

from setuptools import setup

# `pyproject.toml` cannot fill the field `Home-page`.
setup(url="none; this package has the interface of https://huggingface.co/docs/accelerate, and is not made there")
