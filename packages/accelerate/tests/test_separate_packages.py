"""Names of accel-megatron can be imported without it, and say which package they need when they are used."""

from __future__ import annotations

import sys

from accel_state.errors import Missing
from accel_testing.processes import run_command

SCRIPT = """
import sys


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "accel_megatron":
            raise ModuleNotFoundError(f"No module named {name!r}", name="accel_megatron")


sys.meta_path.insert(0, NotInstalled())

from accelerate.utils import MODEL_CONFIGS_TO_MEGATRON_PARSERS, GPTTrainStep, MegatronLMPlugin, megatron_lm_initialize
from accelerate.utils.megatron_lm import MegatronEngine, prepare_data_loader

assert not isinstance(object(), MegatronLMPlugin)
assert MegatronLMPlugin.__name__ == "MegatronLMPlugin"


def subclass():
    class Step(GPTTrainStep):
        pass


for use in (
    MegatronLMPlugin,
    lambda: megatron_lm_initialize(None, args_defaults={}),
    lambda: MegatronEngine.anything,
    lambda: MODEL_CONFIGS_TO_MEGATRON_PARSERS["gpt2"],
    lambda: prepare_data_loader(None, None),
    subclass,
):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, str(error).count("'accel-megatron', which is not installed"), error.remedy[:22])
    else:
        print("no error")
"""


def test_names_can_be_imported_and_name_the_package_when_used() -> None:
    finished = run_command([sys.executable, "-c", SCRIPT])
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ["Missing 1 Install accel-megatron"] * 6


def test_with_the_package_the_names_are_its_own() -> None:
    from accel_megatron.config import MegatronLMPlugin
    from accelerate.utils import MegatronLMPlugin as Old

    assert Old is MegatronLMPlugin


def test_an_error_is_an_import_error_for_scripts_that_catch_it() -> None:
    assert issubclass(Missing, ImportError)
