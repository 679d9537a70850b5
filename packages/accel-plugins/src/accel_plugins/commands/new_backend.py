"""Start a package of its own that brings a backend.

    python tools/new_backend.py fancy                 writes ./accel-backend-fancy
    python tools/new_backend.py fancy --into folder   writes folder/accel-backend-fancy

The package is complete: it trains by data parallelism, has one setting, and passes the conformance kit. From there its
author changes one answer after the other; docs/how-to/write-a-backend.md tells which.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

NAME = re.compile(r"[a-z][a-z0-9]*(?:[_-][a-z0-9]+)*")
LONGEST = 48
TAKEN = ("single", "ddp", "fsdp1", "fsdp2", "deepspeed", "megatron", "xla")

PYPROJECT = """\
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
testing = ["accel-plugins[testing]>=0.1,<0.2"]

# This is how accel finds the backend: the name that users choose it by, and where its Manifest stands.
[project.entry-points."accel.backends"]
{name} = "{module}.manifest:MANIFEST"

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""

README = """\
# accel-backend-{name}

The backend `{name}` for `accel`.

```console
$ pip install accel-backend-{name}
$ accel backends
$ accel launch --backend {name} --{flag}_bucket_mb 50 --num_processes 2 train.py
```

Its tests need the extra `testing`: `pip install accel-backend-{name}[testing]`, then `pytest tests`.
"""

PACKAGE = '''\
"""The backend {name} for accel."""

from __future__ import annotations

from {module}.config import {title}Config

__all__ = ("{title}Config",)
'''

MANIFEST = '''\
"""What the backend declares about itself; read without torch, whenever somebody lists or chooses backends."""

from __future__ import annotations

from typing import Final

from accel_plugins.manifest import Axis, Manifest

__all__ = ("MANIFEST",)

MANIFEST: Final = Manifest(
    name="{name}",
    config="{module}.config:{title}Config",
    strategy="{module}.strategy:{title}Strategy",
    axes=frozenset({{Axis.REPLICATE}}),
    protocol=2,
)
'''

CONFIG = '''\
"""Settings of the backend: plain data without torch, so that the launcher can read them.

Each field made with `setting` is at once a flag of `accel launch`, a key of the config file, a variable of the started
processes and an argument of this class.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.kwargs import KwargsHandler
from accel_state.settings.schema import int_at_least, setting

__all__ = ("{title}Config",)


@dataclass
class {title}Config(KwargsHandler):
    """How gradients travel.

    Args:
        bucket_mb: size in MiB of the pieces in which gradients travel.
    """

    bucket_mb: int = setting(
        25,
        type=int_at_least(1),
        variable="ACCEL_{variable}_BUCKET_MB",
        flag="--{flag}_bucket_mb",
        key="{flag}_config.bucket_mb",
        help="Size in MiB of the pieces in which gradients travel.",
        group="Backend {name}",
    )
'''

STRATEGY = '''\
"""How one process trains with this backend.

`accel_plugins.Strategy` says of every method who calls it when, and what it must leave behind. What is not overridden
here is answered as for a single process.
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
    """Every process holds the whole model; backward averages the gradients."""

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
            transport.all_reduce(parameter.data).wait()
            parameter.data /= transport.world_size

    def join(self, models: Sequence[Module], even_batches: bool | None = None) -> AbstractContextManager[None]:
        wrapped: list[Any] = [model for model in models if isinstance(model, DistributedDataParallel)]
        joined: AbstractContextManager[None] = Join(wrapped) if wrapped else super().join(models, even_batches)
        return joined


@contextmanager
def _syncing_late(model: DistributedDataParallel) -> Iterator[None]:
    """Backward exchanges gradients, though forward ran under `no_sync` and did not prepare for it."""
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    yield
    model.require_backward_grad_sync = before
'''

TESTS = '''\
"""The backend passes the suite that every backend passes."""

from __future__ import annotations

from {module}.config import {title}Config
from accel_plugins.testing import BackendSuite


class Test{title}(BackendSuite):
    target = "{module}.manifest:MANIFEST"


class Test{title}Alone(BackendSuite):
    target = "{module}.manifest:MANIFEST"
    config = {title}Config(bucket_mb=1)
    processes = 1
'''


def files(name: str) -> dict[str, str]:
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
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"{source}/__init__.py": PACKAGE,
        f"{source}/py.typed": "",
        f"{source}/manifest.py": MANIFEST,
        f"{source}/config.py": CONFIG,
        f"{source}/strategy.py": STRATEGY,
        "tests/test_{flag}_conformance.py": TESTS,
    }
    return {path.format(**words): text.format(**words) for path, text in templates.items()}


def obstacle(name: str, folder: Path) -> str | None:
    """Why the package cannot be written, or None."""
    if not NAME.fullmatch(name) or len(name) > LONGEST:
        return f"{name!r} is not a name of a backend: lower-case letters and digits, parts joined by - or _, at most 48"
    if name in TAKEN:
        return f"{name!r} is the name of a backend of accel itself"
    return f"{folder} is there already" if folder.exists() else None


def main(arguments: list[str] | None = None) -> int:
    """Write the package and say where; 1 when that cannot be done."""
    parser = argparse.ArgumentParser(description="Start a package of its own that brings a backend.")
    parser.add_argument("name", help="the name that users choose it by")
    parser.add_argument("--into", type=Path, default=Path(), help="folder to write it into; this one by default")
    parsed = parser.parse_args(arguments)
    folder: Path = parsed.into / f"accel-backend-{parsed.name}"
    refused = obstacle(parsed.name, folder)
    if refused is not None:
        print(f"new_backend: {refused}", file=sys.stderr)
        return 1
    for path, text in files(parsed.name).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    print(f"{folder} is written. Next: pip install -e '{folder}[testing]' && pytest {folder / 'tests'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
