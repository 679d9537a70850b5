"""`accel checkpoint`: what lies in a folder of checkpoints, whether it is whole, and what may go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_cli.command import spelled
from accel_state.errors import CheckpointError, SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "Checkpoint")


class Checkpoint:
    """The command; see `accel_cli.command.Command`."""

    help = "list, verify, prune and describe checkpoints"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """What to do, where, and how it is shown."""
        parser.add_argument(
            "action",
            choices=("list", "verify", "prune", "info"),
            help="list: a table by sizes alone, which tell what is complete; verify: read every byte to tell what is "
            "good, exit code 1 when one is damaged; prune: remove the oldest, and what dead processes left; info: the "
            "files of one checkpoint and who wrote it.",
        )
        parser.add_argument("path", metavar="PATH", help="A checkpoint, a folder of them, or the project above it.")
        parser.add_argument("--keep", type=int, metavar="N", help="How many to keep (prune).")
        parser.add_argument(*spelled("--dry_run"), action="store_true", help="Only tell what would go (prune).")
        parser.add_argument("--json", action="store_true", help="Print JSON.")

    def run(self, arguments: Namespace) -> int:
        """Do one of the four."""
        from accel_cli import checkpoints
        from accel_plugins.checkpoint.recovery import located

        folder = located(Path(arguments.path))
        if folder is None or not folder.is_dir():
            raise SettingError(
                f"`accel checkpoint {arguments.action} {arguments.path}` was asked for.",
                "There is no such folder.",
                "Name a checkpoint, a folder of them, or the project above it.",
            )
        actions = {"list": _list, "verify": _verify, "prune": _prune, "info": _info}
        try:
            code, rows, lines = actions[arguments.action](checkpoints, folder, arguments)
        except OSError as error:
            raise CheckpointError(
                f"Run `accel checkpoint {arguments.action} {folder}`.",
                f"A file or folder cannot be read: {error}.",
                "Check that this user may read it, and that nobody removes it meanwhile.",
            ) from error
        if arguments.json:
            import json

            print(json.dumps(rows, indent=2, sort_keys=True))
        else:
            print("\n".join(lines))
        return code


Answer = tuple[int, Any, list[str]]


def _list(checkpoints: Any, folder: Path, arguments: Namespace) -> Answer:
    rows = checkpoints.table(folder)
    return 0, rows, checkpoints.as_lines(rows) or [f"There is no checkpoint in {folder}."]


def _verify(checkpoints: Any, folder: Path, arguments: Namespace) -> Answer:
    rows = checkpoints.table(folder, hashes=True)
    lines = checkpoints.as_lines(rows) or [f"There is no checkpoint in {folder}."]
    return (0 if rows and all(row["state"] == "good" for row in rows) else 1), rows, lines


def _prune(checkpoints: Any, folder: Path, arguments: Namespace) -> Answer:
    if arguments.keep is None or arguments.keep < 1:
        raise SettingError(
            f"`accel checkpoint prune {folder}` was asked for.",
            "It was not told how many checkpoints to keep." if arguments.keep is None else "One has to be kept.",
            "Give --keep N, with N from 1 on.",
        )
    gone = checkpoints.prune(folder, arguments.keep, dry_run=arguments.dry_run)
    said = "Would remove" if arguments.dry_run else "Removed"
    return 0, gone, [f"{said} {name}" for name in gone] or ["Nothing to remove."]


def _info(checkpoints: Any, folder: Path, arguments: Namespace) -> Answer:
    found = checkpoints.describe(folder)
    return 0, found, checkpoints.described_lines(found)


COMMAND: Final = Checkpoint()
