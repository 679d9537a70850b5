"""Estimates a model's memory in several dtypes, for inference and training with Adam, without allocating it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.sizes import compute_module_sizes, convert_bytes, get_max_layer_size
from accel_state.choices import CustomDtype
from accel_state.errors import SettingError
from accel_state.settings.installed import Requirement

__all__ = ("Estimate", "build_model", "estimate_memory", "load_callable", "table_of")

_DTYPES: Mapping[str, Any] = {"int8": CustomDtype.FP8, "int4": CustomDtype.INT4}
_TRAINED = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Estimate:
    """Bytes of a model whose weights have one dtype.

    Args:
        dtype: name of the dtype.
        largest_layer: bytes of the largest layer, or block that must stay whole.
        layer: its name, or "" if the model is one layer.
        total: bytes of all weights and buffers.
        training: bytes of training with Adam, or None for dtypes that are not trained.
    """

    dtype: str
    largest_layer: int
    layer: str
    total: int
    training: int | None


def estimate_memory(model: nn.Module, dtypes: Sequence[str] = ("float32", "float16", "int8", "int4")) -> list[Estimate]:
    """Estimates for a model, which may be on the meta device, by dtype.

    Training counts 16 bytes per parameter: in float32 for weights, gradients and Adam's two moments of 4 each; in half
    precision for weights and gradients of 2 each, a float32 copy of the weights, and the moments. Activations, which
    depend on the batch, are not counted.

    Args:
        model: the model.
        dtypes: some of "float32", "float16", "bfloat16", "int8" and "int4".

    Raises:
        SettingError: a dtype is unknown.
    """
    trainable = sum(parameter.numel() for parameter in model.parameters())
    whole = getattr(model, "_no_split_modules", None) or []
    estimates = []
    for dtype in dtypes:
        sizes = compute_module_sizes(model, _DTYPES.get(dtype, dtype))
        largest, names = get_max_layer_size([("", model)], sizes, whole)
        training = 16 * trainable if dtype in _TRAINED else None
        estimates.append(Estimate(dtype, largest, names[0] if names else "", sizes[""], training))
    return estimates


def table_of(estimates: Sequence[Estimate]) -> str:
    """Estimates as a table."""
    rows = [("dtype", "largest layer", "total size", "training with Adam")]
    for estimate in estimates:
        trained = "not trained in this dtype" if estimate.training is None else convert_bytes(estimate.training)
        largest = convert_bytes(estimate.largest_layer) + (f" ({estimate.layer})" if estimate.layer else "")
        rows.append((estimate.dtype, largest, convert_bytes(estimate.total), trained))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def build_model(
    model_name: str, library_name: str | None = None, trust_remote_code: bool = False, **arguments: Any
) -> nn.Module:
    """Build a model on the meta device from its name.

    Args:
        model_name: "package.module:Class" or "file.py:Class", a callable that returns a module; a folder or file with a
            config of transformers; or the name of a model of transformers or timm.
        library_name: "transformers" or "timm" for names that are neither path nor callable.
        trust_remote_code: let transformers run code that comes with a model.
        arguments: keyword arguments of the callable.

    Raises:
        SettingError: nothing with that name exists, or it does not create a module.
        Missing: the required library is not installed.
    """
    failure = f"Cannot estimate the memory of {model_name!r}."
    make = (
        load_callable(failure, model_name)
        if ":" in model_name and not model_name.startswith("hf-hub:")
        else _from_library(failure, model_name, library_name, trust_remote_code)
    )
    try:
        model = _empty(make, arguments)
    except Exception as error:
        raise SettingError(
            failure, f"Building it raised {type(error).__name__}: {error}", "Check its name and its --arguments."
        ) from error
    if not isinstance(model, nn.Module):
        raise SettingError(
            failure, f"It returned a {type(model).__name__}, not a torch.nn.Module.", "Give the class of a module."
        )
    return model


def _empty(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Build the model without memory or, if its constructor reads tensor values, with memory for its buffers."""
    try:
        with init_empty_weights(include_buffers=True):
            return make(**arguments)
    except (RuntimeError, NotImplementedError):
        with init_empty_weights(include_buffers=False):
            return make(**arguments)


def load_callable(failure: str, model_name: str) -> Callable[..., Any]:
    """Import the object "package.module:name" or "file.py:name".

    Args:
        failure: first sentence of the error message.
        model_name: the text.

    Raises:
        SettingError: it cannot be imported, or is not callable.
    """
    place, _, name = model_name.rpartition(":")
    try:
        value: Any = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise SettingError(
            failure, f"{type(error).__name__}: {error}", "Write package.module:Class or file.py:Class."
        ) from error
    except SystemExit as leaving:
        raise SettingError(
            failure,
            f"Importing {place} runs a program, which exited with {leaving.code!r} before it defined the class.",
            "Put the statements of the program, such as reading its arguments, under: if __name__ == '__main__'",
        ) from leaving
    except Exception as error:
        raise SettingError(
            failure,
            f"Importing {place} raised {type(error).__name__}: {error}",
            "Correct the error, or put everything except definitions under: if __name__ == '__main__'",
        ) from error
    if not callable(value):
        raise SettingError(failure, f"{name!r} is a {type(value).__name__}.", "Give a class or a function.")
    return value  # type: ignore[no-any-return]


def _file(path: Path) -> Any:
    """Import a file as a module; sys.argv contains only its name meanwhile."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    arguments, folders = sys.argv, list(sys.path)
    sys.argv = [str(path)]
    # A script can import the modules in its folder.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv, sys.path[:] = arguments, folders
    return module


def _from_library(failure: str, name: str, library_name: str | None, trust_remote_code: bool) -> Callable[..., Any]:
    if library_name == "timm":
        Requirement("timm").demand(failure)
        create: Any = importlib.import_module("timm").create_model
        return lambda **arguments: create(name, pretrained=False, **arguments)
    path = Path(name)
    config_file = path / "config.json" if path.is_dir() else path
    if path.exists() and not _is_config(config_file):
        raise SettingError(
            failure,
            f"{str(config_file)!r} is not a config with a 'model_type'.",
            "Give the path of a config.json or of its folder.",
        )
    Requirement("transformers").demand(failure)
    library: Any = importlib.import_module("transformers")

    def make(**arguments: Any) -> Any:
        config = library.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **arguments)
        return library.AutoModel.from_config(config, trust_remote_code=trust_remote_code)

    return make


def _is_config(path: Path) -> bool:
    try:
        return "model_type" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
