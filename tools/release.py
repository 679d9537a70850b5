"""Release packages, each with its own version: towncrier writes the changelogs, griffe finds what breaks.

    python tools/release.py check [PACKAGE...]    fragments are well formed, and say what breaks since the last tag
    python tools/release.py dependants            write the fragments of packages that a breaking release leaves behind
    python tools/release.py compare [PACKAGE...]  what a package breaks since its last tag
    python tools/release.py plan [PACKAGE...]     the next version of each package, and why
    python tools/release.py collapse [PACKAGE...] before a first release, keep only the fragment that describes it
    python tools/release.py apply PACKAGE...      write versions, ranges and changelogs; print how to commit and tag
    python tools/release.py tagged TAG            the checked-out files are the release that this tag names
    python tools/release.py address URL           write the address of the repository wherever it is named

Fragments, `packages/*/changes/+what-changed.kind.md`, describe a release; their kinds decide the next version. A
released package requires its siblings from their newest version to the end of that series. The first release of a
package is described by `+first-release.feature.md` alone, since nobody has seen what the other fragments changed.
Nothing here commits, tags or pushes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import griffe
import tomlkit
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FIX, FEATURE, BREAKING = range(3)
KINDS = {"breaking": BREAKING, "feature": FEATURE, "fix": FIX, "performance": FIX, "dependency": FIX, "internal": FIX}
REMOVED = "Public object was removed"
"""griffe's name for it, used here for whole modules too, which griffe does not compare."""
UNTOLD = "internal"
"""The kind of a change that users do not notice: it causes a release, but no line in the changelog."""
UNTOLD_END = f".{UNTOLD}.md"
FRAGMENT = re.compile(r"\+[a-z0-9]+(?:-[a-z0-9]+)*\.(?P<kind>[a-z]+)\.md")
FIRST = "+first-release.feature.md"
"""The fragment that describes the first release of a package."""
NOWHERE = "https://example.org/"
"""How the address of the repository begins as long as it is not public; such a package is not released."""
UNPUBLISHED = ("accelerate",)
"""Packages whose names belong to other projects on the package index."""
VERSION_LINE = re.compile(r'^__version__ = "[^"]*"$', re.MULTILINE)


def next_version(version: Version, step: int) -> Version:
    """The version after `version` for a change of this size, by semantic versioning.

    Below 1.0 the second number counts breaking changes and the third all others. The drop-in's version is that of the
    interface that it provides, with a number of ours at its end (`1.15.0+accel.1`).
    """
    if version.local:
        head, _, last = version.local.rpartition(".")
        return Version(f"{version.public}+{head}.{int(last) + 1}")
    if step == BREAKING:
        return series_end(version)
    if step == FEATURE and version.major:
        return Version(f"{version.major}.{version.minor + 1}.0")
    return Version(f"{version.major}.{version.minor}.{version.micro + 1}")


def series_end(version: Version) -> Version:
    """The first version that may break what works with `version`."""
    return Version(f"{version.major + 1}.0.0" if version.major else f"0.{version.minor + 1}.0")


@dataclass(frozen=True)
class Package:
    """A package of the repository."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def root(self) -> Path:
        return self.folder.parents[1]

    @cached_property
    def project(self) -> tomlkit.TOMLDocument:
        """Its pyproject.toml, which keeps comments when it is written."""
        return tomlkit.parse((self.folder / "pyproject.toml").read_text(encoding="utf-8"))

    @property
    def requirement_lists(self) -> list[Any]:
        project: Any = self.project["project"]
        return [project.get("dependencies", []), *project.get("optional-dependencies", {}).values()]

    @property
    def version(self) -> Version:
        project: Any = self.project["project"]
        return Version(str(project["version"]))

    @property
    def fragments(self) -> list[Path]:
        return sorted(path for path in (self.folder / "changes").glob("*") if path.name != ".gitignore")

    @property
    def tags(self) -> list[str]:
        """The tags of its releases, from the oldest to the newest."""
        tags = git(self.root, "tag", "--merged", "HEAD", "--list", f"{self.name}-v*")
        return sorted(tags, key=lambda tag: Version(tag.removeprefix(f"{self.name}-v")))

    @property
    def tag(self) -> str | None:
        """The tag of its newest release."""
        return self.tags[-1] if self.tags else None

    def next(self) -> Version | None:
        """The version of its next release; None if no fragment describes one."""
        kinds = [found["kind"] for path in self.fragments if (found := FRAGMENT.fullmatch(path.name))]
        if not kinds or self.tag is None:
            return self.version if kinds else None
        return next_version(self.version, max(KINDS.get(kind, FIX) for kind in kinds))

    def breakages(self, tag: str | None) -> list[str]:
        """What it breaks since a release: every module whose name does not begin with an underscore counts."""
        if tag is None:
            return []
        paths = sorted(str(path.relative_to(self.root)) for path in self.root.glob("packages/*/src"))
        how: dict[str, Any] = {"allow_inspection": False, "resolve_aliases": True, "resolve_external": True}
        old = griffe.load_git(self.module, ref=tag, repo=self.root, search_paths=paths, **how)
        new = griffe.load(self.module, search_paths=[self.root / path for path in paths], **how)
        return sorted(set(_breakages(old, new)))

    def problems(self) -> Iterator[str]:
        """What is wrong with its fragments, or missing in them."""
        yield from (f"changes/{path.name}: {fault}" for path in self.fragments for fault in faults(path))
        if self.tag is None:
            if self.fragments and self.folder / "changes" / FIRST not in self.fragments:
                yield f"changes/{FIRST} is missing, which describes its first release"
            return
        if not self.fragments and git(self.root, "diff", "--name-only", self.tag, "--", str(self.folder / "src")):
            yield f"files changed since {self.tag}, and no fragment describes the change"
        if not any(path.name.endswith(".breaking.md") for path in self.fragments):
            yield from (f"{found}, and no fragment says that it breaks" for found in self.breakages(self.tag))

    def write(self, version: Version, siblings: dict[str, Version]) -> None:
        """Writes a release: version, ranges of siblings, changelog."""
        project: Any = self.project["project"]
        project["version"] = str(version)
        for lines in self.requirement_lists:
            for place, line in enumerate(lines):
                found = Requirement(line)
                if found.name in siblings and found.name != self.name:
                    extras = f"[{','.join(sorted(found.extras))}]" if found.extras else ""
                    known = siblings[found.name]
                    lines[place] = f"{found.name}{extras}>={known.public},<{series_end(known)}"
        (self.folder / "pyproject.toml").write_text(tomlkit.dumps(self.project), encoding="utf-8")
        module = self.folder / "src" / self.module / "__init__.py"
        text = VERSION_LINE.sub(f'__version__ = "{version}"', module.read_text(encoding="utf-8"))
        module.write_text(text, encoding="utf-8")
        self.drop_untold()
        what = ("--version", str(version), "--date", datetime.now(timezone.utc).date().isoformat(), "--yes")
        command = [sys.executable, "-m", "towncrier", "build", "--dir", str(self.folder), *what]
        subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.DEVNULL)

    def drop_untold(self) -> int:
        """Removes the fragments that are not lines of the changelog of its next release, and counts them."""
        first = self.tag is None
        untold = [path for path in self.fragments if (path.name != FIRST if first else path.name.endswith(UNTOLD_END))]
        for path in untold:
            path.unlink()
        return len(untold)


def git(root: Path, *words: str) -> list[str]:
    """The lines that a git command prints."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


def _breakages(old: Any, new: Any) -> Iterator[str]:
    for found in griffe.find_breaking_changes(old, new):
        if found.obj.path.partition(".")[0] == old.path.partition(".")[0]:
            # The name and the kind of change; the explanations of griffe begin with paths of its own checkout.
            yield f"{found.obj.path}: {found.kind.value}"
    for name, module in old.modules.items():
        if name.startswith("_") or module.is_alias:
            continue
        if name in new.members and new.members[name].is_module:
            yield from _breakages(module, new.members[name])
        else:
            yield f"{module.path}: {REMOVED}"


def faults(path: Path) -> Iterator[str]:
    """What is wrong with a fragment."""
    found = FRAGMENT.fullmatch(path.name)
    text = path.read_text(encoding="utf-8")
    if found is None or found["kind"] not in KINDS:
        yield f"its name is not +what-changed.kind.md, in lower case; the kinds are {', '.join(KINDS)}"
    if not text.endswith(".\n") or not (text[0].isupper() or text[0] == "`"):
        yield "its text is not a list of whole sentences"


def check(packages: Sequence[Package]) -> int:
    """Check that change fragments are well formed, and that they say what breaks since the last tag."""
    wrong = [f"{one.name}: {problem}" for one in packages for problem in one.problems()]
    wrong += [f"{problem}: run `python tools/release.py dependants`" for _, problem in left_behind(packages)]
    print("\n".join(wrong) or f"the change fragments of {len(packages)} packages are well formed")
    return 1 if wrong else 0


def dependants(packages: Sequence[Package]) -> int:
    """Write the fragments of packages that require an older series of one that breaks."""
    for fragment, problem in left_behind(packages):
        fragment.write_text(f"Requires {problem.rpartition(' excludes ')[2]}.\n", encoding="utf-8")
        print(f"{fragment.parent.parent.name}: wrote changes/{fragment.name}")
    return 0


def left_behind(packages: Sequence[Package]) -> Iterator[tuple[Path, str]]:
    """Fragments that packages lack although the next release of one that they require is outside of their range."""
    following = {one.name: version for one in workspace(packages[0].root) if one.tag and (version := one.next())}
    for package in packages:
        for line in (Requirement(line) for lines in package.requirement_lists for line in lines):
            version = following.get(line.name)
            fragment = (
                package.folder / "changes" / f"+requires-{line.name}-{str(version).replace('.', '-')}.dependency.md"
            )
            outside = version and package.tag and not line.specifier.contains(version, prereleases=True)
            if outside and not fragment.exists():
                yield fragment, f"{package.name}: its range {line} excludes {line.name} {version}"


def compare(packages: Sequence[Package]) -> int:
    """List what each package breaks since its last tag."""
    found = {package.name: package.breakages(package.tag) for package in packages}
    for name, lines in found.items():
        print(f"{name}: {len(lines)} incompatible changes", *lines, sep="\n    ")
    return 1 if any(found.values()) else 0


def plan(packages: Sequence[Package]) -> int:
    """Show the next version of each package, and why."""
    failed = False
    for package in packages:
        problems = list(package.problems())
        failed |= bool(problems)
        lines = [path.name for path in package.fragments] + [f"problem: {problem}" for problem in problems]
        print(f"{package.name}: {package.tag or 'no release'} -> {package.next() or 'nothing'}", *lines, sep="\n    ")
    return 1 if failed else 0


def apply(packages: Sequence[Package]) -> int:
    """Write releases into the files, and print how to commit and tag them."""
    root = packages[0].root
    wrong = [f"{package.name}: {problem}" for package in packages for problem in package.problems()]
    wrong += [f"{package.name}: no fragment describes a release" for package in packages if package.next() is None]
    wrong += [f"not committed: {line}" for line in git(root, "status", "--porcelain")]
    versions = {package.name: package.version for package in workspace(root)}
    released = {package.name: version for package in packages if (version := package.next())}
    for other in workspace(root):
        for line in (Requirement(line) for lines in other.requirement_lists for line in lines):
            version = None if other.name in released else released.get(line.name)
            if version and not line.specifier.contains(version, prereleases=True):
                wrong.append(f"{other.name} requires {line}, which excludes {version}: release it too")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    for package in packages:
        package.write(released[package.name], versions | released)
    print(f"git add --all packages\ngit commit -m 'Release {', '.join(f'{n} {v}' for n, v in released.items())}'")
    print("\n".join(f"git tag -a {name}-v{version} -m '{name} {version}'" for name, version in released.items()))
    return 0


def collapse(packages: Sequence[Package]) -> int:
    """Remove all fragments of packages without a release, except the one that describes the first."""
    for package in (one for one in packages if one.tag is None):
        if not (package.folder / "changes" / FIRST).is_file():
            print(f"{package.name}: write changes/{FIRST} first", file=sys.stderr)
            return 1
        print(f"{package.name}: {package.drop_untold()} fragments became {FIRST}")
    return 0


def tagged(packages: Sequence[Package], tag: str) -> int:
    """Check that the checked-out files are the release that a tag names."""
    package = next((one for one in packages if tag.startswith(f"{one.name}-v")), None)
    if package is None:
        print(f"{tag} is not the tag of a package", file=sys.stderr)
        return 1
    wrong = []
    if tag != f"{package.name}-v{package.version}":
        wrong.append(f"the version is {package.version}")
    if package.name in UNPUBLISHED:
        wrong.append("its name belongs to another project on the package index")
    if package.fragments:
        wrong.append(f"fragments are left: {', '.join(path.name for path in package.fragments)}")
    changelog = (package.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    entry = changelog.partition(f"\n## {package.version} (")[2].partition("\n## ")[0]
    if not entry:
        wrong.append("the changelog has no entry for it")
    before = next((other for other in reversed(package.tags) if other != tag), None)
    if "### What breaks" not in entry:
        wrong += [f"{broken}, and the changelog does not say so" for broken in package.breakages(before)]
    if repository_of(package.root).startswith(NOWHERE):
        wrong.append("the address of the repository is not set: `python tools/release.py address URL`")
    print("\n".join(f"{tag}: {line}" for line in wrong) or f"{tag}: ready to build")
    return 1 if wrong else 0


def address(packages: Sequence[Package], url: str) -> int:
    """Write the address of the repository into metadata and READMEs."""
    root = packages[0].root
    old = repository_of(root)
    files = [root / "pyproject.toml", *root.glob("packages/*/pyproject.toml"), *root.glob("packages/*/README.md")]
    for path in files:
        path.write_text(path.read_text(encoding="utf-8").replace(old, url.rstrip("/")), encoding="utf-8")
    print(f"{old} became {url.rstrip('/')} in {len(files)} files")
    return 0


def repository_of(root: Path) -> str:
    """The address of the repository, from its own pyproject.toml."""
    project: Any = tomlkit.parse((root / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["tool"]["accel"]["repository"])


def workspace(root: Path) -> list[Package]:
    """All packages of a repository."""
    return [Package(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]


COMMANDS: dict[str, Callable[[Sequence[Package]], int]] = {
    "check": check,
    "dependants": dependants,
    "compare": compare,
    "plan": plan,
    "collapse": collapse,
    "apply": apply,
}
WITH_A_WORD: dict[str, Callable[[Sequence[Package], str], int]] = {"tagged": tagged, "address": address}
"""Commands that take one word, which is not the name of a package."""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run one command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="release.py", description="Release the packages one by one.")
    commands = parser.add_subparsers(dest="command", required=True)
    packages = {package.name: package for package in workspace(root)}
    for name, command in COMMANDS.items():
        part = commands.add_parser(name, help=command.__doc__)
        part.add_argument("packages", nargs="+" if name == "apply" else "*", metavar="PACKAGE")
    for name, described in WITH_A_WORD.items():
        commands.add_parser(name, help=described.__doc__).add_argument("word", metavar=name.upper())
    request = parser.parse_args(arguments)
    if request.command in WITH_A_WORD:
        return WITH_A_WORD[request.command](list(packages.values()), request.word)
    if unknown := sorted(set(request.packages) - set(packages)):
        parser.error(f"there is no package {unknown[0]!r}; the packages are {', '.join(packages)}")
    return COMMANDS[request.command]([packages[name] for name in request.packages or packages])


if __name__ == "__main__":
    sys.exit(main())
