"""`accel merge-weights`: merge the shards of a model's checkpoint into one file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "MergeWeights")


class MergeWeights:
    """The entry point of the command in the group `accel.commands`."""

    help = "merge the shards of a model that FSDP saved into one file"
    examples = (
        "runs/one/checkpoints/checkpoint_7/pytorch_model_fsdp_0 merged",
        "--unsafe_serialization runs/one/pytorch_model_fsdp_0 merged",
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the input and output folders."""
        parser.add_argument("checkpoint_directory", help="Folder of shards, such as checkpoint/pytorch_model_fsdp_0.")
        parser.add_argument("output_path", help="Folder in which to write model.safetensors.")
        parser.add_argument(
            "--unsafe_serialization",
            "--unsafe-serialization",
            action="store_true",
            help="Write pytorch_model.bin, a pickle, instead of safetensors.",
        )
        parser.add_argument(
            "--remove_checkpoint_dir",
            "--remove-checkpoint-dir",
            action="store_true",
            help="Remove the folder of shards after the file is written.",
        )

    def run(self, arguments: Namespace) -> int:
        """Merge, and print the path of the file. All weights are in memory at once."""
        from accel_plugins.fsdp.weights import merge_weights

        written = merge_weights(
            arguments.checkpoint_directory,
            arguments.output_path,
            safe_serialization=not arguments.unsafe_serialization,
            remove_checkpoint_dir=arguments.remove_checkpoint_dir,
        )
        sys.stdout.write(f"Written to {written}.\n")
        return 0


COMMAND: Final = MergeWeights()
