"""What a package would break for those who use its last release, and the reasons given for doing so.

Griffe compares the two versions without importing either. Every module whose name has no underscore in front counts:
the packages of this repository import one another's modules by ranges. What breaks needs a waiver in the package's
`changes/waivers.toml`, which the release then takes away:

    [[waiver]]
    path = "accel_ops.collectives.gather"
    kind = "Parameter was removed"
    reason = "It never had an effect."
    breaks = false      # left out: the version tells of a breaking change
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import griffe
import tomli
from packaging.version import Version

from releasing.fragments import WAIVERS
from releasing.workspace import History, Package, ReleaseError, tag_name

KEYS = {"path", "kind", "reason", "breaks"}

# Read for Python 3.10, which lacks its base class, this enumeration has no members.
_KINDS: Any = griffe.BreakageKind


@dataclass(frozen=True, order=True)
class Break:
    """One way in which a new version does not replace an older one."""

    path: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Waiver:
    """Why a break is accepted, and whether the version has to tell of it."""

    path: str
    kind: str
    reason: str
    breaks: bool = True

    def covers(self, found: Break) -> bool:
        """Whether it is about this break."""
        return (self.path, self.kind) == (found.path, found.kind)


@dataclass(frozen=True)
class Comparison:
    """The breaks of a package against a release, sorted by what its waivers say."""

    accepted: tuple[tuple[Break, Waiver], ...]
    refused: tuple[Break, ...]
    idle: tuple[Waiver, ...]
    """Waivers of what is not broken."""

    @property
    def breaks(self) -> bool:
        """Whether an accepted break has to show in the version."""
        return any(waiver.breaks for _, waiver in self.accepted)

    def problems(self) -> Iterator[str]:
        """What stands in the way of a release."""
        for found in self.refused:
            yield f"{found} breaks what was released, and no waiver in changes/{WAIVERS} gives a reason"
        for waiver in self.idle:
            yield f"changes/{WAIVERS} waives {waiver.path}: {waiver.kind}, which is not broken"


def compare(old: griffe.Module, new: griffe.Module, waivers: Iterable[Waiver]) -> Comparison:
    """Compares two versions of a package under its waivers."""
    given = tuple(waivers)
    accepted, refused = [], []
    for found in breaks(old, new):
        waiver = next((waiver for waiver in given if waiver.covers(found)), None)
        if waiver is None:
            refused.append(found)
        else:
            accepted.append((found, waiver))
    used = [waiver for _, waiver in accepted]
    return Comparison(tuple(accepted), tuple(refused), tuple(waiver for waiver in given if waiver not in used))


def breaks(old: griffe.Module, new: griffe.Module) -> list[Break]:
    """What the new version breaks, each once, by name."""
    found = set()
    for module in public_modules(old):
        try:
            other = new[module.path.partition(".")[2]] if "." in module.path else new
        except KeyError:
            found.add(Break(module.path, _KINDS.OBJECT_REMOVED.value, ""))
            continue
        found.update(described(breakage) for breakage in griffe.find_breaking_changes(module, other))
    return sorted(item for item in found if item.path.partition(".")[0] == old.path)


def public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    """A module and all below it whose names have no underscore in front."""
    yield module
    for name, child in module.modules.items():
        if not name.startswith("_") and not child.is_alias:
            yield from public_modules(child)


def described(breakage: griffe.Breakage) -> Break:
    """A finding of griffe in our words: where, what, and which parameter."""
    changed = breakage.old_value if breakage.old_value is not None else breakage.new_value
    detail = changed.name if isinstance(changed, griffe.Parameter) else ""
    return Break(breakage.obj.path, breakage.kind.value, detail)


def load(package: Package, beside: Iterable[Package], history: History, version: Version | None) -> griffe.Module:
    """Reads the names of a package and of all beside it, as they were released with a version or, for None, as now."""
    paths = [str(other.source.relative_to(history.root)) for other in beside]
    how: dict[str, Any] = {"allow_inspection": False, "resolve_aliases": True, "resolve_external": True}
    if version is None:
        found = griffe.load(package.module, search_paths=[history.root / path for path in paths], **how)
    else:
        ref = tag_name(package.name, version)
        found = griffe.load_git(package.module, ref=ref, repo=history.root, search_paths=paths, **how)
    if not isinstance(found, griffe.Module):
        raise ReleaseError(f"the names of {package.name}", f"{package.module} is not a module", "add its source folder")
    return found


def read_waivers(package: Package) -> tuple[Waiver, ...]:
    """The waivers of a package.

    Raises:
        ReleaseError: the file is not TOML, or a waiver is not complete.
    """
    path = package.changes / WAIVERS
    if not path.is_file():
        return ()
    try:
        tables: list[dict[str, Any]] = tomli.loads(path.read_text(encoding="utf-8")).get("waiver", [])
    except tomli.TOMLDecodeError as error:
        raise ReleaseError(f"the waivers in {path}", f"it is not TOML: {error}", "correct the file") from error
    kinds = {kind.value for kind in _KINDS}
    for table in tables:
        missing = [key for key in ("path", "kind", "reason") if not str(table.get(key, "")).strip()]
        wrong = [*missing, *sorted(set(table) - KEYS)] + ([table["kind"]] if table.get("kind") not in kinds else [])
        if wrong:
            raise ReleaseError(
                f"a waiver in {path}",
                f"it is not right about: {', '.join(map(str, wrong))}",
                f"give path, reason, and kind, which is one of: {', '.join(sorted(kinds))}",
            )
    return tuple(Waiver(**table) for table in tables)
