"""Every name that client libraries import from the original, or replace in it, is there."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from accel_testing.processes import run_command

PROGRAM = Path(__file__).parent / "imported_names.py"
ORIGINAL = os.environ.get("ACCEL_ORIGINAL_PYTHON")
RELEASES = os.environ.get("ACCEL_CLIENT_RELEASES")

# Each with a name that it is sure to ask for.
CLIENTS = {
    "transformers": "accelerate.Accelerator",
    "trl": "accelerate.commands.launch.launch_command_parser",
    "peft": "accelerate.hooks.AlignDevicesHook",
    "diffusers": "accelerate.logging.get_logger",
    "datasets": None,
    "evaluate": None,
    "sentence-transformers": "accelerate.__version__",
    "optimum": "accelerate.load_checkpoint_and_dispatch",
    "compressed-tensors": "accelerate.hooks.AlignDevicesHook",
    "llmcompressor": "accelerate.accelerator.get_state_dict_offloaded_model",
    "lerobot": "accelerate.utils.set_seed",
    "gptqmodel": "accelerate.utils.find_tied_parameters",
}


def source_of(client: str) -> str:
    """The installed distribution, or the downloaded release."""
    try:
        return distribution(client).metadata["Name"]
    except PackageNotFoundError:
        releases = [*Path(RELEASES).glob(f"{client.replace('-', '_')}-*")] if RELEASES else []
        if not releases:
            pytest.skip(f"needs {client}: nox -s clients-names")
        return str(releases[0])


def looked_up(python: str, source: str) -> dict[str, bool]:
    """Whether each name resolves in an environment."""
    done = run_command([python, str(PROGRAM), source], timeout=500)
    assert done.returncode == 0, done.stderr
    lines = (line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 2)
    return {address: verdict == "yes" for address, verdict, _ in lines}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", CLIENTS)
def test_every_name_that_a_client_imports_is_there(client: str) -> None:
    source = source_of(client)
    ours = looked_up(sys.executable, source)
    expected = CLIENTS[client]
    assert expected is None or ours[expected]
    original = looked_up(ORIGINAL, source) if ORIGINAL else dict.fromkeys(ours, True)
    assert [address for address, there in ours.items() if original[address] and not there] == []
