"""Numbers of bytes as people write and read them: "10GB" to 10000000000 and back."""

from __future__ import annotations

import math
import re

from accel_state.errors import SettingError

__all__ = ("convert_bytes", "convert_file_size_to_int")

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", re.IGNORECASE)


def convert_file_size_to_int(size: float | str) -> int:
    """Bytes of a size such as "5GB" or "200MiB"; a number is taken as it is, rounded down.

    KB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB of 1024. A lower-case b after K, M, G or T counts bits.

    Raises:
        SettingError: the text is not a number followed by one of the units, or the number is negative or no number.

    Example:
        >>> convert_file_size_to_int("1.5GB"), convert_file_size_to_int("8Mb"), convert_file_size_to_int("1KiB")
        (1500000000, 1000000, 1024)
    """
    if isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < math.inf:
        return int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise SettingError(
            f"A size of {size!r} was given.",
            "It is neither a number of bytes nor a number with a unit.",
            'Write an integer, or text such as "5GB", "200MB" or "1.5GiB".',
        )
    number, unit = match.groups()
    count = int(float(number) * _UNITS[unit.upper()]) if "." in number else int(number) * _UNITS[unit.upper()]
    in_bits = unit.endswith("b") and "I" not in unit.upper()
    return count // 8 if in_bits else count


def convert_bytes(size: float) -> str:
    """A number of bytes for people, in powers of 1024.

    Example:
        >>> convert_bytes(1500), convert_bytes(12)
        ('1.46 KB', '12 bytes')
    """
    if size < 1024:
        return f"{round(size, 2)} bytes"
    for unit in ("KB", "MB", "GB", "TB"):
        size /= 1024
        if size < 1024:
            return f"{round(size, 2)} {unit}"
    return f"{round(size / 1024, 2)} PB"
