"""Plugins of installed packages: found without an import, loaded one by one, and one text for each thing that fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Toy
from typing import Any

import pytest

from accel_state.errors import AccelError, Missing, PluginError, SettingError
from accel_state.plugins import (
    Interface,
    LoadedPlugin,
    Plugin,
    PluginGroup,
    check_targets,
    contained,
    forget_plugins,
    plugins_of,
)

FAILED = "Cannot use the toy 'x'."
ESCAPE = "\x1b[2Jgone"

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with one plugin, and return the name of its module."""
    modules: list[str] = []

    def add(name: str, source: str = "", *, group: str = "accel.toys") -> str:
        module = f"toys_{len(modules)}"
        modules.append(module)
        folder = tmp_path / module
        (folder / f"{module}-1.2.dist-info").mkdir(parents=True)
        points = f"[console_scripts]\nx = y:z\n\n[{group}]\n# none = a:b\n{name} = {module}:TOY\n[accel.others]\n"
        (folder / f"{module}-1.2.dist-info" / "entry_points.txt").write_text(points, encoding="utf-8")
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(folder)
        return module

    yield add
    for module in modules:
        sys.modules.pop(module, None)


TOY = "from types import SimpleNamespace as Toy\nTOY = Toy(name='x', protocols=(2, 3), requires=())\n"


def toys(**interface: Any) -> PluginGroup[Any]:
    return PluginGroup("accel.toys", "toy", interface=Interface(**interface))


def loaded(group: PluginGroup[Any]) -> LoadedPlugin[Any]:
    (plugin,) = group.loaded()
    return plugin


def test_plugins_are_found_without_an_import(install: Install, tmp_path: Path) -> None:
    module = install("quick", "raise SystemExit")
    (tmp_path / module / "unrelated-1.0.dist-info").mkdir()
    (tmp_path / module / "unrelated-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\na = b:c\n")

    assert plugins_of("accel.toys") == (Plugin("accel.toys", "quick", f"{module}:TOY", "toys-0 1.2"),)
    assert toys().names() == ("quick",)
    assert module not in sys.modules


def test_names_that_control_a_terminal_are_escaped(install: Install) -> None:
    install(f"a{ESCAPE}")

    assert toys().names() == (r"a\x1b[2Jgone",)


def test_a_package_that_is_installed_later_is_found(install: Install, tmp_path: Path) -> None:
    module, group = install("x", "TOY = 3"), toys()
    info = tmp_path / module / "later-1.0.dist-info"
    assert [plugin.value for plugin in group.loaded()] == [3]
    info.mkdir()
    (info / "entry_points.txt").write_text(f"[accel.toys]\nlater = {module}:__name__\n")
    forget_plugins()

    assert [plugin.value for plugin in group.loaded()] == [module, 3]


def test_each_plugin_is_loaded_once(install: Install) -> None:
    group = toys(instance_of=Toy, called=True)
    install("x", "from types import SimpleNamespace as TOY")

    assert loaded(group).value is loaded(group).value
    assert group.find("x", FAILED).get(FAILED) is not loaded(group).value


BROKEN = {
    "raises": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "lacks it": ("", "AttributeError: module 'toys_0' has no attribute 'TOY'"),
    "exits": ("import sys\nsys.exit(7)", "ImportError: Its code tried to end this process with: sys.exit(7)"),
    "ends": ("raise SystemExit", "ImportError: Its code tried to end this process with: sys.exit(None)"),
    "interrupts": (
        "raise KeyboardInterrupt",
        "ImportError: Its code tried to end this process with: raise KeyboardInterrupt()",
    ),
    "speaks lines": ("raise OSError('one\\ntwo')", "OSError: one two"),
    "escapes": (f"raise OSError({ESCAPE!r})", r"OSError: \x1b[2Jgone"),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_listed_with_its_traceback_and_its_use_is_an_error(
    install: Install, source: str, reason: str
) -> None:
    install("x", source)
    broken = loaded(toys())

    assert (broken.value, broken.reason, broken.obstacle) == (None, reason, reason)
    assert broken.failure.startswith("Traceback (most recent call last):")
    assert broken.warning == f"The toy 'x' is ignored. toys_0:TOY of toys-0 1.2 could not be loaded: {reason}"
    for use in (broken.get, broken.usable):
        with pytest.raises(PluginError) as caught:
            use(FAILED)
        assert caught.value.__cause__ is broken.cause
        assert str(caught.value) == (
            f"{FAILED}\n  toys_0:TOY of toys-0 1.2 could not be loaded: {reason}\n  Repair, update or remove toys-0."
        )


def test_a_broken_plugin_affects_no_other_one(install: Install) -> None:
    install("broken", "1 / 0")
    install("x", "TOY = 3")

    assert [plugin.value for plugin in toys().loaded()] == [None, 3]
    assert toys().find("x", FAILED).get(FAILED) == 3


COMMAND = """
import sys
sys.path[:0] = sys.argv[1:]
from accel_state.plugins import Interface, PluginGroup, output_protected
print("before")
with output_protected():
    toys = PluginGroup("accel.toys", "toy", interface=Interface(called=True)).loaded()
print(toys[0].value)
"""


@pytest.mark.parametrize(
    ("source", "errors"),
    [
        ("import os\nos.write(1, b'hello')\ndef TOY(): print(' again'); return 1", "hello again\n"),
        ("import os\nos.close(1)\ndef TOY(): return 1", ""),
    ],
)
def test_what_a_plugin_writes_is_not_in_a_protected_output(install: Install, source: str, errors: str) -> None:
    install("x", source)
    finished = subprocess.run([sys.executable, "-c", COMMAND, *sys.path], capture_output=True, text=True, timeout=250)
    assert (finished.stdout, finished.stderr) == ("before\n1\n", errors)


def test_a_plugin_that_keeps_the_output_writes_to_it_later(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import sys\nprint('imported')\nKEPT = sys.stdout\ndef TOY(): KEPT.write('called')"
    install("x", source)
    loaded(toys()).value()

    assert capsys.readouterr() == ("imported\ncalled", "")


def test_handlers_of_the_program_are_called_and_kept() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    own = signal.getsignal(signal.SIGINT)
    try:
        with contained():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


UNFIT = {
    "instance": ({"instance_of": Toy}, "TOY = 3", "is a int, not a SimpleNamespace."),
    "class": ({"subclass_of": Exception}, "TOY = int", "is not a subclass of Exception."),
    "members": ({"members": ("imag", "run", "help")}, "TOY = 3", "has no run and no help."),
    "nothing": ({}, "TOY = None", "is None."),
    "name": (
        {"named": True},
        f"{TOY}TOY.name = 'y'",
        "has the name 'y', but its entry point has the name 'x'.",
    ),
    "version": (
        {"versions": (4, 4)},
        TOY,
        "supports versions 2 to 3 of the toy interface; this release supports version 4.",
    ),
    "older": (
        {"versions": (1, 1)},
        TOY,
        "supports versions 2 to 3 of the toy interface; this release supports version 1.",
    ),
}


@pytest.mark.parametrize(("interface", "source", "fault"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_the_interface_is_broken(
    install: Install, interface: dict[str, Any], source: str, fault: str
) -> None:
    install("x", source)
    unfit = loaded(toys(**interface))

    assert unfit.value is None
    assert unfit.failure == unfit.reason == unfit.fault == f"toys_0:TOY of toys-0 1.2 {fault}"
    with pytest.raises(PluginError) as caught:
        unfit.get(FAILED)
    assert str(caught.value) == f"{FAILED}\n  {unfit.failure}\n  Repair, update or remove toys-0."


@pytest.mark.parametrize("versions", [(1, 2), (2, 2), (3, 9), (1, 9)])
def test_versions_that_overlap_fit(install: Install, versions: tuple[int, int]) -> None:
    install("x", TOY)

    assert isinstance(loaded(toys(instance_of=Toy, versions=versions)).value, Toy)


def test_a_requirement_is_checked_when_the_plugin_is_used(install: Install) -> None:
    install("x", f"{TOY}from accel_state.settings.installed import Requirement\n"
                 "TOY.requires = (Requirement('json'), Requirement('no_such', install='toys[x]'))")  # fmt: skip
    needy = loaded(toys(instance_of=Toy))

    assert needy.get(FAILED) is needy.value
    assert needy.obstacle == "The package 'no_such' is not installed."
    assert isinstance(needy.with_settings("no_such:Settings").error(FAILED), Missing)
    with pytest.raises(Missing) as caught:
        needy.usable(FAILED)
    assert str(caught.value) == f"{FAILED}\n  The package 'no_such' is not installed.\n  Run: pip install \"toys[x]\""


def test_an_unknown_name_gets_the_most_similar_one(install: Install) -> None:
    install("quick")

    with pytest.raises(SettingError) as caught:
        toys().find("quik", FAILED)
    assert str(caught.value) == f"{FAILED}\n  Installed toys: quick.\n  Did you mean 'quick'?"
    with pytest.raises(SettingError) as caught:
        toys().find("x", FAILED, others=["auto"])
    remedy = "Use one of these, or install the package that provides it."
    assert str(caught.value) == f"{FAILED}\n  Installed toys: auto, quick.\n  {remedy}"
    with pytest.raises(SettingError, match=r"Installed toy boxes: none\."):
        PluginGroup[Any]("accel.none", "toy box", "toy boxes").find("x", FAILED)


def test_a_name_that_two_packages_provide_is_broken(install: Install) -> None:
    install("x")
    install("x")

    with pytest.raises(PluginError) as caught:
        toys().find("x", FAILED).get(FAILED)
    provided = "Several packages provide this toy: toys-1 1.2, toys-0 1.2."
    assert str(caught.value) == f"{FAILED}\n  {provided}\n  Uninstall all but one of them."
    assert [(plugin.value, plugin.reason) for plugin in toys().loaded()] == [(None, provided)] * 2
    assert {"toys_0", "toys_1"}.isdisjoint(sys.modules)


@pytest.mark.parametrize(("own", "package"), [("first", "accel-state"), ("last", "toys-0")])
def test_of_two_packages_with_one_name_ours_may_come_first_or_last(install: Install, own: str, package: str) -> None:
    install("cpu", group="accel.devices")
    group: PluginGroup[Any] = PluginGroup("accel.devices", "device family", "device families", own=own)

    assert [plugin.package for plugin in group.plugins() if plugin.name == "cpu"] == [package]
    assert "cuda" in group.names()


def test_built_in_plugins_need_no_metadata(install: Install) -> None:
    module = install("y", "TOY = 3")
    built_in = (Plugin("accel.toys", "x", "accel_state.errors:AccelError", "accel-state"),)
    group: PluginGroup[Any] = PluginGroup("accel.toys", "toy", built_in=built_in)

    assert group.names() == ("x", "y")
    assert group.find("x", FAILED).get(FAILED) is AccelError
    assert module not in sys.modules


def test_a_manifest_names_further_objects(install: Install) -> None:
    module, group = install("x", f"{TOY}class Settings: ..."), toys(instance_of=Toy)

    assert group.part("x", f"{module}:Settings").get(FAILED) is sys.modules[module].Settings
    with pytest.raises(PluginError, match=rf"{module}:Absent of toys-0 1\.2 could not be loaded: AttributeError"):
        group.part("x", f"{module}:Absent").get(FAILED)
    # The manifest of a test need not be installed.
    with pytest.raises(PluginError, match=r"Repair, update or remove no_such_toy\."):
        group.part("other", "no_such_toy.manifest:Toy").get(FAILED)


@pytest.mark.parametrize(
    ("target", "why"),
    [("Absent", "has no attribute 'Absent'"), ("Plain", "has no __dataclass_fields__"), ("TOY", "not a type")],
)
def test_a_manifest_without_its_settings_class_is_broken_but_described(install: Install, target: str, why: str) -> None:
    source = "from dataclasses import dataclass\nclass Plain: ...\n@dataclass\nclass Settings: ...\n"
    module = install("x", f"{TOY}{source}")
    toy = loaded(toys(instance_of=Toy))

    assert toy.with_settings("") is toy
    whole, broken = toy.with_settings(f"{module}:Settings"), toy.with_settings(f"{module}:{target}")
    assert (whole.value, whole.settings, whole.failure) == (toy.value, sys.modules[module].Settings, "")
    assert (broken.value, broken.settings, broken.with_settings(f"{module}:Settings")) == (toy.value, None, broken)
    with pytest.raises(PluginError, match=why):
        broken.get(FAILED)


@pytest.mark.parametrize("target", ["", "nowhere", "a:", ":B", "a b:C", "a:B.", "a..b:C", "a:B:C"])
def test_a_field_of_a_manifest_that_names_no_object_is_refused(target: str) -> None:
    with pytest.raises(PluginError) as caught:
        check_targets("toy", "x", {"box": target}, {})
    assert str(caught.value).splitlines()[0] == f"Cannot use box={target!r} in the manifest of the toy 'x'."
    if target:
        with pytest.raises(PluginError):
            check_targets("toy", "x", {}, {"box": target})


def test_fields_of_a_manifest_that_name_objects_or_are_empty_are_accepted() -> None:
    check_targets("toy", "x", {"box": "a.b:C", "lid": "a:B.c"}, {"config": "", "present": None, "wheel": "a:B"})
