"""Which backend owns the run, and what happens when one is broken, missing or wanted twice."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_plugins import Context, DistributedDataParallelKwargs, Manifest
from accel_plugins.precision import Precision
from accel_plugins.resolve import BACKENDS, build, choose, config_among
from accel_plugins.single.manifest import MANIFEST as SINGLE
from accel_state import PartialState, current
from accel_state.errors import Conflict, Missing, NotOffered, PluginError, SettingError
from accel_state.gradient import GradientState
from accel_testing.processes import Processes

pytestmark = pytest.mark.usefixtures("cpu_state")

Install = Callable[..., None]

SOURCE = """
from dataclasses import dataclass
from accel_plugins import Manifest, Strategy
from accel_state.settings.installed import Requirement

@dataclass
class Settings:
    backend_name: str = ""

class Example(Strategy):
    pass

def always(process): return True
def never(process): return False
def broken(process): return 1 / 0

MANIFEST = Manifest(name={name!r}, strategy="{module}:{strategy}", {fields})
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution that offers one backend."""
    made: list[str] = []

    def add(name: str, fields: str = "", strategy: str = "Example", source: str = "", entry: str = "MANIFEST") -> None:
        module = f"backend_{tmp_path.name}_{len(made)}".replace("-", "_")
        made.append(module)
        site = tmp_path / module
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text(f"[accel.backends]\n{name} = {module}:{entry}\n")
        text = source or SOURCE.format(name=name, module=module, strategy=strategy, fields=fields.format(module=module))
        (site / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))

    yield add
    for module in made:
        sys.modules.pop(module, None)


def manifest_of(name: str) -> Manifest:
    return BACKENDS.find(name, "").get("")


def context() -> Context:
    return Context(current.process(), GradientState(), Precision())


def test_the_built_in_backends_come_in_like_everybody_elses() -> None:
    found = {one.name: one for one in BACKENDS.loaded()}

    assert found["single"].value is SINGLE
    assert found["ddp"].obstacle == ""
    assert found["single"].plugin.package == "accel-plugins"


def test_a_process_that_runs_alone_gets_single_and_its_label() -> None:
    manifest = choose()

    assert manifest.name == "single"
    assert build(manifest, None, context()).shards().count == 1


def test_argument_before_settings_before_environment_before_presence(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("present", 'present="{module}:always", priority=5')
    install("configured", 'config="{module}:Settings"')
    install("named")
    settings = sys.modules[manifest_of("configured").config.partition(":")[0]].Settings()

    assert choose().name == "present"
    monkeypatch.setenv("ACCEL_BACKEND", "single")
    assert choose().name == "single"
    assert choose(config=settings).name == "configured"
    assert choose("named", settings).name == "named"


def test_what_is_absent_is_not_taken_however_high_its_priority(install: Install) -> None:
    install("absent", 'present="{module}:never", priority=99')

    assert choose().name == "single"


def test_a_tie_names_both_and_how_to_choose(install: Install) -> None:
    install("one", 'present="{module}:always", priority=7')
    install("two", 'present="{module}:always", priority=7')

    with pytest.raises(Conflict, match=r"'one'.*'two'") as caught:
        choose()
    assert "--backend" in caught.value.remedy


def test_a_misspelled_name_gets_a_suggestion() -> None:
    with pytest.raises(SettingError, match="'ddp'"):
        choose("dpp")


def test_the_environment_says_where_a_bad_name_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_BACKEND", "zzz")

    with pytest.raises(SettingError, match=r"\$ACCEL_BACKEND"):
        choose()


def test_a_broken_backend_breaks_nobody_else(install: Install) -> None:
    install("broken", source="import no_such_module_here")

    assert choose("single").name == "single"
    with pytest.warns(UserWarning, match="'broken' is ignored.*no_such_module_here"):
        assert choose().name == "single"
    with pytest.raises(PluginError, match="no_such_module_here"):
        choose("broken")


@pytest.mark.parametrize(
    ("fields", "entry", "sentence"),
    [
        ("protocol=9", "MANIFEST", "supports version 9 of the backend interface; this release supports version 3"),
        ("", "Settings", "not a Manifest"),
    ],
)
def test_what_does_not_fit_the_interface_is_refused_with_a_sentence(
    install: Install, fields: str, entry: str, sentence: str
) -> None:
    install("odd", fields, entry=entry)

    with pytest.raises(PluginError, match=sentence):
        choose("odd")


def test_a_probe_that_raises_takes_itself_out(install: Install) -> None:
    install("unsure", 'present="{module}:broken", priority=99')

    with pytest.warns(UserWarning, match="'unsure'.*ZeroDivisionError"):
        assert choose().name == "single"


def test_a_missing_package_is_told_with_the_install_line(install: Install) -> None:
    needs = 'present="{module}:always", priority=9, requires=(Requirement("no_such_package", install="x[y]"),)'
    install("needy", needs)

    with pytest.raises(Missing, match=r'pip install "x\[y\]"'):
        choose()


def test_settings_of_no_backend_are_refused() -> None:
    with pytest.raises(NotOffered, match="int"):
        choose(config=3)


def test_versions_that_share_settings_are_told_apart_by_them(install: Install) -> None:
    install("old", 'config="{module}:Settings"')
    owner = manifest_of("old")
    module = owner.config.partition(":")[0]
    install("new", source=f"from accel_plugins import Manifest\nMANIFEST = Manifest(name='new', strategy='a:B', "
            f"config={owner.config!r})")  # fmt: skip
    settings = sys.modules[module].Settings

    assert choose(config=settings("new")).name == "new"
    assert choose(config=settings("old")).name == "old"
    with pytest.raises(Conflict, match=r"'new'.*'old'"):
        choose(config=settings())


def test_building_checks_what_the_manifest_names(install: Install) -> None:
    install("empty", strategy="Settings")
    install("gone", strategy="NotThere")

    with pytest.raises(PluginError, match="not a subclass"):
        build(choose("empty"), None, context())
    with pytest.raises(PluginError, match="NotThere"):
        build(choose("gone"), None, context())
    with pytest.raises(Conflict, match="DistributedDataParallelKwargs"):
        build(choose("ddp"), 3, context())


def test_settings_of_a_backend_are_found_among_others() -> None:
    settings = DistributedDataParallelKwargs(static_graph=True)
    manifest = choose("ddp")

    assert config_among(manifest, [3, settings]) is settings
    assert config_among(manifest, [3]) is None
    assert config_among(dataclasses.replace(manifest, config=""), [3]) is None


# ------------------------------------------------------------------- several processes


def choose_by_rank(names: list[str | None]) -> tuple[str, str]:
    state = PartialState(cpu=True)
    try:
        chosen: Any = choose(names[state.process_index]).name
    except SettingError as error:
        chosen = str(error)
    # The group is usable afterwards, whatever came out.
    state.wait_for_everyone()
    return type(chosen).__name__, chosen


def test_several_processes_get_ddp(two: Processes) -> None:
    assert two.run(choose_by_rank, [None, None]) == [("str", "ddp")] * 2


def test_a_different_choice_is_the_same_error_on_every_process(two: Processes) -> None:
    first, second = two.run(choose_by_rank, ["ddp", "single"])

    assert first == second
    assert "process 0: ddp, process 1: single" in first[1]


def test_a_process_that_cannot_choose_does_not_leave_the_others_waiting(two: Processes) -> None:
    first, second = two.run(choose_by_rank, ["nonsense", "ddp"])

    assert "Cannot use the backend 'nonsense'" in first[1]
    assert "Process 0 failed: Installed backends" in second[1]
