"""The page of the drop-in: every old import address, and where the object that is found there lives."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.names import NAMES, NOT_PROVIDED, REMOVED, VERSION, Owner, owners
from reference.markdown import code, page, prose, table
from reference.published import Links

__all__ = ("dropin_page",)

_ABOUT = (
    "What scripts and libraries find at the import addresses of the original library, version {version}: the very "
    "objects of our packages, so `accelerate.utils.gather is accel_ops.gather`. Those of `accelerate.legacy` exist for "
    "such scripts alone. Names that an old module only imports for itself are there too, and left out here."
)


def dropin_page(links: Links) -> str:
    """The page, from the table of names of the drop-in."""
    lines = ["# Addresses of the drop-in", "", prose(_ABOUT.format(version=VERSION.partition("+")[0])), ""]
    for address in sorted(NAMES):
        if owners(address):
            lines += [f"## {address}", "", *table(("name", "lives at"), _rows(owners(address), links)), ""]
    refused = [(code(address), *map(prose, said)) for address, said in sorted(NOT_PROVIDED.items())]
    removed = [(code(name), "Removed before 1.15.", prose(remedy)) for name, remedy in sorted(REMOVED.items())]
    return page([*lines, "## Not there", "", *table(("address or name", "why", "instead"), [*refused, *removed])])


def _rows(names: Mapping[str, Owner], links: Links) -> list[tuple[str, str]]:
    return [(code(name), _place(f"{owner.module}.{owner.name}", links)) for name, owner in sorted(names.items())]


def _place(home: str, links: Links) -> str:
    shown = links.targets.get(home)
    return code(home) if shown is None else f"{{py:obj}}`{shown}`"
