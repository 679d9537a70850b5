"""Offloaded weights that are used without their hooks: the values of plain torch, or an error that names the weight."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_bigmodel import (
    align_module_device,
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_state_dict_offloaded_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    offload_state_dict,
    remove_hook_from_submodules,
    save_weights,
    set_module_tensor_to_device,
)
from accel_state.errors import CheckpointError, NotOffered

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    model[1].running_mean.fill_(float(seed))  # type: ignore[operator]
    return model


def to_memory(model: Any, folder: Path) -> Any:
    return cpu_offload(model, CPU)


def to_disk(model: Any, folder: Path) -> Any:
    return disk_offload(model, folder, CPU)


def by_map(model: Any, folder: Path) -> Any:
    device_map: dict[str, Any] = {name: "disk" for name, _ in model.named_children()}
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)


Offload = Callable[[Any, Path], Any]
WAYS = pytest.mark.parametrize("offload", [to_memory, to_disk, by_map])


class Direct(nn.Module):
    """Reads a weight outside of the forward of its module."""

    def __init__(self, read: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x, self.inner)


READINGS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "linear": lambda x, inner: F.linear(x, inner.weight, inner.bias),
    "a view": lambda x, inner: x @ inner.weight.T,
    "a result": lambda x, inner: x @ (2 * inner.weight).detach(),
    "data": lambda x, inner: x + inner.bias.data,
    "a list": lambda x, inner: torch.cat([x, inner.weight]),
    "a keyword": lambda x, inner: F.linear(input=x, weight=inner.weight),
    "parts": lambda x, inner: x @ inner.weight.split(2)[0].T,
    "a copy": lambda x, inner: x + inner.bias.to("cpu"),
    "a number": lambda x, inner: x * inner.bias.sum().item(),
    "numbers": lambda x, inner: x * inner.bias.tolist()[0],
}


@WAYS
@pytest.mark.parametrize("reading", READINGS)
def test_a_weight_that_is_read_directly_is_named(reading: str, offload: Offload, tmp_path: Path) -> None:
    model = Direct(READINGS[reading])
    model(X)
    model = offload(model, tmp_path)
    name = "inner.bias" if reading in ("data", "a copy", "a number", "numbers") else "inner.weight"
    with pytest.raises(NotOffered, match=f"offloaded weight '{name}'") as caught:
        model(X)
    assert "preload_module_classes" in str(caught.value)


def test_a_weight_that_is_read_directly_is_right_when_its_reader_loads_it(tmp_path: Path) -> None:
    model = Direct(READINGS["linear"])
    expected = model(X)
    disk_offload(model, tmp_path, CPU, preload_module_classes=["Direct"])
    assert torch.equal(model(X), expected)
    with align_module_device(model):
        assert torch.equal(F.linear(X, model.inner.weight, model.inner.bias), expected)


def test_what_needs_no_data_is_answered() -> None:
    layer = cpu_offload(nn.Linear(4, 8), CPU)
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type, weight.is_meta) == ((8, 4), torch.float32, "meta", True)
    assert (weight.numel(), weight.nbytes, len(weight), weight.requires_grad) == (32, 128, 8, True)
    assert torch.zeros_like(weight, device="cpu").sum() == 0
    assert (2 * weight).T.shape == (4, 8)
    assert "Placeholder" in repr(weight)
    assert not weight.requires_grad_(False).requires_grad
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert all(value.is_meta for value in layer.state_dict().values())


@WAYS
def test_a_part_that_is_added_on_the_device_of_an_offloaded_weight_is_named(offload: Offload, tmp_path: Path) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(4, 8, bias=False, device=base.weight.device)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.down(x)  # type: ignore[no-any-return]

    model = offload(build(), tmp_path)
    expected = model(X)
    model[0] = Adapted(model[0])
    with pytest.raises(NotOffered, match=r"'0\.down\.weight' is on the meta device"):
        model(X)
    model[0].down = nn.Linear(4, 8, bias=False)
    nn.init.zeros_(model[0].down.weight)
    assert torch.equal(model(X), expected)


@WAYS
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_training_an_offloaded_model_is_refused(optimizer: Any, offload: Offload, tmp_path: Path) -> None:
    with torch.enable_grad():
        model = offload(build(), tmp_path)
        before = model(X)
        steps = optimizer(model.parameters(), lr=0.1)
        for _ in range(2):
            steps.zero_grad()
            model(X).pow(2).mean().backward()
            with pytest.raises(NotOffered, match=r"'\d\.(weight|bias)'(.|\n)*train"):
                steps.step()
        assert torch.equal(model(X), before)


def test_a_part_beside_offloaded_weights_that_need_no_gradient_trains(tmp_path: Path) -> None:
    class Adapted(nn.Sequential):
        def __init__(self, base: nn.Module) -> None:
            super().__init__(base, nn.Linear(2, 2))

    def train(model: nn.Module) -> Tensor:
        with torch.enable_grad():
            steps = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            for _ in range(3):
                steps.zero_grad()
                model(X).pow(2).mean().backward()
                steps.step()
            return model(X).detach()  # type: ignore[no-any-return]

    torch.manual_seed(5)
    plain = Adapted(build().requires_grad_(False))
    offloaded = copy.deepcopy(plain)
    offloaded[0] = disk_offload(offloaded[0], tmp_path, CPU)
    assert torch.equal(train(offloaded), train(plain))


@WAYS
@pytest.mark.parametrize("assign", [False, True])
def test_new_weights_for_an_offloaded_model_are_refused_as_a_whole(
    assign: bool, offload: Offload, tmp_path: Path
) -> None:
    model = offload(build(1), tmp_path)
    expected = model(X)
    with pytest.raises(NotOffered, match=r"'0\.weight' is offloaded") as caught:
        model.load_state_dict(build(5).state_dict(), assign=assign)
    assert "Nothing was loaded" in str(caught.value)
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    model.load_state_dict(build(5).state_dict(), assign=assign)
    assert torch.equal(model(X), build(5)(X))


def test_new_weights_for_one_module_are_refused() -> None:
    model = cpu_offload(build(1), CPU)
    expected = model(X)
    for assign in (False, True):
        with pytest.raises(NotOffered, match="Cannot load new weights into Linear: 'weight' is offloaded"):
            model[0].load_state_dict(build(5)[0].state_dict(), assign=assign)
    model[0].weight = build(5)[0].weight
    with pytest.raises(NotOffered, match=r"'0\.weight', which was set after it was offloaded"):
        model(X)
    set_module_tensor_to_device(model, "2.bias", "cpu", torch.zeros(2))
    with pytest.raises(NotOffered, match="was set after"):
        model(X)
    with pytest.raises(NotOffered, match=r"Cannot compute with the offloaded weight '2\.bias'"), torch.no_grad():
        model[2].bias.copy_(torch.zeros(2))
    with pytest.raises(NotOffered, match=r"Cannot change the offloaded weight '2\.bias'"), torch.no_grad():
        model[2].bias.zero_()
    assert torch.equal(cpu_offload(build(1), CPU)(X), expected)


def test_weights_that_are_not_offloaded_can_be_loaded(tmp_path: Path) -> None:
    model = dispatch_model(
        build(1), {"0": "cpu", "1": "cpu", "2": "disk"}, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    expected = build(1)
    state = {name: value for name, value in build(5).state_dict().items() if name.startswith("0.")}
    model.load_state_dict(state, strict=False)
    expected.load_state_dict(state, strict=False)
    assert torch.equal(model(X), expected(X))


@WAYS
def test_a_model_is_offloaded_once(offload: Offload, tmp_path: Path) -> None:
    model, expected = offload(build(), tmp_path / "first"), build()(X)
    for again in (to_memory, to_disk, by_map):
        with pytest.raises(NotOffered, match="remove_hook_from_submodules"):
            again(model, tmp_path / "second")
    with pytest.raises(NotOffered, match="Remove the hooks"):
        model.to(torch.float64)
    assert not (tmp_path / "second").exists()
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(offload(model, tmp_path / "third")(X), expected)


@WAYS
def test_copies_of_an_offloaded_model_are_guarded_too(offload: Offload, tmp_path: Path) -> None:
    model = offload(build(), tmp_path)
    expected = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), expected)
        with pytest.raises(NotOffered, match=r"'0\.weight'"):
            F.linear(X, twin[0].weight)
        with pytest.raises(NotOffered, match="Cannot load new weights"):
            twin.load_state_dict(build(5).state_dict())
        whole = get_state_dict_offloaded_model(twin)
        assert all(torch.equal(whole[name], value) for name, value in build().state_dict().items())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), expected)


def test_a_weight_with_two_names_and_a_module_with_two_parents(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(4, 4)
            self.first, self.second = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Linear(4, 4))
            self.second[1].weight = shared.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))  # type: ignore[no-any-return]

    model = Twice()
    expected = model(X)
    for number, offload in enumerate((to_memory, to_disk, by_map)):
        twin = offload(copy.deepcopy(model), tmp_path / str(number))
        for _ in range(2):
            assert torch.equal(twin(X), expected)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"0": "cpu", "1": "disk", "2": "cpu"}])
def test_a_weight_that_the_checkpoint_lacks_is_named(device_map: Any, tmp_path: Path) -> None:
    state = dict(build().state_dict())
    state["2.kernel"] = state.pop("2.weight")
    save_weights(state, tmp_path / "checkpoint")
    with init_empty_weights():
        model = build_empty()
    with pytest.raises(CheckpointError, match=r"stay on the meta device: 2\.weight"):
        load_checkpoint_and_dispatch(model, tmp_path / "checkpoint", device_map, offload_folder=tmp_path)
    whole = load_checkpoint_and_dispatch(build(), tmp_path / "checkpoint")
    assert torch.equal(whole(X), build()(X))


def build_empty() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.frequencies


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"a": "cpu", "b": "disk", "frequencies": "disk"}])
def test_a_buffer_that_no_checkpoint_holds_is_named(device_map: Any, tmp_path: Path) -> None:
    save_weights(Positions().state_dict(), tmp_path / "checkpoint")
    with init_empty_weights(include_buffers=True):
        model = Positions()
    with pytest.raises(CheckpointError, match="its buffers frequencies are on the meta device"):
        load_checkpoint_and_dispatch(model, tmp_path / "checkpoint", device_map, offload_folder=tmp_path)
    offload_state_dict(tmp_path / "weights", Positions().state_dict())
    with init_empty_weights(include_buffers=True):
        model = Positions()
    with pytest.raises(CheckpointError, match=r"'frequencies'(.|\n)*persistent=False"):
        disk_offload(model, tmp_path / "weights", CPU)


# ---------------------------------------------------------------------- loading again


@WAYS
@pytest.mark.parametrize("load", [load_checkpoint_in_model, load_checkpoint_and_dispatch])
def test_a_checkpoint_replaces_offloaded_weights(offload: Offload, load: Callable[..., Any], tmp_path: Path) -> None:
    for seed in (1, 2):
        save_weights(build(seed).state_dict(), tmp_path / str(seed))
    model = offload(build(), tmp_path / "offloaded")
    for seed in (1, 2, 1):
        load(model, tmp_path / str(seed))
        assert torch.equal(model(X), build(seed)(X))
        assert torch.equal(get_state_dict_offloaded_model(model)["0.weight"], build(seed).state_dict()["0.weight"])
    assert model[0].weight.is_meta
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), build(1)(X))


@WAYS
def test_a_checkpoint_of_some_weights_leaves_the_other_offloaded_ones(offload: Offload, tmp_path: Path) -> None:
    part = {"0.weight": build(1).state_dict()["0.weight"]}
    save_weights(part, tmp_path / "part")
    model, expected = offload(build(), tmp_path / "offloaded"), build()
    load_checkpoint_and_dispatch(model, tmp_path / "part")
    expected.load_state_dict(part, strict=False)
    assert torch.equal(model(X), expected(X))
