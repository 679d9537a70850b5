"""A strategy of local steps passes the tests of the kit that apply to strategies without equal replicas."""

from __future__ import annotations

import pytest

from accel_testing.backends import BackendSuite


class TestLocalSteps(BackendSuite):
    target = "catalogues.broken_backends:local_steps"

    @pytest.mark.xfail(strict=True, reason="the catalogue keeps the manifest in the module of the strategy")
    def test_manifest_and_settings_load_without_torch(self) -> None:
        super().test_manifest_and_settings_load_without_torch()
