"""Megatron-LM's released code, computing on the processor: models, divisions, checkpoints, and what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from accel_megatron.config import MegatronLMPlugin
from accel_state import PartialState, current
from accel_state.errors import NotOffered
from accel_state.settings.installed import importable
from accel_testing.fresh import fresh
from accel_testing.processes import Finished, Processes, run_command

pytestmark = [
    pytest.mark.skipif(not importable("megatron.core"), reason="needs megatron-core: nox -s engines-megatron"),
    pytest.mark.timeout(600),
    # It warns of everything that it would rather have installed, and is built with what torch gives up.
    pytest.mark.filterwarnings("ignore:.*(Apex|Transformer Engine|full scope).*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("preloaded_python"),
]
PRELOADED = ("accel_torch.accelerator",)

RUN = Path(__file__).parent / "megatron_run.py"
# Weights are drawn whole and then cut, and the vocabulary is padded alike, so that every division begins with the same.
ALIKE = {"use_cpu_initialization": True, "make_vocab_size_divisible_by": 64}


def launch(processes: int, **told: Any) -> Finished:
    import sys

    command = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone", str(RUN))
    return run_command([*command, json.dumps(told)], timeout=500, env={"OMP_NUM_THREADS": "1"})


def result(processes: int = 1, **told: Any) -> dict[str, Any]:
    done = launch(processes, **told)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr
    assert lines, done.stdout
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


@functools.cache
def expected(divisible: int = 128) -> dict[str, Any]:
    """One process with batches of four."""
    alike = {"use_cpu_initialization": True, "make_vocab_size_divisible_by": divisible}
    return result(plugin={"other_megatron_args": alike})


def test_the_engine_stands_for_the_model_and_learns() -> None:
    done = expected()
    assert (done["model"], done["inner"], done["type"]) == ("MegatronEngine", "GPTModel", "MEGATRON_LM")
    assert done["losses"][-1] < 0.8 * done["losses"][0]
    assert (done["steps"], done["global_batch_size"], done["skipped"]) == (16, 4, 0)


def test_the_schedule_rises_and_falls() -> None:
    rates = expected()["rates"]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[-1] == pytest.approx(0.008)


def test_micro_batches_add_up_to_the_batch_and_logits_come_back() -> None:
    plugin = {
        "num_micro_batches": 2,
        "return_logits": True,
        "other_megatron_args": {**ALIKE, "make_vocab_size_divisible_by": 128},
    }
    done = result(plugin=plugin, batch=2)
    assert done["losses"] == pytest.approx(expected()["losses"], abs=1e-4)
    assert done["logits"] == [4, 16, 60]
    assert done["shapes"] == [[4, 16]]


def test_a_tensor_is_divided_without_changing_the_losses() -> None:
    done = result(2, plugin={"tp_degree": 2, "other_megatron_args": ALIKE})
    assert done["losses"] == pytest.approx(expected()["losses"], abs=1e-3)


def test_processes_with_other_samples_average_their_gradients() -> None:
    told = {"plugin": {"other_megatron_args": {"use_cpu_initialization": True}}, "batch": 2, "torch_schedule": True}
    alone = result(1, **{**told, "batch": 4, "stretch": 2})
    for distributed in (False, True):
        done = result(2, **{**told, "plugin": {**told["plugin"], "use_distributed_optimizer": distributed}})
        assert done["losses"] == pytest.approx(alone["losses"], abs=1e-3)
        assert done["norms"] == pytest.approx(alone["norms"], abs=1e-3)


def test_a_checkpoint_is_read_in_the_same_and_in_other_divisions(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    plugin = {"num_micro_batches": 2, "other_megatron_args": ALIKE | {"make_vocab_size_divisible_by": 128}}
    whole = result(plugin=plugin, batch=2, save=saved)
    again = result(plugin=plugin, batch=2, load=saved)
    assert again["losses"] == whole["losses"][8:]
    assert (again["rates"], again["steps"]) == (whole["rates"][8:], 16)
    stages = result(2, plugin={**plugin, "pp_degree": 2}, batch=2, load=saved)
    assert stages["losses"] == pytest.approx(whole["losses"][8:], abs=1e-3)


def test_divided_optimizer_states_that_could_not_be_read_again_are_not_written(tmp_path: Path) -> None:
    done = launch(2, plugin={"use_distributed_optimizer": True}, batch=2, save=str(tmp_path / "saved"))
    assert done.returncode != 0
    assert "cannot load its sharded states again" in done.stderr


def test_a_pipeline_whose_stages_have_several_parts_trains() -> None:
    plugin = {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 2}
    done = result(2, plugin={**plugin, "other_megatron_args": {"num_layers": 4}}, batch=2)
    assert done["losses"][-1] < 0.8 * done["losses"][0]


@pytest.mark.parametrize(
    ("kind", "classify", "inner"),
    [("llama", False, "GPTModel"), ("megatron-bert", False, "BertModel"), ("megatron-bert", True, "BertModel")],
)
def test_other_models_learn(kind: str, classify: bool, inner: str) -> None:
    done = result(kind=kind, classify=classify)
    assert done["losses"][-1] < 0.9 * done["losses"][0]
    assert (done["inner"], done["logits"]) == (inner, [4, 2] if classify else None)


def test_an_encoder_with_a_decoder_learns_on_two_processes() -> None:
    done = result(2, kind="t5", plugin={"tp_degree": 2})
    assert done["losses"][-1] < 0.95 * done["losses"][0]
    assert done["inner"] == "T5Model"


def test_megatrons_own_data_reach_every_process_once(tmp_path: Path) -> None:
    plugin = {"eval_iters": 1, "seq_length": 16, "num_micro_batches": 2}
    done = result(2, corpus=str(tmp_path / "words"), batch=2, plugin=plugin)
    assert done["losses"][-1] < 0.8 * done["losses"][0]
    assert (done["shape"], done["consumed"]) == ([4, 16], [96, 0, 0])
    assert len(done["seen"]) == 96
    assert done["seen"][:48] != done["seen"][48:]


def test_bf16_and_fp16_train() -> None:
    alike = {"use_cpu_initialization": True}
    assert result(precision="bf16", plugin={"other_megatron_args": alike})["losses"] == pytest.approx(
        expected()["losses"], abs=0.05
    )
    scaled = result(precision="fp16", plugin={"other_megatron_args": {**alike, "initial_loss_scale": 1024}})
    assert scaled["losses"] == pytest.approx(expected()["losses"], abs=0.05)


def test_steps_that_overflow_are_skipped_and_the_schedule_waits() -> None:
    done = result(precision="fp16")
    assert done["skipped"] == 16
    assert set(done["rates"]) == {0.0}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"plugin": {"other_megatron_args": {"hiden_size": 3}}}, "Did you mean 'hidden_size'"),
        ({"plugin": {"tp_degree": 3}}, "One model needs 3 processes"),
        ({"accumulation": 2}, "num_micro_batches=2"),
        ({"load": "/no/such/checkpoint"}, "checkpoint"),
    ],
)
def test_what_cannot_run_is_refused_with_a_reason(told: dict[str, Any], said: str) -> None:
    done = launch(1, **told)
    assert done.returncode != 0
    assert said in done.stderr


# ---------------------------------------------------------------------------- the state, without anything simulated


def groups(tensors: int, stages: int) -> tuple[int, int, int, list[float], int]:
    """Where this process stands, what its group sums to, and how many weights its part of a model has."""
    import warnings

    import torch

    warnings.simplefilter("ignore", UserWarning)
    from accel_megatron import building, parallel
    from accel_megatron.parallel import parallel_state

    PartialState(cpu=True)
    plugin = MegatronLMPlugin(tp_degree=tensors, pp_degree=stages, other_megatron_args={"use_cpu_initialization": True})
    plugin.megatron_lm_default_args.update(
        model_type_name="gpt",
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=60,
        max_position_embeddings=16,
        share_embeddings_and_output_weights=False,
    )
    plugin.set_mixed_precision("no")
    parallel.create_groups(plugin)
    parallel.create_groups(plugin)
    try:
        rank = current.process().rank
        mean = parallel.avg_losses_across_data_parallel_group([torch.tensor(float(rank)), torch.tensor(4.0)])
        rows = parallel.gather_across_data_parallel_groups({"rows": torch.full((1, 2), rank)})["rows"]
        part = building._part(plugin, building.transformer_config(plugin), 0)
        weights = sum(parameter.numel() for parameter in part.parameters())
        place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        return (*place, len(rows), mean.tolist(), weights)
    finally:
        parallel_state.destroy_model_parallel()


def test_groups_and_models_are_made_on_gloo(two: Processes) -> None:
    assert [found[:4] for found in two.run(groups, 1, 1, timeout=180)] == [(0, 0, 2, [0.5, 4.0])] * 2
    divided = two.run(groups, 2, 1)
    assert [found[:4] for found in divided] == [(0, 0, 1, [0.0, 4.0]), (1, 0, 1, [1.0, 4.0])]
    assert divided[0][4] == divided[1][4]
    stages = two.run(groups, 1, 2)
    assert [found[:2] for found in stages] == [(0, 0), (0, 1)]


def test_without_cuda_it_refuses_before_anything_is_built() -> None:
    from accel_torch import Accelerator

    with fresh(), pytest.raises(NotOffered, match="only CUDA devices"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
