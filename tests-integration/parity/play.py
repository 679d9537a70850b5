"""Plays the cases of some topics with whatever `accelerate` this Python has, and writes what came out as lines of JSON.

python play.py FILE TOPIC..., once for each process of the run
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


def cases(topic: str) -> dict[str, Any]:
    """The cases of a topic: its public functions."""
    module = importlib.import_module(f"cases.{topic}")
    own = inspect.getmembers(module, lambda item: inspect.isfunction(item) and item.__module__ == module.__name__)
    return {name: function for name, function in own if not name.startswith("_")}


def outcome(function: Any) -> Any:
    """What a case returned, or the builtin error that it raised."""
    from accelerate.state import AcceleratorState, GradientState

    environment = dict(os.environ)
    try:
        return json.loads(json.dumps(function()))
    except Exception as error:
        traceback.print_exc()
        builtin = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return {"raises": builtin.__name__}
    finally:
        os.environ.clear()
        os.environ.update(environment)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def main(file: str, *topics: str) -> None:
    """Plays, line by line, so that what follows a case that never ends is all that is lost."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent))
    with Path(file).open("w", encoding="utf-8") as lines:
        for topic in topics:
            for name, function in cases(topic).items():
                print(f"---- {topic}.{name}", file=sys.stderr)
                lines.write(json.dumps({"case": f"{topic}.{name}", "outcome": outcome(function)}) + "\n")
                lines.flush()
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
