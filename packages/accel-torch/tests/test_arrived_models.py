"""Models that arrive distributed train like whole ones in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from accel_bigmodel import load_checkpoint_in_model
from accel_state.errors import Conflict, NotOffered
from accel_testing.processes import Processes
from accel_torch import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin

SAMPLES, BATCH, ACCUMULATED = 32, 8, 2


class Experts(nn.Module):
    """Every expert sees every token, weighted by a gate; the experts may be sharded over an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.weight = nn.Parameter(torch.randn(4, 6, 6) * 0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        gates = self.gate(inputs).softmax(-1).T.unsqueeze(-1)
        weight: Any = self.weight
        if not isinstance(weight, DTensor):
            return (torch.einsum("td,edh->eth", inputs, weight) * gates).sum(0)
        mesh = weight.device_mesh
        tokens, shares = (DTensor.from_local(one, mesh, [Replicate()]) for one in (inputs, gates))
        outputs: Any = (torch.einsum("td,edh->eth", tokens, weight) * shares).sum(0)
        return outputs.full_tensor()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(3, 10), nn.Linear(10, 6), nn.LayerNorm(6)
        self.experts, self.head = Experts(), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.down(self.up(inputs).tanh()))
        return self.head(self.experts(hidden))


def network(kind: str) -> tuple[Network, int]:
    """A model that arrives distributed, and the number of shards of the data."""
    model, world = Network(), torch.distributed.get_world_size() if kind else 1
    data, other = (world, 1) if kind in ("fsdp", "fsdp root") else (world // 2, 2)
    mesh = init_device_mesh("cpu", (data, other), mesh_dim_names=("data", "other")) if kind else None
    if mesh is None:
        return model, 1
    if "tp" in kind:
        parallelize_module(model, mesh["other"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "ep" in kind:
        model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight.detach(), mesh["other"], [Shard(0)]))
    if "fsdp" in kind:
        blocks = [model.up, model.down] if "tp" in kind else [model.experts, model.head]
        ignored = {model.experts.weight} if "ep" in kind else None
        for block in blocks:
            fully_shard(block, mesh=mesh["data"], ignored_params=ignored)
        if "root" in kind:
            fully_shard(model, mesh=mesh["data"], ignored_params=ignored)
    return model, data


def train(
    kind: str, precision: str = "no", folder: str = "", source: str = "", epochs: int = 1, chosen: bool = True
) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(2) if kind and chosen else None
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        mixed_precision=precision,
        gradient_accumulation_steps=ACCUMULATED,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 2, generator=generator)
    model, shards = network(kind)
    given = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.unwrap_model(model) is given
    if source:
        accelerator.load_state(source, allow_missing=("random_states",))
    losses, norms = [], []
    for _ in range(epochs):
        for own_inputs, own_targets in loader:
            assert len(own_inputs) == BATCH // shards
            with accelerator.accumulate(model):
                loss = (model(own_inputs) - own_targets).float().square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if folder:
        accelerator.save_state(folder)
    weights = {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def export(kind: str, folder: str) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2))
    model = accelerator.prepare(network(kind)[0])
    accelerator.save_model(model, folder, max_shard_size="1KB")


def check(answers: list[Any], expected: dict[str, Any], atol: float = 1e-5) -> None:
    for answer in answers:
        assert answer["losses"] == pytest.approx(expected["losses"], abs=atol)
        assert answer["norms"] == pytest.approx(expected["norms"], rel=max(1e-6, atol / 10))
    weights = answers[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        assert torch.allclose(torch.tensor(weights[name]), torch.tensor(values), atol=atol), name


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("kind", ["tp", "fsdp", "fsdp root", "ep"])
def test_on_two_processes(two: Processes, kind: str) -> None:
    check(two.run(train, kind), train(""))


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("kind", ["tp", "tp ep", "tp fsdp", "ep fsdp", "ep fsdp root", "tp fsdp root"])
def test_on_a_mesh_of_two_by_two(four: Processes, kind: str) -> None:
    check(four.run(train, kind), train(""))


@pytest.mark.usefixtures("fresh_state")
def test_in_bf16(four: Processes) -> None:
    check(four.run(train, "tp fsdp root", "bf16"), train("", "bf16"), 3e-2)


@pytest.mark.usefixtures("fresh_state")
def test_checkpoints_move_between_layouts(four: Processes, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("two by two", "four", "one"))
    expected = train("", epochs=3)
    four.run(train, "tp fsdp root", "no", first)
    four.run(train, "ep fsdp", "no", second, first)
    check(
        [train("", "no", third, second)], {**expected, "losses": expected["losses"][8:], "norms": expected["norms"][4:]}
    )


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("kind", ["tp fsdp root", "ep fsdp", "tp ep"])
def test_an_export_has_the_whole_weights(four: Processes, kind: str, tmp_path: Path) -> None:
    four.run(export, kind, str(tmp_path))
    expected, loaded = Network().state_dict(), Network()
    nn.init.zeros_(loaded.head.weight)
    load_checkpoint_in_model(loaded, str(tmp_path))
    assert (tmp_path / "model.safetensors.index.json").exists()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name


# ---------------------------------------------------------------------- the choice of the backend


@pytest.mark.usefixtures("fresh_state")
def test_a_run_without_a_chosen_backend_takes_the_one_for_such_models(two: Processes) -> None:
    check(two.run(train, "tp ep", "no", "", "", 1, False), train(""))


def refuse() -> list[str]:
    accelerator = Accelerator(cpu=True)
    model, _ = network("tp")
    accelerator.prepare(DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4))
    with pytest.raises(Conflict) as begun:
        accelerator.prepare(model)
    return [str(begun.value)]


def refuse_a_loader_before_the_model() -> list[str]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2))
    accelerator.prepare(DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4))
    with pytest.raises(Conflict) as read:
        accelerator.prepare(network("tp")[0])
    return [str(read.value)]


def refuse_with_chosen_backend() -> list[str]:
    accelerator = Accelerator(cpu=True, backend="ddp")
    model, _ = network("tp")
    with pytest.raises(NotOffered) as chosen:
        accelerator.prepare(model)
    return [str(chosen.value)]


@pytest.mark.usefixtures("fresh_state")
def test_a_backend_that_cannot_change_is_an_error_that_names_the_remedy(two: Processes) -> None:
    for (begun,) in two.run(refuse):
        assert "before anything else" in begun
    for (read,) in two.run(refuse_a_loader_before_the_model):
        assert "1 shards instead of 2" in read
    for (chosen,) in two.run(refuse_with_chosen_backend):
        assert "'ddp'" in chosen
        assert "choose 'fsdp2'" in chosen
