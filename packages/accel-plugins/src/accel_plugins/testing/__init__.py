"""The conformance kit: a suite of tests that a backend passes, in real processes, before anybody relies on it.

A package that brings a backend subclasses `BackendSuite` in one of its test files and names its manifest. It needs the
extra `accel-plugins[testing]`.
"""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__getattr__, __dir__, __all__ = lazy_stub(__name__, __file__)
