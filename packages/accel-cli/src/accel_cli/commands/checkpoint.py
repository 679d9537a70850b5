"""`accel checkpoint`: lists, verifies, prunes, describes and copies the checkpoints of a folder or a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_cli.command import spelled
from accel_state.errors import CheckpointError, SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "CheckpointCommand")


class CheckpointCommand:
    """The command; see `accel_cli.command.Command`."""

    help = "list, verify, prune, describe and copy checkpoints, in folders and on stores"

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
        from accel_cli import checkpoints
        from accel_plugins.checkpoint.store import is_url

        if (arguments.target is None) is (arguments.action == "copy"):
            raise SettingError(
                f"Cannot run `accel checkpoint {arguments.action}`.",
                "It needs a source and a target." if arguments.target is None else "It takes one path.",
                "Give a source and a target to `copy`, and one path to all other actions.",
            )
        on_store = is_url(arguments.path) or arguments.action == "copy"
        actions: Mapping[str, Callable[..., Answer]] = _ACTIONS_ON_STORES if on_store else _ACTIONS
        place = arguments.path if on_store else self._folder(arguments)
        try:
            code, rows, lines = actions[arguments.action](checkpoints, place, arguments)
        except OSError as error:
            raise CheckpointError(
                f"Cannot run `accel checkpoint {arguments.action} {place}`.",
                f"A file or folder cannot be read: {error}.",
                "Check that this user may read it, and that no other program is removing it.",
            ) from error
        if arguments.json:
            import json

            print(json.dumps(rows, indent=2, sort_keys=True))
        else:
            print("\n".join(lines))
        return code

    @staticmethod
    def _folder(arguments: Namespace) -> Path:
        from accel_plugins.checkpoint.recovery import located

        folder = located(Path(arguments.path))
        if folder is None or not folder.is_dir():
            raise SettingError(
                f"Cannot run `accel checkpoint {arguments.action} {arguments.path}`.",
                "There is no such folder.",
                "Give the path of a checkpoint, of a folder of checkpoints, or of the project folder.",
            )
        return folder


Answer = tuple[int, Any, list[str]]


def _list(checkpoints: Any, folder: Path, arguments: Namespace) -> Answer:
    return _listed(checkpoints, folder, checkpoints.checkpoint_table(folder))


def _list_store(checkpoints: Any, url: str, arguments: Namespace) -> Answer:
    return _listed(checkpoints, url, checkpoints.remote_table(url))


def _listed(checkpoints: Any, place: Path | str, rows: Any) -> Answer:
    return 0, rows, checkpoints.as_lines(rows) or [f"There are no checkpoints in {place}."]


def _verify(checkpoints: Any, folder: Path, arguments: Namespace) -> Answer:
    return _verified(checkpoints, folder, checkpoints.checkpoint_table(folder, hashes=True))


def _verify_store(checkpoints: Any, url: str, arguments: Namespace) -> Answer:
    return _verified(checkpoints, url, checkpoints.remote_table(url, hashes=True))


def _verified(checkpoints: Any, place: Path | str, rows: Any) -> Answer:
    _, _, lines = _listed(checkpoints, place, rows)
    return (0 if rows and all(row["state"] == "good" for row in rows) else 1), rows, lines


def _prune(checkpoints: Any, folder: Path, arguments: Namespace) -> Answer:
    return _pruned(partial(checkpoints.prune, named=arguments.leftover), folder, arguments)


def _prune_store(checkpoints: Any, url: str, arguments: Namespace) -> Answer:
    return _pruned(partial(checkpoints.remote_prune, named=arguments.leftover), url, arguments)


def _pruned(prune: Any, place: Path | str, arguments: Namespace) -> Answer:
    if arguments.keep is None or arguments.keep < 1:
        raise SettingError(
            f"Cannot prune the checkpoints in {place}.",
            "The number of checkpoints to keep is missing."
            if arguments.keep is None
            else "At least one checkpoint must remain.",
            "Set --keep to 1 or more.",
        )
    gone = prune(place, arguments.keep, dry_run=arguments.dry_run)
    said = "Would remove" if arguments.dry_run else "Removed"
    return 0, gone, [f"{said} {name}" for name in gone] or ["Nothing to remove."]


def _info(checkpoints: Any, folder: Path, arguments: Namespace) -> Answer:
    found = checkpoints.describe_checkpoint(folder)
    return 0, found, checkpoints.described_lines(found)


def _info_store(checkpoints: Any, url: str, arguments: Namespace) -> Answer:
    found = checkpoints.describe_remote(url)
    return 0, found, checkpoints.described_lines(found)


def _copy(checkpoints: Any, source: str, arguments: Namespace) -> Answer:
    target = checkpoints.copy(source, arguments.target)
    return 0, {"path": target}, [f"Copied {source} to {target}."]


_ACTIONS: Final = {"list": _list, "verify": _verify, "prune": _prune, "info": _info}
_ACTIONS_ON_STORES: Final = {
    "list": _list_store,
    "verify": _verify_store,
    "prune": _prune_store,
    "info": _info_store,
    "copy": _copy,
}

COMMAND: Final = CheckpointCommand()
