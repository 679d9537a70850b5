from __future__ import annotations

import dataclasses
import pickle

import pytest

from accel_plugins import Capabilities, Manifest
from accel_plugins.fsdp.manifest import FSDP1, FSDP2
from accel_plugins.xla.manifest import MANIFEST as XLA
from accel_state.errors import NotOffered, PluginError
from accel_state.plugins import plugins_of

GOOD = Manifest(name="example", strategy="example.strategy:ExampleStrategy")


@pytest.mark.parametrize("name", ["", "Upper", "with space", "9lives", "x" * 49])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(PluginError, match="lower-case"):
        Manifest(name=name, strategy="a:B")


@pytest.mark.parametrize("field", ["strategy", "config", "present"])
def test_a_target_that_leads_nowhere_is_refused(field: str) -> None:
    with pytest.raises(PluginError, match=field):
        dataclasses.replace(GOOD, **{field: "no_colon_here"})


@pytest.mark.parametrize("capability", [name for name, default in Capabilities()._asdict().items() if default])
def test_a_capability_that_a_backend_lacks_is_refused_in_three_parts(capability: str) -> None:
    GOOD.demand(capability)
    with pytest.raises(NotOffered, match="'example'") as caught:
        dataclasses.replace(GOOD, capabilities=Capabilities()._replace(**{capability: False})).demand(capability)
    assert caught.value.obstacle
    assert caught.value.remedy


@pytest.mark.parametrize("manifest", [FSDP1, FSDP2, XLA], ids=lambda manifest: manifest.name)
def test_a_backend_whose_steps_need_all_processes_joins_nothing(manifest: Manifest) -> None:
    with pytest.raises(NotOffered, match="join_uneven_inputs"):
        manifest.demand("join")


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "deepspeed", "xla"])
def test_a_manifest_travels_to_other_processes(name: str) -> None:
    (found,) = [found for found in plugins_of("accel.backends") if found.name == name]
    assert pickle.loads(pickle.dumps(found.load())) == found.load()


def test_a_backend_that_computes_gradients_in_forward_divides_them_itself() -> None:
    with pytest.raises(PluginError, match="own_accumulation"):
        dataclasses.replace(GOOD, capabilities=Capabilities(loss_in_forward=True))
    dataclasses.replace(GOOD, capabilities=Capabilities(loss_in_forward=True, own_accumulation=True))
