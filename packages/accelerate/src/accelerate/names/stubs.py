"""Stubs: one `.pyi` file for each old module, read by type checkers and editors.

    python -m accelerate.names.stubs      write them beside the modules of an editable installation

A build writes them into the wheel; git does not keep them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import NAMES, PACKAGES, owners, stub_path

__all__ = ("stub", "write_stubs")

_LENDERS = ("accelerate.utils", "accelerate.state")


def stub(address: str) -> str:
    """The text of a module's stub."""
    return "\n".join([f'"""What is found at the address `{address}`."""', "", *_lines(address), ""])


def _lines(address: str) -> Iterator[str]:
    names = owners(address)
    # Type checkers know only the names that most plain modules lend.
    lent = {} if address in PACKAGES else {name: owner for one in _LENDERS for name, owner in owners(one).items()}
    by_place = sorted({**lent, **names}.items(), key=lambda item: (item[1].module, item[0]))
    yield from (f"from {owner.module} import {owner.name} as {name}" for name, owner in by_place)
    below = sorted(other.rpartition(".")[2] for other in NAMES if other.rpartition(".")[0] == address)
    # A function takes precedence over a submodule of the same name.
    yield from (f"from {address} import {name} as {name}" for name in below if name not in names)
    if address == "accelerate":
        yield "__version__: str"
    yield f"__all__ = {sorted(names)}"


def write_stubs(source: Path) -> None:
    """Write all stubs, and remove those of modules that no longer exist.

    Args:
        source: the parent folder of `accelerate`.
    """
    texts = {source / stub_path(address): stub(address) for address in NAMES}
    for path in set((source / "accelerate").rglob("*.pyi")).difference(texts):
        path.unlink()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_stubs(Path(__file__).parents[2])
