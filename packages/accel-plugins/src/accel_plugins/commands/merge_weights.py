"""`accel merge-weights`: put the shards of a checkpointed model together into one file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "MergeWeights")


class MergeWeights:
    """The command, as the entry-point group `accel.commands` offers it."""

    help = "merge the shards of a model that FSDP saved into one file"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Where the shards are and where the file goes."""
        parser.add_argument("checkpoint_directory", help="Folder of shards, such as checkpoint/pytorch_model_fsdp_0.")
        parser.add_argument("output_path", help="Folder to write model.safetensors to.")
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
            help="Remove the folder of shards once the file is written.",
        )

    def run(self, arguments: Namespace) -> int:
        """Merge, and say where the file is; all weights are in memory meanwhile."""
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
