"""What git knows of earlier releases: their tags, what has changed since, and the files of a tag."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

from packaging.version import InvalidVersion, Version

from releasing.errors import ReleaseError
from releasing.workspace import Package


def tag_name(package: str, version: Version) -> str:
    """The tag of a release: `accel-ops-v1.3.0`."""
    return f"{package}-v{version}"


@dataclass
class History:
    """The git repository of a workspace; entered, it keeps the files of tags until it is left."""

    root: Path
    _extracted: TemporaryDirectory[str] = field(init=False)

    def __enter__(self) -> History:
        self._extracted = TemporaryDirectory()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._extracted.cleanup()

    def git(self, *arguments: str) -> bytes:
        """What a git command prints.

        Raises:
            ReleaseError: git failed, with what it said.
        """
        done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, check=False)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()
            raise ReleaseError(f"git {' '.join(arguments)}", said, f"see that {self.root} is a complete git checkout")
        return done.stdout

    def lines(self, *arguments: str) -> list[str]:
        """What a git command prints, line by line."""
        return self.git(*arguments).decode().splitlines()

    def versions(self, package: Package) -> list[Version]:
        """The released versions of a package that lead to the current commit, oldest first.

        Raises:
            ReleaseError: a tag of the package names no version.
        """
        prefix = f"{package.name}-v"
        tags = self.lines("tag", "--merged", "HEAD", "--list", f"{prefix}*")
        try:
            return sorted(Version(tag.removeprefix(prefix)) for tag in tags)
        except InvalidVersion as error:
            raise ReleaseError(
                f"the releases of {package.name}", f"a tag names no version: {error}", "delete or rename the tag"
            ) from error

    def changed_files(self, package: Package, version: Version) -> list[str]:
        """The files of a package that users get and that differ from a released version, committed or not."""
        paths = [str((package.folder / name).relative_to(self.root)) for name in ("src", "pyproject.toml")]
        return self.lines("diff", "--name-only", tag_name(package.name, version), "--", *paths)

    def uncommitted(self) -> list[str]:
        """What git would say is not committed, untracked files too."""
        return self.lines("status", "--porcelain")

    def source(self, package: Package, version: Version) -> Path:
        """The source folder of a package as it was released."""
        tag = tag_name(package.name, version)
        folder = Path(self._extracted.name) / tag
        inside = (package.source).relative_to(self.root)
        if not folder.exists():
            archive = self.git("archive", "--format=tar", tag, str(inside))
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
        return folder / inside
