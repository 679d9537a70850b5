"""Releases are planned and written in a small repository of three layers, with real tags and real changes."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli

import release

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (ROOT / "packages/accel-ops/pyproject.toml").read_text(encoding="utf-8").partition("[tool.towncrier]")[2]

PROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
# A remark that a release leaves alone.
dependencies = [{dependencies}]

[project.optional-dependencies]
testing = [{extra}]

[tool.towncrier]"""

ALPHA = '''
"""The lowest layer."""

__all__ = ("Shape", "first")

__version__ = "0.1.0"


class Shape:
    def area(self, scale: float = 1.0) -> float:
        return scale


def first(values, default=None):
    return values[0] if values else default
'''

BETA = '''
"""The layer above."""

import alpha
from alpha import Shape


def twice(shape: Shape) -> float:
    return 2 * shape.area()


def start(values):
    return alpha.first(values, default=0)
'''

GAMMA = '''
"""The highest layer."""

from beta import twice


def four_times(shape):
    return 2 * twice(shape)
'''

LAYERS = {
    "alpha": (ALPHA, "", ""),
    "beta": (BETA, '"alpha>=0.1,<0.2"', ""),
    "gamma": (GAMMA, '"beta>=0.1,<0.2"', '"alpha[testing]>=0.1,<0.2", "gamma[testing]"'),
}


@dataclass
class Repository:
    """A git repository with a few packages."""

    root: Path

    def git(self, *arguments: str) -> str:
        """Runs git apart from the settings of whoever runs the tests."""
        own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        who = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
        command = ["git", *who, *arguments]
        done = subprocess.run(
            command, cwd=self.root, env={**os.environ, **own}, capture_output=True, text=True, check=True
        )
        return done.stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "-q", "-m", "Change something")

    def tag(self, *names: str) -> None:
        for name in names:
            self.git("tag", name)

    def file(self, package: str, name: str) -> Path:
        return self.root / "packages" / package / name

    def module(self, package: str) -> Path:
        return self.file(package, f"src/{package}/__init__.py")

    def replace(self, path: Path, old: str, new: str) -> None:
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    def tell(self, package: str, name: str, text: str = "Something changed.") -> None:
        """Adds a change fragment."""
        self.file(package, f"changes/+{name}.md").write_text(f"{text}\n", encoding="utf-8")

    def project(self, package: str) -> dict[str, object]:
        return tomli.loads(self.file(package, "pyproject.toml").read_text(encoding="utf-8"))["project"]


def add_package(repository: Repository, name: str, module: str, dependencies: str, extra: str) -> None:
    """Writes the files of one package."""
    repository.module(name).parent.mkdir(parents=True)
    repository.module(name).write_text(module.lstrip(), encoding="utf-8")
    repository.file(name, "changes").mkdir()
    repository.file(name, "changes/.gitignore").write_text("!.gitignore\n", encoding="utf-8")
    repository.file(name, "CHANGELOG.md").write_text(f"# Changelog of {name}\n\n<!-- releases -->\n", encoding="utf-8")
    project = PROJECT.format(name=name, dependencies=dependencies, extra=extra)
    settings = SETTINGS.replace("accel-ops", name)
    repository.file(name, "pyproject.toml").write_text(project + settings, encoding="utf-8")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Three packages, each released as 0.1.0."""
    made = Repository(tmp_path)
    made.git("init", "-q")
    for name, (module, dependencies, extra) in LAYERS.items():
        add_package(made, name, module, dependencies, extra)
    made.commit()
    made.tag("alpha-v0.1.0", "beta-v0.1.0", "gamma-v0.1.0")
    return made


def called(repository: Repository, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of a command, and all it printed."""
    code = release.main(arguments, repository.root)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def add_last(repository: Repository) -> None:
    """Gives alpha a new function that beta uses, and tells of both."""
    module = repository.module("alpha")
    repository.replace(module, '"first")', '"first", "last")')
    module.write_text(
        module.read_text(encoding="utf-8") + "\n\ndef last(values):\n    return values[-1]\n", encoding="utf-8"
    )
    repository.tell("alpha", "last.feature", "`last` is the last of some values.")
    upper = repository.module("beta")
    upper.write_text(upper.read_text(encoding="utf-8") + "\n\nend = alpha.last\n", encoding="utf-8")
    repository.tell("beta", "end.feature", "`end` is the end.")
    repository.commit()


def break_first(repository: Repository) -> None:
    """Takes a parameter away that users of alpha may name, and tells of it."""
    repository.replace(repository.module("alpha"), "values, default=None", "values, otherwise=None")
    repository.replace(repository.module("alpha"), "else default", "else otherwise")
    repository.replace(repository.module("beta"), "default=0", "otherwise=0")
    repository.tell("alpha", "otherwise.breaking", "`first` has `otherwise` in place of `default`.")
    repository.tell("beta", "otherwise.internal", "A parameter has another name.")
    repository.commit()


def waive(repository: Repository, text: str) -> None:
    repository.file("alpha", "changes/waivers.toml").write_text(text, encoding="utf-8")
    repository.commit()


WAIVER = """
[[waiver]]
path = "alpha.first"
kind = "Parameter was removed"
reason = "Both names meant the same."
"""


def test_nothing_changed_and_nothing_is_released(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = called(repository, capsys, "plan")
    assert code == 0
    assert [line.split() for line in printed.splitlines()] == [[name, "0.1.0", "stays"] for name in LAYERS]


def test_layers_stand_in_their_order_whatever_their_names(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(repository, "aaa", "", '"gamma>=0.1,<0.2"', "")
    repository.commit()
    _, printed = called(repository, capsys, "plan")
    assert re.findall(r"^\w+", printed, re.MULTILINE) == ["alpha", "beta", "gamma", "aaa"]
    assert "0.1.0 waits for its tag aaa-v0.1.0" in printed


@pytest.mark.parametrize(
    ("kind", "version"), [("fix", "0.1.1"), ("feature", "0.1.1"), ("breaking", "0.2.0"), ("internal", "0.1.1")]
)
def test_the_kind_of_a_fragment_decides_on_the_version(
    repository: Repository, capsys: pytest.CaptureFixture[str], kind: str, version: str
) -> None:
    repository.tell("gamma", f"something.{kind}")
    code, printed = called(repository, capsys, "plan", "gamma")
    assert code == 0
    assert printed.splitlines() == [f"gamma           0.1.0 -> {version}", f"    {kind}: Something changed."]


def test_a_range_stays_where_no_newer_name_is_used(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.replace(repository.module("alpha"), "return scale", "return 2 * scale")
    repository.tell("alpha", "area.fix", "Areas are right.")
    repository.commit()
    _, printed = called(repository, capsys, "plan")
    assert "alpha           0.1.0 -> 0.1.1" in printed
    assert "beta            0.1.0 stays" in printed
    assert "gamma           0.1.0 stays" in printed


def test_a_lower_bound_rises_where_a_newer_name_is_used(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    add_last(repository)
    code, printed = called(repository, capsys, "plan")
    assert code == 0
    assert "alpha>=0.1.1,<0.2: src/beta/__init__.py uses alpha.last, which 0.1.0 does not have" in printed
    assert "gamma           0.1.0 stays" in printed


def test_a_lower_bound_rises_to_the_first_version_with_the_name(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    add_last(repository)
    assert called(repository, capsys, "apply", "alpha")[0] == 0
    repository.commit()
    repository.tag("alpha-v0.1.1")
    repository.tell("alpha", "later.fix")
    repository.commit()
    _, printed = called(repository, capsys, "plan")
    assert "alpha           0.1.1 -> 0.1.2" in printed
    assert "alpha>=0.1.1,<0.2" in printed


@pytest.mark.parametrize(
    ("new", "used", "told"),
    [
        ("def first(values, default=None, skip=0):", "alpha.first([1], skip=1)", "alpha.first(skip=)"),
        ("class Round(Shape):\n    pass\n\n\ndef first(values, default=None):", '"alpha:Round"', "alpha.Round"),
        ("class Round(Shape):\n    pass\n\n\ndef first(values, default=None):", '{"alpha": ("Round",)}', "alpha.Round"),
    ],
)
def test_parameters_and_addresses_in_texts_count_as_names(
    repository: Repository, capsys: pytest.CaptureFixture[str], new: str, used: str, told: str
) -> None:
    repository.replace(repository.module("alpha"), "def first(values, default=None):", new)
    repository.tell("alpha", "new.feature")
    module = repository.module("beta")
    module.write_text(f"{module.read_text(encoding='utf-8')}\n\nUSED = {used}\n", encoding="utf-8")
    repository.tell("beta", "used.fix")
    repository.commit()
    assert f"uses {told}, which 0.1.0 does not have" in called(repository, capsys, "plan")[1]


def test_a_breaking_change_needs_a_waiver(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    break_first(repository)
    code, printed = called(repository, capsys, "compare", "alpha")
    assert code == 1
    assert "alpha.first: Parameter was removed (default) breaks what was released" in printed
    assert called(repository, capsys, "plan")[0] == 1
    code, printed = called(repository, capsys, "apply", "alpha", "beta", "gamma")
    assert code == 2
    assert "no waiver in changes/waivers.toml gives a reason" in printed
    assert repository.git("status", "--porcelain") == ""


def test_a_waived_break_moves_the_version_and_widens_the_ranges_above(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    break_first(repository)
    waive(repository, WAIVER)
    code, printed = called(repository, capsys, "plan")
    assert code == 0
    assert "alpha           0.1.0 -> 0.2.0" in printed
    assert "waived: alpha.first: Parameter was removed (default): Both names meant the same." in printed
    assert "alpha>=0.2,<0.3: src/beta/__init__.py uses alpha.first(otherwise=), which 0.1.0 does not have" in printed
    assert "gamma           0.1.0 -> 0.1.1\n    alpha>=0.1,<0.3: 0.2.0 is outside of >=0.1,<0.2" in printed


def test_a_waiver_can_say_that_nobody_is_affected(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.replace(repository.module("alpha"), "values, default=None", "values, *, default=None")
    repository.tell("alpha", "only-by-name.fix")
    kind = "Parameter kind was changed"
    waive(repository, WAIVER.replace("Parameter was removed", kind) + "breaks = false\n")
    code, printed = called(repository, capsys, "plan", "alpha")
    assert code == 0
    assert "alpha           0.1.0 -> 0.1.1" in printed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (WAIVER.replace("alpha.first", "alpha.last"), "waives alpha.last: Parameter was removed, which is not broken"),
        (WAIVER.replace("Both names meant the same.", " "), "it is not right about: reason"),
        (WAIVER.replace("was removed", "went away"), "it is not right about: Parameter went away"),
        (WAIVER + "until = 2", "it is not right about: until"),
        ("[[waiver]", "it is not TOML"),
    ],
)
def test_a_waiver_that_is_not_right_is_refused(
    repository: Repository, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    break_first(repository)
    waive(repository, text)
    code, printed = called(repository, capsys, "compare", "alpha")
    assert code in (1, 2)
    assert told in printed


def test_modules_below_are_compared_too(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    below = repository.module("alpha").with_name("angles.py")
    private = repository.module("alpha").with_name("_angles.py")
    for path in (below, private):
        path.write_text(
            "def degrees(angle):\n    return angle\n\n\ndef radians(angle):\n    return angle\n", encoding="utf-8"
        )
    repository.commit()
    repository.git("tag", "-f", "alpha-v0.1.0")
    for path in (below, private):
        path.write_text("def degrees(angle):\n    return angle\n", encoding="utf-8")
    assert "alpha.angles.radians: Public object was removed" in called(repository, capsys, "compare", "alpha")[1]
    below.unlink()
    private.unlink()
    code, printed = called(repository, capsys, "compare", "alpha")
    assert code == 1
    assert "alpha.angles: Public object was removed" in printed
    assert "_angles" not in printed


def test_apply_writes_version_ranges_and_changelog(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    break_first(repository)
    waive(repository, WAIVER)
    code, printed = called(repository, capsys, "apply", "gamma", "alpha", "beta")
    assert code == 0
    assert repository.project("alpha")["version"] == "0.2.0"
    assert '__version__ = "0.2.0"' in repository.module("alpha").read_text(encoding="utf-8")
    assert repository.project("beta")["dependencies"] == ["alpha>=0.2,<0.3"]
    extras = repository.project("gamma")["optional-dependencies"]
    assert extras == {"testing": ["alpha[testing]>=0.1,<0.3", "gamma[testing]"]}
    assert "# A remark that a release leaves alone." in repository.file("gamma", "pyproject.toml").read_text("utf-8")
    changelog = repository.file("alpha", "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"## 0\.2\.0 \(\d{4}-\d\d-\d\d\)\n\n### What breaks\n\n- `first` has `otherwise`", changelog)
    told = repository.file("gamma", "CHANGELOG.md").read_text(encoding="utf-8")
    assert "### Requirements\n\n- Needs alpha>=0.1,<0.3." in told
    assert "another name" not in repository.file("beta", "CHANGELOG.md").read_text(encoding="utf-8")
    for package in LAYERS:
        assert [path.name for path in repository.file(package, "changes").iterdir()] == [".gitignore"]
    assert "git tag -a beta-v0.1.1 -m 'beta 0.1.1'" in printed
    assert "push" not in printed


def test_what_was_applied_waits_for_its_tag_and_then_rests(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    add_last(repository)
    code, printed = called(repository, capsys, "apply", "alpha", "beta")
    assert code == 0
    repository.commit()
    assert "0.1.1 waits for its tag alpha-v0.1.1" in called(repository, capsys, "plan")[1]
    repository.tag("alpha-v0.1.1", "beta-v0.1.1")
    code, printed = called(repository, capsys, "plan")
    assert code == 0
    assert [line.split()[1:] for line in printed.splitlines()] == [["0.1.1", "stays"]] * 2 + [["0.1.0", "stays"]]


def test_later_releases_stand_above_earlier_ones(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        repository.tell("gamma", f"change-{number}.fix", f"Change number {number}.")
        repository.commit()
        assert called(repository, capsys, "apply", "gamma")[0] == 0
        repository.commit()
        repository.tag(f"gamma-v0.1.{number}")
    changelog = repository.file("gamma", "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.findall(r"^# .*|## [\d.]+|Change number \d", changelog, re.MULTILINE)
    assert found == ["# Changelog of gamma", "## 0.1.2", "Change number 2", "## 0.1.1", "Change number 1"]


def test_an_unknown_package_is_refused_with_a_guess(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = called(repository, capsys, "apply", "alhpa")
    assert code == 2
    assert "did you mean alpha?" in printed


def test_files_that_are_not_committed_are_not_released(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.tell("alpha", "something.fix")
    code, printed = called(repository, capsys, "apply", "alpha")
    assert code == 2
    assert "not committed: ?? packages/alpha/changes/+something.fix.md" in printed


def test_without_a_fragment_there_is_nothing_to_release(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = called(repository, capsys, "apply", "alpha")
    assert code == 2
    assert "alpha: there is nothing to release" in printed


def test_a_change_that_no_fragment_tells_of_is_a_problem(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.replace(repository.module("alpha"), "return scale", "return 2 * scale")
    code, printed = called(repository, capsys, "plan")
    assert code == 1
    assert "1 files changed since 0.1.0 and no fragment says what for: packages/alpha/src/alpha/__init__.py" in printed


def test_a_package_is_not_released_before_the_one_it_needs(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    add_last(repository)
    code, printed = called(repository, capsys, "apply", "beta")
    assert code == 2
    assert "no release of alpha is enough: src/beta/__init__.py uses alpha.last" in printed


def test_a_package_is_not_released_past_the_ranges_above_it(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.tell("alpha", "all-new.breaking")
    repository.commit()
    code, printed = called(repository, capsys, "apply", "alpha")
    assert code == 2
    assert "beta requires alpha>=0.1,<0.2: release it in the same go" in printed


def test_a_version_below_its_tag_is_a_problem(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.tag("alpha-v0.3.0")
    code, printed = called(repository, capsys, "plan", "alpha")
    assert code == 1
    assert "its version is 0.1.0, but alpha-v0.3.0 exists already" in printed


def test_a_tag_that_names_no_version_is_refused(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.tag("alpha-version-two")
    code, printed = called(repository, capsys, "plan")
    assert code == 2
    assert "a tag names no version: Invalid version: 'ersion-two'" in printed


def test_packages_that_require_each_other_are_refused(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.replace(repository.file("alpha", "pyproject.toml"), "dependencies = []", 'dependencies = ["gamma"]')
    code, printed = called(repository, capsys, "plan")
    assert code == 2
    assert "packages require each other" in printed


def test_a_folder_without_packages_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["check"], tmp_path) == 2
    assert "there is no packages/*/pyproject.toml" in capsys.readouterr().err


def test_a_folder_that_is_no_checkout_is_refused(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    (repository.root / ".git").rename(repository.root / "elsewhere")
    code, printed = called(repository, capsys, "plan")
    assert code == 2
    assert "complete git checkout" in printed
