"""The suites of the backends of the catalogues, as their authors would write them: each algorithm in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from catalogues.compressing_backends import SignConfig
from catalogues.local_step_backends import DiLoCoConfig
from torch import Tensor
from torch.nn import Module

from accel_testing.backends import BackendSuite, Case, loss_of, make_optimizer
from accel_testing.backends.base import MicroBatches
from accel_testing.processes import Processes

__all__ = ("CompressedSuite", "ExactSuite", "LocalStepsSuite", "SuiteOfACatalogue")


def gradients_of(case: Case, model: Module, micro_batches: MicroBatches) -> list[Tensor]:
    """The gradients of one process's step."""
    for inputs, targets in micro_batches:
        (loss_of(model, inputs, targets) / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    return gradients


class SuiteOfACatalogue(BackendSuite):
    """The catalogues keep manifest and settings in the module of the strategies."""

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, importable: None) -> Iterator[Processes]:
        """Processes that import the catalogues."""
        with Processes(cls.processes) as group:
            yield group

    @pytest.mark.xfail(strict=True, reason="the manifests of the catalogue are in one module with the strategies")
    def test_manifest_and_settings_load_without_torch(self) -> None:
        super().test_manifest_and_settings_load_without_torch()


class LocalStepsSuite(SuiteOfACatalogue):
    """DiLoCo."""

    config: ClassVar[Any] = DiLoCoConfig(period=4)
    neutral: ClassVar[Any] = DiLoCoConfig(period=4, outer_rate=1.0, outer_momentum=0.0)

    def reference(self, case: Case, batches_of_ranks: Sequence[Sequence[MicroBatches]]) -> list[Mapping[str, Tensor]]:
        config: DiLoCoConfig = case.config
        models = [case.make() for _ in batches_of_ranks]
        optimizers = [make_optimizer(case, model) for model in models]
        anchor = case.make()
        momentum = config.outer_momentum
        outer = torch.optim.SGD(anchor.parameters(), lr=config.outer_rate, momentum=momentum, nesterov=momentum > 0)
        for step, micro_batches_of_ranks in enumerate(zip(*batches_of_ranks, strict=True), start=1):
            for model, optimizer, micro_batches in zip(models, optimizers, micro_batches_of_ranks, strict=True):
                for parameter, gradient in zip(
                    model.parameters(), gradients_of(case, model, micro_batches), strict=True
                ):
                    parameter.grad = gradient
                optimizer.step()
                optimizer.zero_grad()
            if step % config.period == 0:
                for kept, *local in zip(anchor.parameters(), *(model.parameters() for model in models), strict=True):
                    kept.grad = kept.detach() - torch.stack([one.detach() for one in local]).mean(0)
                outer.step()
                for model in models:
                    model.load_state_dict(anchor.state_dict())
        return [model.state_dict() for model in models]


class ExactSuite(SuiteOfACatalogue):
    """Signs with feedback, whose settings leave gradients as they are."""


class CompressedSuite(SuiteOfACatalogue):
    """Signs with feedback."""

    config: ClassVar[Any] = SignConfig(compress=True)
    neutral: ClassVar[Any] = SignConfig()
    lacks: ClassVar[frozenset[str]] = frozenset({"exact_gradients"})

    def reference(self, case: Case, batches_of_ranks: Sequence[Sequence[MicroBatches]]) -> list[Mapping[str, Tensor]]:
        model = case.make()
        optimizer = make_optimizer(case, model)
        unsent = [[torch.zeros_like(one) for one in model.parameters()] for _ in batches_of_ranks]
        for micro_batches_of_ranks in zip(*batches_of_ranks, strict=True):
            sent = []
            for left, micro_batches in zip(unsent, micro_batches_of_ranks, strict=True):
                gradients = gradients_of(case, model, micro_batches)
                wanted = [gradient + rest for gradient, rest in zip(gradients, left, strict=True)]
                sent.append([one.abs().mean() * one.sign() for one in wanted])
                left[:] = [one - message for one, message in zip(wanted, sent[-1], strict=True)]
            for parameter, *messages in zip(model.parameters(), *sent, strict=True):
                parameter.grad = torch.stack(messages).mean(0)
            optimizer.step()
            optimizer.zero_grad()
        return [model.state_dict()] * len(batches_of_ranks)
