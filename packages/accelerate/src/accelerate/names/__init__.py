"""The name table of the drop-in: the names of each old module, and this project's module that defines each.

`accelerate.finder` uses it to find modules, `accelerate.address` to serve their names, and `stubs` to write stubs for
type checkers. A build loads this folder without the rest of the package, so it must not import from outside.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

from .homes import NAMES

__all__ = (
    "LENDERS",
    "LIBRARIES",
    "LOGGERS",
    "NAMES",
    "NOT_PROVIDED",
    "OWN_MODULES",
    "PACKAGES",
    "REMOVED",
    "VERSION",
    "Owner",
    "owner_of",
    "owners",
    "stub_path",
)

VERSION: Final = "1.15.0+accel.1"
"""The distribution's version: starts with that of the interface, because libraries compare it."""

_WIZARD: Final = (
    "It was a part of the questions that the original's own command asks.",
    "Run `accelerate config`, or write a file with accelerate.utils.write_basic_config.",
)

NOT_PROVIDED: Final[Mapping[str, tuple[str, str]]] = {
    "accelerate.deepspeed_utils": ("It was removed before 1.0.", "Import from accelerate.utils."),
    "accelerate.kwargs_handlers": ("It was removed before 1.0.", "Import from accelerate.utils."),
    "accelerate.checkpointing": (
        "Its functions wrote a folder without the commit of `save_state`.",
        "Call Accelerator.save_state and load_state.",
    ),
    "accelerate.commands.config.cluster": _WIZARD,
    "accelerate.commands.config.config_utils": _WIZARD,
    "accelerate.commands.config.sagemaker": _WIZARD,
    "accelerate.commands.config.update": _WIZARD,
    "accelerate.commands.menu": _WIZARD,
    "accelerate.commands.utils": ("It held the parser of the original's own commands.", "Use argparse."),
    "accelerate.test_utils": (
        "The test helpers of the original library are not part of the drop-in.",
        "Use accel_testing (real processes, clean state) and accel_testing.backends (suites for backends).",
    ),
}
"""Modules that cannot be imported: obstacle and remedy by module."""

REMOVED: Final[Mapping[str, str]] = {
    "get_launch_prefix": "Call `accel launch`; on several machines it starts torch.distributed.run.",
    "is_ccl_available": "torch no longer needs oneCCL's bindings on CPU; its backend there is gloo.",
    "is_ipex_available": "Its optimisations are part of torch; remove the call.",
    "is_safetensors_available": "safetensors is always installed; remove the call.",
    "is_tpu_available": "Use is_torch_xla_available(check_is_tpu=True).",
    "shard_checkpoint": "Use accel_bigmodel.split_state_dict, or huggingface_hub.split_torch_state_dict_into_shards.",
}
"""Names that were removed before 1.15, with the remedy for each."""

LENDERS: Final = ("accelerate.utils", *(name for name in NAMES if not name.startswith("accelerate.commands")))
"""The old modules whose names the others have too; the names of the commands repeat."""

_LIBRARIES: Final = """
    argparse base64 collections contextlib copy enum functools gc importlib inspect json logging math os pickle platform
    random re shutil socket subprocess sys tempfile threading time torch warnings weakref yaml
"""

LIBRARIES: Final[Mapping[str, str]] = {
    **{name: name for name in _LIBRARIES.split()},
    "F": "torch.nn.functional",
    "dist": "torch.distributed",
    "nn": "torch.nn",
    "np": "numpy",
    "optim": "torch.optim",
}
"""Modules of other libraries that scripts read from an old module, which imports them for its own use, by name."""

OWN_MODULES: Final = frozenset(
    f"accelerate.{name}"
    for name in (
        "address",
        "finder",
        "installation",
        "legacy",
        "loggers",
        "names",
        "private_names",
        "separate",
        "unread",
    )
)
"""Modules of this package that exist as files."""

PACKAGES: Final = frozenset(address.rpartition(".")[0] for address in NAMES) - {""}
"""Old modules that are packages."""

LOGGERS: Final = {
    "accel_bigmodel": "accelerate.big_modeling",
    "accel_cli": "accelerate.commands",
    "accel_data": "accelerate.data_loader",
    "accel_megatron": "accelerate.utils",
    "accel_ops": "accelerate.utils.operations",
    "accel_plugins": "accelerate.utils",
    "accel_state": "accelerate.state",
    "accel_torch": "accelerate.accelerator",
    "accel_tracking": "accelerate.tracking",
}
"""The old logger that receives a package's records from modules that the table does not list."""


# This class is created at each import of the package; typing.NamedTuple would take 1 ms of CPU time.
class Owner(namedtuple("Owner", ("module", "name"))):
    """The module that defines a name.

    Args:
        module: a module of this project; assignments to the old module's attribute are forwarded to it.
        name: the name in that module.
    """

    __slots__ = ()

    module: str
    name: str


@cache
def owners(address: str) -> Mapping[str, Owner]:
    """The names that an old module defines, each with its owner."""
    return dict(_resolved(NAMES[address]))


def owner_of(address: str, name: str) -> Owner | None:
    """The owner of a name of an old module, or None if it has no such name.

    A plain module has every name of the packages and of the others too: scripts import names from modules
    that import them for their own use.
    """
    own = owners(address).get(name)
    if own is not None or address in PACKAGES:
        return own
    return next((owners(lender)[name] for lender in LENDERS if name in owners(lender)), None)


def stub_path(address: str) -> str:
    """Path of an old module's stub, relative to the parent folder of `accelerate`."""
    path = address.replace(".", "/")
    return f"{path}/__init__.pyi" if address in PACKAGES else f"{path}.pyi"


def _resolved(sources: Mapping[str, str]) -> Iterator[tuple[str, Owner]]:
    for source, words in sources.items():
        owned = owners(source) if source in NAMES else None
        for word in [name for name in owned or () if name[0] != "_"] if words == "*" else words.split():
            old, _, ours = word.partition("=")
            yield old, Owner(source, ours or old) if owned is None else owned[ours or old]
