"""Settings, plans and refusals, which need neither torch nor torchft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import Conflict, Missing, SettingError
from accel_state.settings.installed import Requirement
from accel_testing.launchers import prepare_launch
from accel_torchft import TorchFTConfig
from accel_torchft.launcher import ReplicaGroups
from accel_torchft.manifest import MANIFESTS, TORCHFT


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script to launch, in the current folder."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["timeout", "quorum_timeout", "heartbeat_timeout", "join_timeout"])
def test_a_time_has_to_be_positive(name: str) -> None:
    with pytest.raises(SettingError, match=name):
        TorchFTConfig(**{name: 0.0})


def test_more_replicas_cannot_be_needed_than_there_are() -> None:
    with pytest.raises(Conflict, match="min_replicas=3"):
        TorchFTConfig(replica_groups=2, min_replicas=3)


@pytest.mark.parametrize("backend", ["torchft", "torchft-fsdp2"])
def test_the_backend_calls_for_the_launcher(backend: str) -> None:
    words = ["--backend", backend, "--cpu", "--num_processes=2", "--replica_groups=3", "train.py", "--lr", "1"]
    launcher, plan = prepare_launch(words, {})
    assert isinstance(launcher, ReplicaGroups)
    assert plan.launcher == "torchft"
    assert plan.processes == 6
    assert plan.argv[-3:] == ("train.py", "--lr", "1")
    assert "--launcher=local" in plan.argv
    assert plan.environment["ACCEL_TORCHFT_HOST"] == "127.0.0.1"


def test_another_backend_does_not_call_for_it() -> None:
    launcher, _ = prepare_launch(["--cpu", "train.py"], {})
    assert not isinstance(launcher, ReplicaGroups)


def test_a_lighthouse_that_runs_already_is_passed_on() -> None:
    address = "http://node0:29510"
    _, plan = prepare_launch(["--backend=torchft", "--torchft_lighthouse", address, "train.py"], {})
    assert plan.environment == {"TORCHFT_LIGHTHOUSE": address}
    assert not any("lighthouse" in word for word in plan.argv)


@pytest.mark.parametrize(
    ("options", "environ", "shown"),
    [
        (["--gpu_ids=4,5,6,7"], {}, {0: "4,5", 1: "6,7"}),
        (["--gpu_ids=4,5,6,7", "--torchft_replicas=2,3"], {}, {2: "4,5", 3: "6,7"}),
        (["--gpu_ids=4,5,6,7", "--num_processes=1"], {}, {0: "4", 1: "5"}),
        ([], {"CUDA_VISIBLE_DEVICES": "1,3"}, {0: "1", 1: "3"}),
        (["--cpu"], {"CUDA_VISIBLE_DEVICES": "1,3"}, {}),
    ],
)
def test_each_replica_sees_devices_of_its_own(
    options: list[str], environ: dict[str, str], shown: dict[int, str]
) -> None:
    groups = "--replica_groups=4" if any("replicas" in option for option in options) else "--replica_groups=2"
    _, plan = prepare_launch(["--backend=torchft-fsdp2", groups, *options, "train.py"], environ)
    assert {number: own["CUDA_VISIBLE_DEVICES"] for number, own in plan.details.devices.items()} == shown
    assert not any("gpu_ids" in word for word in plan.argv)


def test_more_processes_than_devices_are_refused() -> None:
    words = ["--backend=torchft", "--gpu_ids=0,1", "--num_processes=1", "--replica_groups=3", "train.py"]
    with pytest.raises(SettingError, match="there are 2: 0, 1"):
        prepare_launch(words, {})


@pytest.mark.parametrize("backend", ["torchft-diloco", "torchft-fsdp2-local-sgd"])
def test_a_round_of_local_steps_has_the_time_of_its_steps(backend: str) -> None:
    words = [f"--backend={backend}", "--cpu", "--torchft_sync_every=50", "--torchft_join_timeout=2", "train.py"]
    assert prepare_launch(words, {})[1].details.join_timeout == 100
    assert prepare_launch(["--backend=torchft", *words[1:]], {})[1].details.join_timeout == 2


@pytest.mark.parametrize(
    ("changed", "name"), [({"outer_lr": 0.0}, "outer_lr"), ({"outer_momentum": 1.0}, "outer_momentum")]
)
def test_an_outer_optimizer_needs_sensible_settings(changed: dict[str, float], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        TorchFTConfig(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "backend"), [("ddp", "torchft"), ("local_sgd", "torchft-local-sgd"), ("diloco", "torchft-diloco")]
)
def test_settings_as_an_object_say_their_backend(mode: str, backend: str) -> None:
    assert TorchFTConfig(mode=mode).backend_name == backend
    with pytest.raises(SettingError, match="mode='sgd'"):
        TorchFTConfig(mode="sgd")


def test_torchft_that_is_missing_is_refused_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_state.settings.installed.importable", lambda module: False)
    for backend in MANIFESTS.values():
        (needed,) = backend.requires
        assert isinstance(needed, Requirement)
        with pytest.raises(Missing, match="pip install"):
            needed.demand("Cannot train.")


def test_torchft_of_another_version_is_refused_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"torchft": "0.1.1"}
    monkeypatch.setattr("accel_state.settings.installed.importable", lambda module: True)
    monkeypatch.setattr("accel_state.settings.installed.installed_version", found.get)
    (needed,) = TORCHFT.requires
    assert isinstance(needed, Requirement)
    with pytest.raises(Missing, match=r"torchft 0\.1\.1 is installed; >=0\.2 is needed"):
        needed.demand("Cannot train.")
