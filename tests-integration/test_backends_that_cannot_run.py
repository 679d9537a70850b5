"""Where a backend cannot run as asked, it runs all the same, or an error says why and what to use; never another one.

Each row is a way in which users ask: through the Accelerator or the variables that a launcher sets, on two processes.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accel_megatron.config import MegatronLMPlugin
from accel_plugins.deepspeed.config import DeepSpeedPlugin
from accel_state.errors import AccelError
from accel_state.settings.installed import importable
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig


class Asked(NamedTuple):
    """What a user asks for, and what is to come of it.

    Args:
        what: the case, in words.
        made: makes the arguments of the Accelerator.
        variables: what a launcher sets.
        runs: the `distributed_type` where it runs.
        refused: the error otherwise, and what its message names.
    """

    what: str
    made: str = "nothing"
    variables: dict[str, str] = {}  # noqa: RUF012 - never changed
    runs: str = ""
    refused: tuple[str, ...] = ()


ARGUMENTS = {
    "nothing": dict[str, Any],
    "fsdp": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
    "shard_grad_op": lambda: {
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="SHARD_GRAD_OP")
    },
    "deepspeed": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)},
    "deepspeed_fp16": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2), "mixed_precision": "fp16"},
    "megatron": lambda: {"megatron_lm_plugin": MegatronLMPlugin()},
    "cp": lambda: {"parallelism_config": ParallelismConfig(cp_size=2)},
    "te": lambda: {"mixed_precision": "fp8"},
    "xla": lambda: {"backend": "xla"},
}

NO_DEEPSPEED = ("Missing", "'deepspeed' is not installed", 'pip install "deepspeed>=')
NO_XLA = ("Missing", "'torch-xla' is not installed", 'pip install "torch-xla"')
NO_MEGATRON = ("Missing", "'megatron-core' is not installed", 'pip install "megatron-core>=')

CASES = [
    Asked("FSDP version 1 with cpu=True", "fsdp", runs="FSDP"),
    Asked("FSDP version 2 with cpu=True", "fsdp2", runs="FSDP"),
    Asked("FSDP by a launcher's variables", variables={"ACCELERATE_USE_FSDP": "true"}, runs="FSDP"),
    Asked("SHARD_GRAD_OP of FSDP version 1", "shard_grad_op", refused=("NotOffered", "wrong losses", "FULL_SHARD")),
    Asked("DeepSpeed with cpu=True", "deepspeed", refused=NO_DEEPSPEED),
    Asked("DeepSpeed in fp16", "deepspeed_fp16", refused=NO_DEEPSPEED),
    Asked("DeepSpeed by a variable", variables={"ACCELERATE_USE_DEEPSPEED": "true"}, refused=NO_DEEPSPEED),
    Asked("Megatron-LM with cpu=True", "megatron", refused=NO_MEGATRON),
    Asked("Megatron-LM by a variable", variables={"ACCELERATE_USE_MEGATRON_LM": "true"}, refused=NO_MEGATRON),
    Asked("context parallelism with cpu=True", "cp", runs="MULTI_CPU"),
    Asked(
        "XLA without torch_xla", "xla", refused=("Missing", "'torch-xla' is not installed", 'pip install "torch-xla"')
    ),
    Asked(
        "a backend that nobody brings", variables={"ACCEL_BACKEND": "horovod"}, refused=("SettingError", "Installed")
    ),
]


def trained(made: str, variables: dict[str, str]) -> tuple[str, str, float]:
    """Kind of error and message, or how the run calls itself and the loss of its last step."""
    os.environ.update(variables)
    try:
        accelerator = Accelerator(cpu=True, **ARGUMENTS[made]())
        model = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
        prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
        return "", str(accelerator.distributed_type.value), _last_loss(accelerator, *prepared)
    except AccelError as error:
        complete = bool(error.failure and error.obstacle and error.remedy)
        return type(error).__name__, str(error) if complete else f"a part is missing: {error}", 0.0


def _last_loss(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> float:
    loss = torch.zeros(())
    for (inputs,) in loader:
        loss = functional.mse_loss(model(inputs), torch.ones(len(inputs), 1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize("asked", CASES, ids=lambda asked: asked.what)
def test_it_runs_as_asked_or_says_why_not(two: Processes, asked: Asked) -> None:
    names = {"deepspeed": "deepspeed", "megatron-core": "megatron.core", "torch-xla": "torch_xla"}
    name = next((names[part.split("'")[1]] for part in asked.refused if part.endswith("is not installed")), "")
    if name and importable(name):
        pytest.skip(f"{name} is installed here, and its own session says what it does")
    for kind, said, loss in two.run(trained, asked.made, asked.variables):
        if asked.runs:
            assert (kind, said) == ("", asked.runs)
            assert 0.0 < loss < 1.0
        else:
            assert kind == asked.refused[0], said
            for part in asked.refused[1:]:
                assert part in said


def attended(causal: bool) -> float:
    """How far attention over a divided sequence is from that over the whole one."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 8, 4)
    expected = functional.scaled_dot_product_attention(whole, whole, whole, is_causal=causal)
    own = whole.clone()
    with accelerator.maybe_context_parallel([own], [2], {own}):
        mine = functional.scaled_dot_product_attention(own, own, own, is_causal=causal)
    begin = 4 * accelerator.process_index
    return float((mine - expected[:, :, begin : begin + 4]).abs().max())


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_a_divided_sequence_is_that_over_the_whole_one(two: Processes, causal: bool) -> None:
    assert max(two.run(attended, causal)) < 1e-5
