from __future__ import annotations

import math

import pytest

from accel_bigmodel.sizes import convert_bytes, convert_file_size_to_int
from accel_state.errors import SettingError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (5, 5),
        (0, 0),
        (20.9, 20),
        ("0MB", 0),
        ("10GB", 10**10),
        ("10GiB", 10 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("10 MB", 10_000_000),
        ("2TB", 2 * 10**12),
        ("10gib", 10 * 2**30),
        ("0.5MiB", 2**19),
        ("10Gb", 10**10 // 8),
        ("10kb", 1250),
    ],
)
def test_sizes_as_text(text: float | str, count: int) -> None:
    assert convert_file_size_to_int(text) == count


@pytest.mark.parametrize("text", ["10", "GB", "-1GB", "ten GB", "", "10XB", -1, True, None, float("nan"), math.inf])
def test_what_is_no_size_is_refused_with_the_value(text: object) -> None:
    with pytest.raises(SettingError) as error:
        convert_file_size_to_int(text)  # type: ignore[arg-type]
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (0.12345, "0.12 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (10**9, "953.67 MiB"),
        (10**18, "888.18 PiB"),
    ],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert convert_bytes(count) == text
