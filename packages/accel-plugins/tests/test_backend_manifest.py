from __future__ import annotations

import dataclasses
import pickle

import pytest

from accel_plugins import Ability, Job, Manifest, Phase
from accel_plugins.fsdp.manifest import FSDP1, FSDP2
from accel_plugins.xla.manifest import MANIFEST as XLA
from accel_state.errors import NotOffered, PluginError
from accel_state.settings.extension import extensions

GOOD = Manifest(name="example", strategy="example.strategy:ExampleStrategy")


def test_jobs_have_a_usual_phase_that_a_manifest_may_change() -> None:
    other = dataclasses.replace(GOOD, phases={Job.AUTOCAST: Phase.AFTER})

    assert GOOD.phase(Job.AUTOCAST) is Phase.BEFORE
    assert GOOD.phase(Job.COMPILE) is Phase.AFTER
    assert other.phase(Job.AUTOCAST) is Phase.AFTER
    assert other.phase(Job.COMPILE) is Phase.AFTER


@pytest.mark.parametrize("name", ["", "Upper", "with space", "9lives", "x" * 49])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(PluginError, match="lower-case"):
        Manifest(name=name, strategy="a:B")


@pytest.mark.parametrize("field", ["strategy", "config", "present"])
def test_a_target_that_leads_nowhere_is_refused(field: str) -> None:
    with pytest.raises(PluginError, match=field):
        dataclasses.replace(GOOD, **{field: "no_colon_here"})


@pytest.mark.parametrize("ability", Ability)
def test_an_ability_that_a_backend_lacks_is_refused_in_three_parts(ability: Ability) -> None:
    GOOD.demand(ability)
    with pytest.raises(NotOffered, match="'example'") as caught:
        dataclasses.replace(GOOD, lacks=frozenset({ability})).demand(ability)
    assert caught.value.obstacle
    assert caught.value.remedy


@pytest.mark.parametrize("manifest", [FSDP1, FSDP2, XLA], ids=lambda manifest: manifest.name)
def test_a_backend_whose_steps_need_all_processes_joins_nothing(manifest: Manifest) -> None:
    with pytest.raises(NotOffered, match="join_uneven_inputs"):
        manifest.demand(Ability.JOIN)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "deepspeed", "megatron", "xla"])
def test_a_manifest_travels_to_other_processes(name: str) -> None:
    (found,) = [found for found in extensions("accel.backends") if found.name == name]
    assert pickle.loads(pickle.dumps(found.load())) == found.load()
