"""The functions behind `accelerate estimate-memory`, as libraries and tests call them at their old address."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from accelerate.commands.estimate import (
    check_has_model,
    create_empty_model,
    estimate_command,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
    verify_on_hub,
)

MODEL = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False), torch.nn.Linear(512, 8))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small_model.py"
    path.write_text(MODEL, encoding="utf-8")
    return f"{path}:make"


def test_estimate_memory_has_a_row_for_each_dtype(model: str) -> None:
    args = estimate_command_parser().parse_args([model, "--dtypes", "float32", "float16", "int8", "int4"])
    full = {"model": 540704, "optimizer": 1081408, "gradients": 540704, "step": 2162816}
    half = {"model": 540704, "optimizer": 1081408, "gradients": 811056, "step": 1081408}
    untrained = {"model": -1, "optimizer": -1, "gradients": -1, "step": -1}
    # What the original answers for the same model.
    assert gather_data(args) == [
        ["float32", 524288, 540704, full],
        ["float16", 262144.0, 270352.0, half],
        ["int8", 131072.0, 135176.0, untrained],
        ["int4", 65536.0, 67588.0, untrained],
    ]


def test_a_model_without_memory(model: str) -> None:
    made = create_empty_model(model, "transformers")
    assert {parameter.device for parameter in made.parameters()} == {torch.device("meta")}


@pytest.mark.parametrize(
    ("told", "kind", "said"),
    [
        ("repo", FileNotFoundError, "no such model on the Hub"),
        ("gated", PermissionError, "hf auth login"),
        (SimpleNamespace(library_name=None), ValueError, "does not specify its library"),
        (SimpleNamespace(library_name="diffusers"), ValueError, "library diffusers"),
    ],
)
def test_create_empty_model_of_models_that_the_hub_refuses(told: object, kind: type[Exception], said: str) -> None:
    with (
        mock.patch("accelerate.commands.estimate.verify_on_hub", return_value=told) as asked,
        pytest.raises(kind, match=said),
    ):
        create_empty_model("some/model", None, access_token="secret")  # type: ignore[arg-type]
    asked.assert_called_once_with("some/model", "secret")


@pytest.mark.parametrize("library", [[], ["--library_name", "timm"], ["--library_name", "transformers"]])
def test_the_command_asks_the_hub_for_a_model_that_is_not_here(library: list[str]) -> None:
    args = estimate_command_parser().parse_args(["some/model", *library])
    with (
        mock.patch("accelerate.commands.estimate.verify_on_hub", return_value="gated"),
        pytest.raises(OSError, match="hf auth login"),
    ):
        estimate_command(args)


@pytest.mark.parametrize(("error", "told"), [("GatedRepoError", "gated"), ("RepositoryNotFoundError", "repo")])
def test_verify_on_hub_of_models_that_the_hub_refuses(error: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    kind = getattr(importlib.import_module("huggingface_hub.errors"), error)

    def refuse(repo: str, token: str | None = None) -> None:
        # Made without its constructor, which wants an answer of the Hub.
        raise kind.__new__(kind)

    monkeypatch.setattr(hub, "model_info", refuse)
    assert verify_on_hub("some/model") == told
    monkeypatch.setattr(hub, "model_info", lambda repo, token=None: (repo, token))
    assert verify_on_hub("some/model", "secret") == ("some/model", "secret")


def test_bytes_of_training() -> None:
    assert estimate_training_usage(1000, "float32") == {
        "model": 1000,
        "optimizer": 2000,
        "gradients": 1000,
        "step": 4000,
    }
    assert estimate_training_usage(1000, "bfloat16", "O1")["gradients"] == 1500
    assert set(estimate_training_usage(1000, "int8").values()) == {-1}


def test_errors_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown, lost = RuntimeError("Unknown model (x)"), OSError("x does not appear to have a file named config.json")
    monkeypatch.setattr("accelerate.legacy.estimating.importable", lambda module: True)
    assert [check_has_model(error) for error in (unknown, lost, ValueError("x"))] == ["timm", "transformers", "unknown"]
    monkeypatch.setattr("accelerate.legacy.estimating.importable", lambda module: False)
    assert [check_has_model(error) for error in (unknown, lost)] == ["unknown", "unknown"]
