"""`accel estimate-memory MODEL`: estimates the memory of a model in several dtypes, without loading it.

`--training` needs a package that provides an object with `add_arguments(parser)` and `run(arguments, options)` in the
entry-point group `accel.memory`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any, Final

from accel_state.plugins import plugins_of
from accel_state.untrusted import printable

__all__ = ("COMMAND", "EstimateMemory")

_TRAINING: Final = "accel.memory"
"""Entry-point group of estimators for training."""
_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")


class EstimateMemory:
    """Prints a table of memory by dtype."""

    help = "estimate the memory of a model, or of a training step under a plan"

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
            help="Estimate one training step on several processes, by plan (needs accel-torch).",
        )
        for extension in plugins_of(_TRAINING):
            try:
                extension.load().add_arguments(parser)
            except Exception as error:
                # Other estimates work without it.
                broken = f"{extension.name} of {extension.origin} could not be loaded: {type(error).__name__}: {error}"
                print(printable(f"accel estimate-memory: {broken}"), file=sys.stderr)  # noqa: T201 - a command

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
    from accel_state.errors import PluginError, SettingError

    for extension in plugins_of(_TRAINING):
        try:
            estimator = extension.load()
        except Exception as error:
            raise PluginError(
                f"Cannot estimate the memory of training {arguments.model_name!r}.",
                f"{extension.target} of {extension.origin} could not be loaded: {type(error).__name__}: {error}",
                f"Repair or remove {extension.origin.split()[0]}.",
            ) from error
        code: int = estimator.run(arguments, options)
        return code
    raise SettingError(
        f"Cannot estimate the memory of training {arguments.model_name!r}.",
        "The estimate needs the package accel-torch, which is not installed.",
        "Install accel-torch.",
    )


COMMAND = EstimateMemory()
