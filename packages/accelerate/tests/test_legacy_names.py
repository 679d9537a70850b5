"""Names that exist only for older code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_state.errors import Missing, UnknownKind
from accel_state.settings.installed import importable
from accel_state.settings.schema import settings_of
from accelerate import tracking
from accelerate.utils import constants, imports, modeling, operations


def test_the_lists_of_the_sharding_backend_are_those_that_it_takes() -> None:
    settings = settings_of(FullyShardedDataParallelPlugin)
    for name, listed in {
        "sharding_strategy": constants.FSDP_SHARDING_STRATEGY,
        "auto_wrap_policy": constants.FSDP_AUTO_WRAP_POLICY,
        "backward_prefetch": constants.FSDP_BACKWARD_PREFETCH,
        "state_dict_type": constants.FSDP_STATE_DICT_TYPE,
    }.items():
        assert [settings[name].type.parse(choice) for choice in listed] == listed


def test_comparisons_by_their_sign() -> None:
    assert constants.STR_OPERATION_TO_FUNC[">="](2, 2)
    assert not constants.STR_OPERATION_TO_FUNC["!="](2, 2)


@pytest.mark.skipif(importable("deepspeed"), reason="DeepSpeed is installed")
def test_a_function_that_needs_deepspeed_names_the_install_line() -> None:
    @imports.deepspeed_required
    def shard() -> None:
        raise AssertionError("must not run")

    with pytest.raises(Missing, match=r"(?s)Cannot call .*shard\(\)\..*deepspeed.*pip install"):
        shard()


def test_texts_of_errors_that_callers_compare() -> None:
    with pytest.raises(TypeError) as caught:
        operations.recursively_apply(torch.relu, [torch.ones(1), 3], error_on_other_type=True)
    assert str(caught.value) == (
        "Unsupported types (<class 'int'>) passed to `relu`. Only nested list/tuple/dicts of objects that are valid "
        "for `is_torch_tensor` should be passed."
    )
    assert operations.recursively_apply(torch.relu, [torch.ones(1), 3]) == [torch.ones(1), 3]
    model = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(ValueError) as refused:
        modeling.set_module_tensor_to_device(model, "0.weight", "cpu", torch.zeros(2, 2))
    assert str(refused.value) == (
        'Trying to set a tensor of shape torch.Size([2, 2]) in "weight" (which has shape torch.Size([4, 3])), '
        "this looks incorrect."
    )
    modeling.set_module_tensor_to_device(model, "0.weight", "cpu", torch.zeros(4, 3), dtype="float16")
    assert model[0].weight.dtype is torch.float16


def test_an_error_of_the_applied_function_comes_through() -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise UnknownKind("mine")

    for strict in (False, True):
        with pytest.raises(UnknownKind, match=r"^mine$"):
            operations.recursively_apply(refuse, [torch.ones(1)], error_on_other_type=strict)


def test_the_table_of_trackers_is_emptied_and_filled_again() -> None:
    before = dict(tracking.LOGGER_TYPE_TO_CLASS)
    try:
        tracking.LOGGER_TYPE_TO_CLASS.clear()
        assert dict(tracking.LOGGER_TYPE_TO_CLASS) == {}
        with pytest.raises(ValueError, match="tensorboard"):
            tracking.filter_trackers("tensorboard", "logs")
        with pytest.raises(KeyError, match="tensorboard"):
            del tracking.LOGGER_TYPE_TO_CLASS["tensorboard"]
    finally:
        tracking.LOGGER_TYPE_TO_CLASS.update(before)
    assert dict(tracking.LOGGER_TYPE_TO_CLASS) == before


def test_a_model_that_is_none_of_peft() -> None:
    assert modeling.is_peft_model(nn.Linear(2, 2)) is False
