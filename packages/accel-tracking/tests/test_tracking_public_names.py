from __future__ import annotations

from accel_testing.public_names import check_public_names


def test_public_names_of_accel_tracking() -> None:
    check_public_names("accel_tracking")
