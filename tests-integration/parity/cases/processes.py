"""What a process knows of itself, and who does what."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState


def who() -> Any:
    accelerator = Accelerator(cpu=True)
    numbers = [accelerator.num_processes, accelerator.process_index, accelerator.local_process_index]
    places = [accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process]
    return [*numbers, *places, accelerator.use_distributed, accelerator.multi_device, str(accelerator.device)]


def kind_of_run() -> Any:
    accelerator = Accelerator(cpu=True)
    return [str(accelerator.distributed_type), accelerator.state.backend, accelerator.mixed_precision]


def defaults() -> Any:
    accelerator = Accelerator(cpu=True)
    loaders = [accelerator.split_batches, accelerator.dispatch_batches, accelerator.even_batches]
    more = [accelerator.use_seedable_sampler, accelerator.non_blocking, accelerator.use_stateful_dataloader]
    paths = [accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration, accelerator.log_with]
    rest = [accelerator.rng_types, accelerator.step, accelerator.sync_gradients, accelerator.should_save_model]
    meshes = [accelerator.is_fsdp2, accelerator.torch_device_mesh, accelerator.parallelism_config]
    views = [accelerator.scaler, accelerator.optimizer_step_was_skipped, accelerator.trackers, accelerator.native_amp]
    return [*loaders, *more, *paths, *rest, *meshes, *views]


def decorated() -> Any:
    accelerator = Accelerator(cpu=True)
    last = accelerator.num_processes - 1
    wrap = [
        accelerator.on_main_process,
        accelerator.on_local_main_process,
        accelerator.on_last_process,
        accelerator.on_process(process_index=last),
        accelerator.on_local_process(local_process_index=0),
    ]
    return [decorate(lambda: "ran")() for decorate in wrap]


def decorated_by_the_state() -> Any:
    state = PartialState(cpu=True)
    return [state.on_main_process(lambda: 1)(), state.on_process(lambda: 2, process_index=0)()]


def printed() -> Any:
    accelerator = Accelerator(cpu=True)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        accelerator.print("one", "two", sep="-")
    return text.getvalue()


def in_turn() -> Any:
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        first = accelerator.process_index
    with accelerator.local_main_process_first():
        pass
    accelerator.wait_for_everyone()
    return first


def flags() -> Any:
    accelerator = Accelerator(cpu=True)
    before = accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [before, accelerator.check_trigger(), accelerator.check_trigger()]


def another_precision_for_the_second() -> Any:
    Accelerator(cpu=True)
    return Accelerator(cpu=True, mixed_precision="bf16").mixed_precision


def another_number_of_steps_for_the_second() -> Any:
    Accelerator(cpu=True, gradient_accumulation_steps=2)
    return Accelerator(cpu=True, gradient_accumulation_steps=3).gradient_accumulation_steps


def an_unknown_precision() -> Any:
    return Accelerator(cpu=True, mixed_precision="fp7")


def precision_as_variable() -> Any:
    import os

    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    return Accelerator(cpu=True).mixed_precision


def shared_states() -> Any:
    Accelerator(cpu=True)
    known = PartialState._shared_state
    states = [PartialState().initialized, AcceleratorState().initialized, GradientState().initialized]
    return [known["num_processes"], known["process_index"], bool(AcceleratorState._shared_state), *states]


def states_of_an_accelerator() -> Any:
    accelerator = Accelerator(cpu=True)
    kinds = [type(accelerator.state).__name__, type(accelerator.gradient_state).__name__]
    return [*kinds, accelerator.state.deepspeed_plugin, accelerator.state.is_fsdp2]


def ranks_without_axes() -> Any:
    return Accelerator(cpu=True).tensor_parallel_rank


def rank_in_a_pipeline() -> Any:
    return Accelerator(cpu=True).pipeline_parallel_rank


def two_ways_to_say_steps() -> Any:
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2)
    return Accelerator(cpu=True, gradient_accumulation_steps=3, gradient_accumulation_plugin=plugin)


def an_unknown_tracker() -> Any:
    return Accelerator(cpu=True, log_with="no such tracker").log_with


def a_tracker_that_was_not_started() -> Any:
    return type(Accelerator(cpu=True).get_tracker("tensorboard")).__name__
