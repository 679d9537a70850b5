"""Names that exist only for older code."""

from __future__ import annotations

import pytest
from torch import nn

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_state.errors import Missing
from accel_state.settings.probe import importable
from accel_state.settings.schema import settings_of
from accelerate.utils import constants, imports, modeling


def test_the_lists_of_the_sharding_backend_are_those_that_it_takes() -> None:
    settings = settings_of(FullyShardedDataParallelPlugin)
    for name, listed in {
        "sharding_strategy": constants.FSDP_SHARDING_STRATEGY,
        "auto_wrap_policy": constants.FSDP_AUTO_WRAP_POLICY,
        "backward_prefetch": constants.FSDP_BACKWARD_PREFETCH,
        "state_dict_type": constants.FSDP_STATE_DICT_TYPE,
    }.items():
        assert [settings[name].kind.parse(choice) for choice in listed] == listed


def test_comparisons_by_their_sign() -> None:
    assert constants.STR_OPERATION_TO_FUNC[">="](2, 2)
    assert not constants.STR_OPERATION_TO_FUNC["!="](2, 2)


@pytest.mark.skipif(importable("deepspeed"), reason="DeepSpeed is installed")
def test_a_function_that_needs_deepspeed_names_the_install_line() -> None:
    @imports.deepspeed_required
    def shard() -> None:
        raise AssertionError("must not run")

    with pytest.raises(Missing, match=r"shard\(\) was called.*\n.*\n.*deepspeed"):
        shard()


def test_a_model_that_is_none_of_peft() -> None:
    assert modeling.is_peft_model(nn.Linear(2, 2)) is False
