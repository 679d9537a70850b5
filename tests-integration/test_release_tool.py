"""Releases are planned and written in a small repository of two layers, with real tags and real changes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import tomli
from packaging.version import Version

import release

ROOT = Path(__file__).resolve().parents[1]
TOWNCRIER = (ROOT / "packages/accel-ops/pyproject.toml").read_text(encoding="utf-8").partition("[tool.towncrier]")[2]
PROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
# A remark that a release leaves alone.
dependencies = [{dependencies}]

[tool.towncrier]"""
ADDRESS = "https://example.org/project"
MODULES = {
    "alpha/__init__.py": '__all__ = ("first",)\n__version__ = "0.1.0"\n\ndef first(values, default=None): ...\n',
    "alpha/below.py": "def second(values): ...\n",
    "beta/__init__.py": '__version__ = "0.1.0"\nfrom alpha import first\n',
}


class Repository:
    """A git repository with two released packages; beta requires alpha."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, dependencies in (("alpha", ""), ("beta", '"alpha>=0.1,<0.2"')):
            self.write(name, "pyproject.toml", PROJECT.format(name=name, dependencies=dependencies) + TOWNCRIER)
            self.write(name, "README.md", f"See [the page]({ADDRESS}/blob/main/page.md).\n")
            self.write(name, "CHANGELOG.md", "# Changes\n\n<!-- releases -->\n")
            self.write(name, "changes/.gitignore", "!.gitignore\n")
        for path, text in MODULES.items():
            self.write(path.partition("/")[0], f"src/{path}", text)
        (root / "pyproject.toml").write_text(f'[tool.accel]\nrepository = "{ADDRESS}"\n', encoding="utf-8")
        self.git("init", "-q")
        self.commit("alpha-v0.1.0", "beta-v0.1.0")

    def write(self, package: str, name: str, text: str) -> Path:
        path = self.root / "packages" / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace('name = "accel-ops"', f'name = "{package}"'), encoding="utf-8")
        return path

    def git(self, *arguments: str) -> None:
        own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        who = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
        subprocess.run(["git", *who, *arguments], cwd=self.root, env={**os.environ, **own}, check=True)

    def commit(self, *tags: str) -> None:
        self.git("add", "--all")
        self.git("commit", "-q", "-m", "Change something")
        for tag in tags:
            self.git("tag", tag)

    def change(self, kind: str, package: str = "alpha") -> None:
        self.write(package, f"changes/+change.{kind}.md", "Something changed.\n")

    def run(self, *words: str) -> int:
        return release.main(words, self.root)

    def project(self, package: str) -> dict[str, object]:
        path = self.root / "packages" / package / "pyproject.toml"
        return tomli.loads(path.read_text(encoding="utf-8"))["project"]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_the_fragments_of_this_repository_are_well_formed(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("change.fix.md", "Text.\n", "its name is not"),
        ("+Change.fix.md", "Text.\n", "its name is not"),
        ("+change.novelty.md", "Text.\n", "its name is not"),
        ("+change.fix.md", "", "whole sentences"),
        ("+change.fix.md", "- Text.\n", "whole sentences"),
        ("+change.fix.md", "Text\n", "whole sentences"),
        ("+change.fix.md", "`f` takes `x`.\n", ""),
    ],
)
def test_faults_of_change_fragments(tmp_path: Path, name: str, text: str, fault: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = list(release.faults(tmp_path / name))
    assert [line for line in found if fault in line] == found
    assert bool(found) == bool(fault)


@pytest.mark.parametrize(
    ("version", "step", "after"),
    [
        ("0.1.9", release.FEATURE, "0.1.10"),
        ("0.1.3", release.BREAKING, "0.2.0"),
        ("1.2.3", release.FIX, "1.2.4"),
        ("1.2.3", release.FEATURE, "1.3.0"),
        ("1.2.3", release.BREAKING, "2.0.0"),
        ("1.15.0+accel.9", release.BREAKING, "1.15.0+accel.10"),
    ],
)
def test_the_kind_of_a_change_decides_the_next_version(version: str, step: int, after: str) -> None:
    assert release.next_version(Version(version), step) == Version(after)


def test_a_release_writes_version_ranges_and_changelog(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.change("feature")
    repository.change("internal")
    repository.change("fix", "beta")
    repository.commit()
    assert repository.run("apply", "alpha", "beta") == 0
    assert "git tag -a alpha-v0.1.1" in capsys.readouterr().out
    assert repository.project("alpha")["version"] == "0.1.1"
    assert repository.project("beta")["dependencies"] == ["alpha>=0.1.1,<0.2.0"]
    alpha = repository.root / "packages/alpha"
    assert '__version__ = "0.1.1"' in (alpha / "src/alpha/__init__.py").read_text(encoding="utf-8")
    assert "# A remark" in (alpha / "pyproject.toml").read_text(encoding="utf-8")
    changelog = (alpha / "CHANGELOG.md").read_text(encoding="utf-8")
    assert changelog.count("Something changed.") == 1
    assert [path.name for path in (alpha / "changes").iterdir()] == [".gitignore"]


@pytest.mark.parametrize("module", ["alpha/__init__.py", "alpha/below.py"])
def test_what_breaks_needs_a_fragment_that_says_so(
    repository: Repository, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.write("alpha", f"src/{module}", MODULES[module].replace("values", "items"))
    repository.change("fix")
    assert repository.run("compare", "alpha") == 1
    assert repository.run("compare", "beta") == 0
    assert repository.run("plan") == 1
    assert "problem: alpha" in capsys.readouterr().out
    repository.change("breaking")
    assert repository.run("plan") == 0
    assert "alpha: alpha-v0.1.0 -> 0.2.0" in capsys.readouterr().out


def test_check_fails_at_once_for_a_removed_name_with_a_fragment_of_a_fix(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repository.run("check") == 0
    repository.write("alpha", "src/alpha/__init__.py", '__all__ = ()\n__version__ = "0.1.0"\n')
    repository.change("fix")
    assert repository.run("check") == 1
    assert (
        "alpha: alpha.first: Public object was removed, and no fragment says that it breaks" in capsys.readouterr().out
    )
    repository.change("breaking")
    assert repository.run("check") == 1
    told = capsys.readouterr().out
    assert "beta: its range alpha<0.2,>=0.1 excludes alpha 0.2.0: run `python tools/release.py dependants`" in told


def test_the_fragments_of_dependants_are_written(repository: Repository) -> None:
    repository.change("breaking")
    assert repository.run("dependants") == 0
    fragment = repository.root / "packages/beta/changes/+requires-alpha-0-2-0.dependency.md"
    assert fragment.read_text(encoding="utf-8") == "Requires alpha 0.2.0.\n"
    assert repository.run("check") == 0
    repository.commit()
    assert repository.run("apply", "alpha", "beta") == 0
    assert repository.project("beta")["dependencies"] == ["alpha>=0.2.0,<0.3.0"]


def test_a_first_release_is_described_by_one_fragment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = Repository(tmp_path)
    repository.git("tag", "-d", "alpha-v0.1.0")
    repository.change("fix")
    assert repository.run("check") == 1
    assert "+first-release.feature.md is missing" in capsys.readouterr().out
    assert repository.run("collapse") == 1
    repository.write("alpha", f"changes/{release.FIRST}", "The first release.\n\n- It has `first`.\n- It is small.\n")
    repository.commit()
    assert repository.run("check") == 0
    assert repository.run("collapse") == 0
    assert "alpha: 1 fragments became" in capsys.readouterr().out
    # What is added between this and the release is part of the first release too.
    repository.change("performance")
    assert repository.run("check") == 0
    repository.commit()
    assert repository.run("apply", "alpha") == 0
    changelog = (repository.root / "packages/alpha/CHANGELOG.md").read_text(encoding="utf-8")
    assert "## 0.1.0 (" in changelog
    assert "- The first release." in changelog
    assert "- It is small." in changelog
    assert "Something changed." not in changelog


def test_a_tag_needs_its_version_its_changelog_and_a_public_repository(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.change("fix")
    assert repository.run("tagged", "alpha-v0.1.1") == 1
    told = capsys.readouterr().out
    for problem in ("the version is 0.1.0", "fragments are left", "no entry", "address of the repository is not set"):
        assert problem in told
    assert repository.run("tagged", "gamma-v1") == 1
    assert repository.run("address", "https://code.example.com/alpha/") == 0
    readme = (repository.root / "packages/alpha/README.md").read_text(encoding="utf-8")
    assert readme == "See [the page](https://code.example.com/alpha/blob/main/page.md).\n"
    repository.commit()
    assert repository.run("apply", "alpha") == 0
    repository.commit("alpha-v0.1.1")
    assert repository.run("tagged", "alpha-v0.1.1") == 0


def test_a_tag_is_refused_if_its_changelog_hides_what_griffe_finds(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repository.run("address", "https://code.example.com/alpha") == 0
    repository.write("alpha", "src/alpha/__init__.py", '__all__ = ()\n__version__ = "0.1.1"\n')
    repository.write("alpha", "pyproject.toml", PROJECT.format(name="alpha", dependencies="").replace("0.1.0", "0.1.1"))
    changelog = "# Changes\n\n## 0.1.1 (2026-01-01)\n\n### Fixed\n\n- Nothing.\n"
    repository.write("alpha", "CHANGELOG.md", changelog)
    repository.commit("alpha-v0.1.1")
    assert repository.run("tagged", "alpha-v0.1.1") == 1
    assert "alpha.first: Public object was removed, and the changelog does not say so" in capsys.readouterr().out


def test_a_module_that_is_gone_breaks(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    (repository.root / "packages/alpha/src/alpha/below.py").unlink()
    assert repository.run("compare") == 1
    assert "alpha.below: Public object was removed" in capsys.readouterr().out


def test_what_cannot_be_released_is_refused(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    assert repository.run("apply", "alpha") == 1
    assert "no fragment describes a release" in capsys.readouterr().err
    repository.write("alpha", "src/alpha/__init__.py", MODULES["alpha/__init__.py"] + "third = 3\n")
    assert repository.run("plan") == 1
    assert "no fragment describes the change" in capsys.readouterr().out
    repository.change("breaking")
    assert repository.run("apply", "alpha") == 1
    told = capsys.readouterr().err
    assert "not committed" in told
    assert "beta requires alpha<0.2,>=0.1, which excludes 0.2.0: release it too" in told
    assert repository.project("alpha")["version"] == "0.1.0"


def test_an_unknown_package_is_refused(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        repository.run("plan", "gamma")
    assert "there is no package 'gamma'; the packages are alpha, beta" in capsys.readouterr().err
