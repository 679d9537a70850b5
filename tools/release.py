"""Release the packages, each with a version of its own.

    python tools/release.py check                 every change fragment is well formed
    python tools/release.py compare [PACKAGE...]  what a package breaks since its last tag
    python tools/release.py plan [PACKAGE...]     what would be released, and why
    python tools/release.py apply PACKAGE...      write version, ranges and changelog; print how to commit and tag

Change fragments describe a release, `packages/*/changes/+what-changed.kind.md`; their kinds decide how far the
version moves. A range between our packages changes only where a name is used that older versions do not have, or where
a sibling's new version is outside. Nothing here commits, tags or pushes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from releasing import apply as writing
from releasing.fragments import fragment_problems
from releasing.plan import Planner
from releasing.workspace import History, Package, ReleaseError, named, read_workspace

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Request:
    """What a command works on."""

    workspace: tuple[Package, ...]
    history: History
    names: Sequence[str]

    def chosen(self) -> tuple[Package, ...]:
        """The packages that were named, or all."""
        return named(self.workspace, self.names or [package.name for package in self.workspace])

    def planner(self) -> Planner:
        """A plan in which the chosen packages are released."""
        return Planner(self.workspace, self.history, {package.name for package in self.chosen()})


def check(request: Request) -> int:
    """Prints what is wrong with fragments."""
    problems = [line for package in request.chosen() for line in fragment_problems(package)]
    for line in problems:
        print(f"fragments: {line}", file=sys.stderr)
    if not problems:
        print(f"fragments: those of {len(request.chosen())} packages are well formed")
    return 1 if problems else 0


def compare(request: Request) -> int:
    """Prints what each package breaks since its last tag."""
    planner = request.planner()
    refused = False
    for package in request.chosen():
        versions = request.history.versions(package)
        comparison = planner.comparison(package, versions[-1] if versions else None)
        if comparison is None:
            print(f"{package.name}: no release to compare with")
            continue
        problems = list(comparison.problems())
        refused |= bool(problems)
        print(f"{package.name}: {len(problems)} problems against {versions[-1]}, {len(comparison.accepted)} waived")
        for line in (*problems, *(f"waived: {found}: {waiver.reason}" for found, waiver in comparison.accepted)):
            print(f"    {line}")
    return 1 if refused else 0


def plan(request: Request) -> int:
    """Prints what would be released and why."""
    chosen = request.chosen()
    entries = [entry for entry in request.planner().plan() if entry.package in chosen]
    for entry in entries:
        print("\n".join(entry.lines()))
    return 1 if any(entry.problems for entry in entries) else 0


def apply(request: Request) -> int:
    """Writes releases into the files, and prints how to commit and tag them."""
    entries = writing.prepare(request.workspace, request.history, request.names)
    today = datetime.now(timezone.utc).date()
    for entry in entries:
        print("\n".join(entry.lines()))
        writing.apply(entry, today)
    print("\nRead the changes (git diff HEAD), then:\n")
    print("\n".join(writing.commands(entries)))
    return 0


COMMANDS: dict[str, Callable[[Request], int]] = {"check": check, "compare": compare, "plan": plan, "apply": apply}


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs one command and returns its exit code: 0, 1 for what it found, 2 for what it refuses."""
    parser = argparse.ArgumentParser(prog="release.py", description="Release the packages one by one.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        part = subparsers.add_parser(name, help=command.__doc__)
        part.add_argument("packages", nargs="+" if name == "apply" else "*", metavar="PACKAGE")
    given = parser.parse_args(arguments)
    try:
        return COMMANDS[given.command](Request(read_workspace(root), History(root), given.packages))
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
