"""A loop of your own under torchrun, with the collectives of accel-ops only: no Accelerator.

torchrun --nproc_per_node 2 collectives.py
"""

from __future__ import annotations

import torch
from torch import nn

from accel_ops import broadcast, gather, gather_object, pad_across_processes, reduce
from accel_state import PartialState


def main():
    state = PartialState(cpu=True)
    torch.manual_seed(state.process_index)  # other data and other first weights on each process
    inputs = torch.randn(64, 3)
    targets = inputs.sum(dim=1, keepdim=True)

    model = nn.Linear(3, 1)
    model.load_state_dict(broadcast(dict(model.state_dict())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        # One message for all gradients, with the mean of the processes.
        means = reduce({name: weight.grad for name, weight in model.named_parameters()}, op="mean")
        for name, weight in model.named_parameters():
            weight.grad = means[name]
        optimizer.step()
        optimizer.zero_grad()

    report = {"loss": loss.detach().view(1), "worst": torch.arange(1.0 + state.process_index)}
    everyone = gather(pad_across_processes(report))
    names = gather_object([f"rank {state.process_index}"])
    weights = gather(model.weight.detach())
    state.print(f"{', '.join(names)}: losses below 0.01: {bool((everyone['loss'] < 0.01).all())}")
    state.print("replicas agree:", torch.equal(weights[:1], weights[1:2]) or state.num_processes == 1)


if __name__ == "__main__":
    main()
