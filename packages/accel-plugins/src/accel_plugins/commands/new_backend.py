"""`accel new-backend`: create a package with a backend.

    accel new-backend fancy                 writes ./accel-backend-fancy
    accel new-backend fancy --into folder   writes folder/accel-backend-fancy

The package is complete: it trains with data parallelism, has one setting, and passes the test kit. Its author then
changes one method at a time, as docs/how-to/write-a-backend.md describes.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from accel_state.errors import SettingError
from accel_state.plugins import plugins_of

__all__ = ("COMMAND", "NewBackend")

_BACKEND_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[_-][a-z0-9]+)*")
_MAX_NAME_LENGTH: Final = 48

_PYPROJECT: Final = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "accel-backend-{name}"
version = "0.1.0"
description = "The backend {name} for accel."
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["accel-plugins>=0.1,<0.2", "accel-state>=0.1,<0.2", "torch>=2.9"]

[project.optional-dependencies]
testing = ["accel-testing[backends]>=0.1,<0.2"]

# accel finds the backend by this entry point: the name that users choose, and the Manifest object.
[project.entry-points."accel.backends"]
{name} = "{module}.manifest:MANIFEST"

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""

_README: Final = """\
# accel-backend-{name}

The backend `{name}` for `accel`.

```console
$ pip install -e .
$ accel backends
$ accel launch --backend {name} --{flag}_bucket_mb 50 --num_processes 2 train.py
```

Its tests need the extra `testing`: `pip install -e '.[testing]'`, then `pytest tests`.
"""

_PACKAGE: Final = '''\
"""The backend {name} for accel."""

from __future__ import annotations

from {module}.config import {title}Config

__all__ = ("{title}Config",)
'''

_MANIFEST: Final = '''\
"""The manifest of the backend; read without torch, when backends are listed or chosen."""

from __future__ import annotations

from typing import Final

from accel_plugins.manifest import Axis, Capabilities, Manifest

__all__ = ("MANIFEST",)

MANIFEST: Final = Manifest(
    name="{name}",
    config="{module}.config:{title}Config",
    strategy="{module}.strategy:{title}Strategy",
    axes=frozenset({{Axis.REPLICATE}}),
    # What differs from plain torch: DistributedDataParallel waits for the gradients of all parameters.
    capabilities=Capabilities(unused_parameters=False),
    # `accel estimate-memory --training` estimates the backend with these plans, those of data parallelism.
    protocol=3,
)
'''

_CONFIG: Final = '''\
"""Settings of the backend: plain data without torch, so that the launcher can read them.

Each field defined with `setting` is also a flag of `accel launch`, a key of the config file, an environment variable
and an argument of this class.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.kwargs import KwargsHandler
from accel_state.settings.schema import int_at_least, setting

__all__ = ("{title}Config",)


@dataclass
class {title}Config(KwargsHandler):
    """How gradients are averaged.

    Args:
        bucket_mb: size of gradient buckets in MiB.
    """

    bucket_mb: int = setting(
        25,
        type=int_at_least(1),
        variable="ACCEL_{variable}_BUCKET_MB",
        flag="--{flag}_bucket_mb",
        key="{flag}_config.bucket_mb",
        help="Size of gradient buckets in MiB.",
        group="Backend {name}",
    )
'''

_STRATEGY: Final = '''\
"""The strategy of the backend.

The docstrings of `accel_plugins.Strategy` state for every method who calls it when, its preconditions and its
postconditions. Methods that are not overridden here behave as on a single process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from {module}.config import {title}Config
from accel_plugins import Bundle, Strategy

__all__ = ("{title}Strategy",)


class {title}Strategy(Strategy):
    """Every process has the whole model; backward averages the gradients."""

    config: {title}Config

    def setup(self, bundle: Bundle) -> Bundle:
        bundle.models = [self._wrap(model) for model in bundle.models]
        return bundle

    def _wrap(self, model: Module) -> Module:
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if self.context.process.world_size == 1 or not trains:
            return model
        return DistributedDataParallel(model, bucket_cap_mb=self.config.bucket_mb)

    def unwrap(self, model: Module) -> Module:
        inner: Module = model.module if isinstance(model, DistributedDataParallel) else model
        return inner

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        if not isinstance(model, DistributedDataParallel):
            return super().no_sync(model)
        held: AbstractContextManager[None] = model.no_sync()
        return held

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        if isinstance(model, DistributedDataParallel):
            return _syncing_late(model)
        return super().sync_in_next_backward(model)

    def average_parameters(self, model: Module) -> None:
        transport = self.context.process.transport
        for parameter in self.unwrap(model).parameters():
            # `detach()` instead of `.data`: the write then increments the parameter's version, which snapshots compare.
            mean = parameter.detach()
            transport.all_reduce(mean).wait()
            mean /= transport.world_size

    def join(self, models: Sequence[Module], even_batches: bool | None = None) -> AbstractContextManager[None]:
        wrapped: list[Any] = [model for model in models if isinstance(model, DistributedDataParallel)]
        joined: AbstractContextManager[None] = Join(wrapped) if wrapped else super().join(models, even_batches)
        return joined


@contextmanager
def _syncing_late(model: DistributedDataParallel) -> Iterator[None]:
    """A context in which backward averages gradients, although forward ran under `no_sync`."""
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    try:
        model.reducer.prepare_for_backward([])
        yield
    finally:
        model.require_backward_grad_sync = before
'''

_TESTS: Final = '''\
"""The test kit, run on this backend: by a short loop, and by an Accelerator."""

from __future__ import annotations

from {module}.config import {title}Config
from accel_testing.accelerator import AcceleratorSuite
from accel_testing.backends import BackendSuite


class Test{title}(BackendSuite):
    target = "{module}.manifest:MANIFEST"


class Test{title}ThroughTheAccelerator(AcceleratorSuite):
    target = "{module}.manifest:MANIFEST"


class Test{title}Alone(BackendSuite):
    target = "{module}.manifest:MANIFEST"
    config = {title}Config(bucket_mb=1)
    processes = 1
'''


class NewBackend:
    """Writes a package with a backend that passes the test kit."""

    help = "create a package with a backend that passes the test kit"
    examples = ("fancy", "fancy --into packages")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the name and the folder."""
        parser.add_argument("name", help="Name of the backend for users.")
        parser.add_argument(
            "--into", type=Path, default=Path(), help="Parent folder of the package; by default the current one."
        )

    def run(self, arguments: Namespace) -> int:
        """Write the package, and print the next commands.

        Raises:
            SettingError: the name is malformed or taken, or the folder of the package exists.
        """
        name, folder = arguments.name, arguments.into / f"accel-backend-{arguments.name}"
        _check(name, folder)
        for path, text in _files(name).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        install, test = f"pip install -e '{folder}[testing]'", f"pytest {folder / 'tests'}"
        print(f"{folder} was created. Next: {install} && {test}")  # noqa: T201 - what the command is for
        return 0


COMMAND: Final = NewBackend()


def _check(name: str, folder: Path) -> None:
    taken = {backend.name: backend.origin for backend in plugins_of("accel.backends")}
    if not _BACKEND_NAME.fullmatch(name) or len(name) > _MAX_NAME_LENGTH:
        raise SettingError(
            f"Cannot name a backend {name!r}.",
            f"A name consists of lower-case letters and digits, in parts joined by - or _, at most {_MAX_NAME_LENGTH} "
            "characters.",
            "Choose another name.",
        )
    if name in taken:
        raise SettingError(
            f"Cannot name a backend {name!r}.",
            f"{taken[name]} already provides a backend with that name.",
            "Choose another name.",
        )
    if folder.exists():
        raise SettingError(
            f"Cannot write {folder}.",
            "The folder exists already.",
            "Choose another name, or another folder with --into.",
        )


def _files(name: str) -> dict[str, str]:
    """Path inside the package's folder -> content."""
    flag = name.replace("-", "_")
    words = {
        "name": name,
        "flag": flag,
        "module": f"accel_backend_{flag}",
        "title": "".join(part.capitalize() for part in flag.split("_")),
        "variable": flag.upper(),
    }
    source = "src/{module}"
    templates = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{source}/__init__.py": _PACKAGE,
        f"{source}/py.typed": "",
        f"{source}/manifest.py": _MANIFEST,
        f"{source}/config.py": _CONFIG,
        f"{source}/strategy.py": _STRATEGY,
        "tests/test_{flag}_conformance.py": _TESTS,
    }
    return {path.format(**words): text.format(**words) for path, text in templates.items()}
