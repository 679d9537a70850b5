"""`accel estimate-memory --training`: `check-plan` by another name, also for a model without a script."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accel_check.check_plan import add_options, run_with
from accel_check.launch import add_launch_options
from accel_check.runs import CheckedScript
from accel_state.errors import SettingError

__all__ = ("ESTIMATE", "TrainingMemory")

_TRAIN_MODEL_SCRIPT: Final = str(Path(__file__).with_name("train_model.py"))


class TrainingMemory:
    """The part of the command for `--training`; the entry point `accel.memory`."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options that apply with --training."""
        group = parser.add_argument_group("with --training, as `accel check-plan`")
        add_options(group)
        add_launch_options(group)
        group.add_argument("--optimizer", default="AdamW", help="Class of torch.optim, for a model (default: AdamW).")
        group.add_argument(
            "--batch-size", type=int, default=8, help="Samples of a batch, for a model config (default: 8)."
        )
        group.add_argument(
            "--sequence-length", type=int, default=512, help="Tokens of a sample, for a model config (default: 512)."
        )
        group.add_argument(
            "--script_arguments", default="", metavar="ARGUMENTS", help="Arguments of a script, as one quoted text."
        )

    def run(self, arguments: Namespace, options: Mapping[str, Any]) -> int:
        """Check the plan of training and print it; the exit code is that of `accel check-plan`.

        Args:
            arguments: the arguments of the command.
            options: options for the function that creates the model.

        Raises:
            SettingError: there is no such script or model, or a number is below 1.
        """
        source = arguments.model_name
        if source.endswith(".py"):
            return run_with(arguments, CheckedScript(source, shlex.split(arguments.script_arguments)))
        if min(arguments.batch_size, arguments.sequence_length) < 1:
            raise SettingError(
                "Cannot estimate the memory of a step with a number below 1.",
                "The numbers of samples and tokens must be at least 1.",
                "Give numbers of at least 1.",
            )
        if ":" not in source and not Path(source).exists():
            raise SettingError(
                f"Cannot estimate the memory of training {source!r}.",
                "There is no such file or folder.",
                "Give a script, a function as module:function, or a folder with a config.json.",
            )
        numbers = (str(arguments.batch_size), str(arguments.sequence_length))
        words = (source, json.dumps(dict(options)), arguments.optimizer, *numbers)
        return run_with(arguments, CheckedScript(_TRAIN_MODEL_SCRIPT, words))


ESTIMATE = TrainingMemory()
