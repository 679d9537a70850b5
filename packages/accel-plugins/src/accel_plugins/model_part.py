"""Which layers of a model a process builds, when each process trains others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

import torch

from accel_bigmodel.meta import init_empty_weights
from accel_ops.rng import synchronize_rng_state
from accel_state import current

__all__ = ("ModelPart", "random_numbers_of_first")


class ModelPart:
    """The part of a model that this process builds; `with accelerator.init_module() as part` returns it.

    The layers of a model are divided into consecutive stages with about the same number of layers. A process builds
    those of its stages. The others get parameters on the meta device, which need no memory, so that names, shapes and
    positions are the same on every process. Backends that do not divide layers return the whole model: one stage.

    Args:
        stages: numbers of this process's stages, from 0.
        count: number of stages of the whole model.

    Example:
        >>> part, layers = ModelPart(stages=(1,), count=2), []
        >>> for number in range(4):
        ...     with part.layer(number, 4):
        ...         layers.append(torch.nn.Linear(8, 8))
        >>> [layer.weight.is_meta for layer in layers]
        [True, True, False, False]
    """

    def __init__(self, stages: Collection[int] = (0,), count: int = 1) -> None:
        self.stages = tuple(sorted(stages))
        self.count = count
        self._seed: int | None = None

    def stage_of(self, number: int, layers: int) -> int:
        """The stage of a layer, given by its number from 0, of a model with so many layers."""
        return number * self.count // layers

    def has(self, number: int, layers: int) -> bool:
        """Whether this process builds a layer, given by its number from 0, of a model with so many layers."""
        return self.stage_of(number, layers) in self.stages

    @contextmanager
    def layer(self, number: int, layers: int) -> Iterator[None]:
        """A block that creates one layer, with parameters on the meta device if another process has it.

        Inside, the random numbers of torch follow from the number of the layer and from the state of the generator at
        the first layer of this part. So a layer has the same values on whichever process it is built.

        Args:
            number: number of the layer, from 0.
            layers: number of layers of the model.
        """
        if self._seed is None:
            self._seed = int(torch.randint(2**62, ()))
        process = current.process_or_none()
        # The parameters may be created on the device, which has a generator of its own.
        family = None if process is None or process.family.spec.rng_key is None else process.family
        on_host = torch.get_rng_state()
        on_device = None if family is None else family.current_rng_state()
        torch.manual_seed(self._seed + number)
        if family is not None:
            family.seed(self._seed + number)
        try:
            with nullcontext() if self.has(number, layers) else init_empty_weights():
                yield
        finally:
            torch.set_rng_state(on_host)
            if family is not None and on_device is not None:
                family.set_current_rng_state(on_device)


@contextmanager
def random_numbers_of_first() -> Iterator[None]:
    """A block in which torch draws the random numbers of the first process on every process; all processes enter it.

    Afterwards each process continues with its own random numbers.
    """
    own = torch.get_rng_state()
    synchronize_rng_state("torch")
    differs = not torch.equal(own, torch.get_rng_state())
    try:
        yield
    finally:
        if differs:
            torch.set_rng_state(own)
