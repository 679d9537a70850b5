"""`accel checkpoint`: lists, verifies, prunes, describes and copies the checkpoints of a folder or a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from accel_cli.command import spelled
from accel_state.errors import CheckpointError, SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "CheckpointCommand")


class CheckpointCommand:
    """Passes its arguments on to one of the actions on a folder or a store."""

    help = "list, verify, prune, describe and copy checkpoints, in folders and on stores"
    examples = ("list runs/one", "prune runs/one --keep 2")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the action, the paths and the output options."""
        parser.add_argument(
            "action",
            choices=("list", "verify", "prune", "info", "copy"),
            help="list: show a table, whose file sizes tell which checkpoints are complete; verify: read every byte, "
            "with exit code 1 if a checkpoint is damaged; prune: remove the oldest, and leftovers of dead processes; "
            "info: show the files of one checkpoint and its writer; copy: copy to another folder or URL.",
        )
        parser.add_argument(
            "path",
            metavar="PATH",
            help="A checkpoint, a folder of checkpoints, or the project folder; or a URL such as s3://bucket/run.",
        )
        parser.add_argument("target", metavar="TARGET", nargs="?", help="Folder or URL of the copy (copy).")
        parser.add_argument("--keep", type=int, metavar="N", help="Number of checkpoints to keep, at least 1 (prune).")
        parser.add_argument(
            *spelled("--dry_run"), action="store_true", help="Print what prune would remove, and remove nothing."
        )
        parser.add_argument(
            "--leftover",
            metavar="NAME",
            action="append",
            default=[],
            help="Also remove this folder that a run left behind, as `list` shows it (prune; may be given again).",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON.")

    def run(self, arguments: Namespace) -> int:
        """Run the action and return the exit code."""
        failure = f"Cannot run `accel checkpoint {arguments.action}"
        if (arguments.target is None) is (arguments.action == "copy"):
            raise SettingError(
                f"{failure}`.",
                "It needs a source and a target." if arguments.target is None else "It takes one path.",
                "Give a source and a target to `copy`, and one path to all other actions.",
            )
        try:
            code, rows, lines = self._answer(arguments, f"{failure} {arguments.path}`.")
        except OSError as error:
            raise CheckpointError(
                f"{failure} {arguments.path}`.",
                f"A file or folder cannot be read: {error}.",
                "Check that this user may read it, and that no other program is removing it.",
            ) from error
        if arguments.json:
            import json

            print(json.dumps(rows, indent=2, sort_keys=True))
        else:
            print("\n".join(lines))
        return code

    def _answer(self, arguments: Namespace, failure: str) -> tuple[int, Any, list[str]]:
        """The exit code, and the answer as data and as lines."""
        from accel_cli.checkpoints import as_lines, checkpoint_place, copy, described_lines

        action, path = arguments.action, arguments.path
        if action == "copy":
            target = copy(path, arguments.target)
            return 0, {"path": target}, [f"Copied {path} to {target}."]
        place = checkpoint_place(path, failure)
        if action == "info":
            described = place.describe()
            return 0, described, described_lines(described)
        if action == "prune":
            if arguments.keep is None or arguments.keep < 1:
                missing = "The number of checkpoints to keep is missing."
                obstacle = missing if arguments.keep is None else "At least one checkpoint must remain."
                raise SettingError(failure, obstacle, "Set --keep to 1 or more.")
            gone = place.prune(arguments.keep, named=arguments.leftover, dry_run=arguments.dry_run)
            said = "Would remove" if arguments.dry_run else "Removed"
            return 0, gone, [f"{said} {name}" for name in gone] or ["Nothing to remove."]
        rows = place.table(hashes=action == "verify")
        good = bool(rows) and all(row["state"] == "good" for row in rows)
        return int(action == "verify" and not good), rows, as_lines(rows) or [f"There are no checkpoints in {path}."]


COMMAND: Final = CheckpointCommand()
