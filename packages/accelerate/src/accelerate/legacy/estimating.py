"""The functions behind `accelerate estimate-memory` under their old names, over `accel_bigmodel.estimate`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, Final

from torch import nn

from accel_bigmodel.estimate import build_model
from accel_state.errors import NoAccess, NotFound, SettingError
from accel_state.settings.installed import Requirement, importable
from accelerate.legacy.big_models import calculate_maximum_sizes

_LIBRARIES: Final = ("timm", "transformers")

_SMALLER: Final = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}
"""How many times fewer bytes than float32 a dtype takes."""

_IN_HALF: Final = {"model": 1.0, "optimizer": 2.0, "gradients": 1.5, "step": 2.0}
_TRAINED: Final = {
    "float32": {"model": 1.0, "optimizer": 2.0, "gradients": 1.0, "step": 4.0},
    "float16": _IN_HALF,
    "bfloat16": _IN_HALF,
}
"""Bytes at each moment of training with Adam, by dtype, as multiples of the model's bytes in float32."""


class NoSuchModel(SettingError, RuntimeError):
    """Raised when a repository of the Hub has no model of the library that was to load it."""


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """The Hugging Face Hub's facts about a model; "gated" if it needs an access token, "repo" if it does not exist.

    Raises:
        Missing: huggingface_hub is not installed.
    """
    Requirement("huggingface_hub", distribution="huggingface-hub").demand(
        f"Cannot fetch the description of {repo!r} from the Hub."
    )
    import huggingface_hub
    from huggingface_hub import errors

    model_info: Any = huggingface_hub.model_info
    try:
        return model_info(repo, token=token)
    except errors.GatedRepoError:
        return "gated"
    except errors.RepositoryNotFoundError:
        return "repo"


def check_has_model(error: BaseException | None) -> str:
    """The library of whose models an error of loading says that none has that name, or "unknown"."""
    said = str(error)
    if isinstance(error, RuntimeError) and "Unknown model" in said and importable("timm"):
        return "timm"
    if isinstance(error, OSError) and "does not appear to have a file named" in said and importable("transformers"):
        return "transformers"
    return "unknown"


def create_empty_model(
    model_name: str, library_name: str, trust_remote_code: bool = False, access_token: str | None = None
) -> nn.Module:
    """A model without memory for its weights.

    Args:
        model_name: name on the Hub, or whatever else `accel_bigmodel.estimate.build_model` takes.
        library_name: "transformers" or "timm"; None asks the Hub for that of a model there.
        trust_remote_code: let transformers run code that comes with a model.
        access_token: for models of the Hub that need one.

    Raises:
        NotFound: the Hub has no such model; `NoAccess` if access to the model is restricted.
        SettingError: the model cannot be built, or none of these libraries has it.
        Missing: a library that it needs is not installed.
    """
    if not is_on_hub(model_name):
        return build_model(model_name, library_name, trust_remote_code)
    library = _library_on_hub(model_name, library_name, access_token)
    in_timm = library == "timm" and "/" in model_name and not model_name.startswith("hf-hub:")
    name = f"hf-hub:{model_name}" if in_timm else model_name
    arguments = {"token": access_token} if access_token is not None and library == "transformers" else {}
    return build_model(name, library, trust_remote_code, **arguments)


def is_on_hub(model_name: str) -> bool:
    """Whether a name is that of a model on the Hub, and neither a class nor a path here."""
    return ":" not in model_name and not Path(model_name).exists()


def model_of(args: Namespace) -> nn.Module:
    """The model that a command line of `estimate-memory` names.

    Raises:
        NoSuchModel: the library does not find a model in the repository.
    """
    try:
        return create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    except SettingError as error:
        library = check_has_model(error.__cause__)
        if library == "unknown":
            raise
        failure = f"Cannot load the model {args.model_name!r} with {library}."
        raise NoSuchModel(
            failure, "The repository does not have a model for that library.", "Give --library_name."
        ) from error


def _library_on_hub(model_name: str, library_name: str | None, access_token: str | None) -> str:
    """The library that a model of the Hub is for, which may be known before."""
    failure = f"Cannot build the model {model_name!r} without its weights."
    try:
        answer = verify_on_hub(model_name, access_token)
    except Exception:
        # With a known library, the model may be in the cache of a machine that does not reach the Hub.
        if library_name is None:
            raise
        return library_name
    if answer == "gated":
        raise NoAccess(
            failure,
            "Access to it is restricted on the Hub.",
            "Request access on the Hub, and log in with `hf auth login`.",
        )
    if answer == "repo":
        raise NotFound(failure, "There is no such model on the Hub.", "Check its name; private models need a token.")
    library = library_name or getattr(answer, "library_name", None)
    if library not in _LIBRARIES:
        obstacle = (
            f"The Hub specifies the library {library}, which is not supported."
            if library
            else "The Hub does not specify its library."
        )
        raise SettingError(failure, obstacle, f"Give --library_name: {' or '.join(_LIBRARIES)}.")
    return str(library)


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, float]:  # noqa: A002
    """Bytes at each moment of training with Adam: of the model, the optimizer, the gradients, and in a step.

    Args:
        bytes: those of the model in float32.
        mixed_precision: name of a dtype; one that is not trained in gives -1 for each moment.
        msamp_config: taken as the original does, and without effect.
    """
    del msamp_config
    times = _TRAINED.get(mixed_precision)
    if times is None:
        return dict.fromkeys(_IN_HALF, -1)
    return {moment: int(bytes * factor) for moment, factor in times.items()}


def gather_data(args: Namespace) -> list[list[Any]]:
    """For each dtype its name, and bytes of the largest layer, of the whole model, and of training with Adam.

    Args:
        args: what the parser of `estimate-memory` made of a command line.
    """
    model = model_of(args)
    total, (largest, _) = calculate_maximum_sizes(model)
    return [
        [dtype, largest / _SMALLER[dtype], total / _SMALLER[dtype], estimate_training_usage(total, dtype)]
        for dtype in args.dtypes
    ]
