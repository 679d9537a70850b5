"""`accel estimate-memory --training`: the memory of a rank under each plan, before the launch."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_state.errors import SettingError

if TYPE_CHECKING:
    from accel_torch.training_memory.plans import TrainingPlan

__all__ = ("ESTIMATE", "TrainingMemory")


class TrainingMemory:
    """The part of the command for `--training`; the entry point `accel.memory`."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options that apply with --training."""
        group = parser.add_argument_group("with --training")
        group.add_argument("--processes", type=int, default=1, help="Processes of the plans (default: 1).")
        group.add_argument("--memory", type=_size, metavar="SIZE", help="Memory of a device, such as 80GiB.")
        group.add_argument("--global-batch", type=int, help="Samples of one step on all processes.")
        group.add_argument("--precision", choices=("no", "fp16", "bf16"), default="no", help="Mixed precision.")
        group.add_argument("--optimizer", default="AdamW", help="Class of torch.optim (default: AdamW).")
        group.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Device type (default: cuda).")
        group.add_argument(
            "--batch-size", type=int, default=8, help="Samples of a batch, for a model config (default: 8)."
        )
        group.add_argument(
            "--sequence-length", type=int, default=512, help="Tokens of a sample, for a model config (default: 512)."
        )
        group.add_argument("--rank", type=int, default=0, help="Rank whose memory is estimated (default: 0).")
        group.add_argument(
            "--script_arguments", default="", metavar="ARGUMENTS", help="Arguments of a script, as one quoted text."
        )
        group.add_argument("--json", action="store_true", help="Print the estimates as one line of JSON.")
        group.add_argument("--picture", metavar="FILE.svg", help="Write the bars to this file, as SVG.")

    def run(self, arguments: Namespace, options: Mapping[str, Any]) -> int:
        """Estimate the plans and print them; the exit code is 1 if no plan fits.

        Args:
            arguments: the arguments of the command.
            options: options for the function that creates the model.

        Raises:
            SettingError: the model cannot be built or needs the values of tensors, or a number is below 1.
        """
        from accel_torch.training_memory.comparison import compare_plans, read_facts
        from accel_torch.training_memory.report import as_json, as_text, draw_svg
        from accel_torch.training_memory.script import compare_plans_of_script
        from accel_torch.training_memory.sources import training_case
        from accel_torch.training_memory.trial import measure_plan

        numbers = (arguments.processes, arguments.batch_size, arguments.sequence_length, arguments.global_batch or 1)
        if min(numbers) < 1:
            raise SettingError(
                "Cannot estimate the memory of a step with a number below 1.",
                "The numbers of processes, samples and tokens must be at least 1.",
                "Give numbers of at least 1.",
            )
        if not 0 <= arguments.rank < arguments.processes:
            raise SettingError(
                f"Cannot estimate the memory of rank {arguments.rank}.",
                f"{arguments.processes} processes have the ranks 0 to {arguments.processes - 1}.",
                "Give one of them.",
            )
        compare = partial(
            compare_plans,
            processes=arguments.processes,
            memory=arguments.memory,
            global_batch=arguments.global_batch,
            mixed_precision=arguments.precision,
            device=arguments.device,
            progress=_show if sys.stderr.isatty() and not arguments.json else None,
        )
        script = "train.py"
        if arguments.model_name.endswith(".py"):
            words = shlex.split(arguments.script_arguments)
            found = compare_plans_of_script(arguments.model_name, words, compare, arguments.precision, arguments.rank)
            script = shlex.join([arguments.model_name, *words])
        else:
            case = training_case(
                arguments.model_name, options, arguments.optimizer, arguments.batch_size, arguments.sequence_length
            )
            found = compare(read_facts(case), partial(measure_plan, case, rank=arguments.rank))
        if arguments.picture:
            try:
                draw_svg(arguments.picture, found)
            except OSError as error:
                raise SettingError(
                    f"Cannot write the picture {arguments.picture}.",
                    f"The system cannot write it: {error}.",
                    "Name another file.",
                ) from None
        write = as_json if arguments.json else as_text
        print(write(found, script))  # noqa: T201 - what the command is for
        return 0 if any(one.fits for one in found.estimates) else 1


def _show(plan: TrainingPlan) -> None:
    print(f"{plan.name}, micro-batch {plan.micro_batch}", file=sys.stderr)  # noqa: T201 - progress of the command


def _size(text: str) -> int:
    from accel_bigmodel.sizes import convert_file_size_to_int

    try:
        return convert_file_size_to_int(text)
    except SettingError as error:
        raise ArgumentTypeError(str(error)) from None


ESTIMATE = TrainingMemory()
