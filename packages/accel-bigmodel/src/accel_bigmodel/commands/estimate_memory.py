"""`accel estimate-memory MODEL`: estimates the memory of a model in several dtypes, without loading it.

`--training` needs a package that provides an object with `add_arguments(parser)` and `run(arguments, options)` in the
entry-point group `accel.memory`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any, Final

from accel_state.plugins import Interface, PluginGroup

__all__ = ("COMMAND", "ESTIMATORS", "EstimateMemory")

ESTIMATORS: Final[PluginGroup[Any]] = PluginGroup(
    "accel.memory", "memory estimator", interface=Interface(members=("add_arguments", "run"))
)
"""The estimators for training."""
_OF_TRAINING: Final = "accel-check"
"""The package that provides one."""
_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")


class EstimateMemory:
    """Prints a table of memory by dtype."""

    help = "estimate the memory of a model, or of a training step under a plan"
    examples = ("bert-base-cased", "--training train.py --processes 8 --memory 80GiB")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the command's arguments."""
        parser.add_argument(
            "model_name",
            help="package.module:Class, file.py:Class, a folder with a config.json, or a name that the library knows; "
            "with --training a function that returns model, loss function and batch, a folder with a config.json, or a "
            "training script.",
        )
        parser.add_argument(
            "--library_name",
            "--library-name",
            choices=("timm", "transformers"),
            help="Library of the model name; by default transformers.",
        )
        parser.add_argument(
            "--dtypes",
            nargs="+",
            choices=_DTYPES,
            default=["float32", "float16", "int8", "int4"],
            help="Dtypes to show (default: float32 float16 int8 int4).",
        )
        parser.add_argument("--arguments", default="{}", help="Keyword arguments of the class, as a JSON object.")
        parser.add_argument(
            "--trust_remote_code",
            "--trust-remote-code",
            action="store_true",
            help="Allow the library to run code from the model's repository.",
        )
        parser.add_argument(
            "--training",
            action="store_true",
            help="Check a training step of several processes, as `accel check-plan` (needs accel-check).",
        )
        for estimator in ESTIMATORS.loaded():
            if estimator.value is None:
                # Other estimates work without it.
                print(f"accel estimate-memory: {estimator.warning}", file=sys.stderr)  # noqa: T201 - a command
            else:
                estimator.value.add_arguments(parser)

    def run(self, arguments: Namespace) -> int:
        """Build the model without weights and print the table.

        Raises:
            SettingError: `--arguments` is not a JSON object, the model cannot be built, or there is no estimator for
                training.
        """
        import json

        from accel_bigmodel.estimate import build_model, estimate_memory, table_of
        from accel_state.errors import SettingError

        try:
            options = json.loads(arguments.arguments)
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise SettingError(
                f"Cannot read --arguments {arguments.arguments!r}.",
                "It is not a JSON object.",
                """Write '{"width": 8}'.""",
            )
        if arguments.training:
            return _estimate_training(arguments, options)
        model = build_model(arguments.model_name, arguments.library_name, arguments.trust_remote_code, **options)
        print(table_of(estimate_memory(model, arguments.dtypes)))  # noqa: T201 - what the command is for
        return 0


def _estimate_training(arguments: Namespace, options: dict[str, Any]) -> int:
    from accel_state.errors import SettingError

    failed = f"Cannot estimate the memory of training {arguments.model_name!r}."
    for estimator in ESTIMATORS.loaded():
        code: int = estimator.get(failed).run(arguments, options)
        return code
    raise SettingError(
        failed, f"It belongs to {_OF_TRAINING}, which is not installed.", f"Run `pip install {_OF_TRAINING}`."
    )


COMMAND = EstimateMemory()
