"""The steps that prepare the models of a run, as an ordered list.

`prepare` runs the list from first to last and logs it with numbers; tests compare it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import Module

from accel_bigmodel.hooks import is_dispatched
from accel_plugins.bundle import Bundle
from accel_plugins.layers import backend_of, record_layer, record_wrapped
from accel_plugins.manifest import Manifest
from accel_plugins.transform import Transform, ordered
from accel_state.errors import Conflict

if TYPE_CHECKING:
    from accel_plugins.strategy import Strategy

__all__ = ("PrepareStep", "check_bundle", "numbered", "steps")


class PrepareStep(NamedTuple):
    """One step of `prepare`.

    Args:
        name: the step's name in the log.
        run: applies the step to a bundle and returns the bundle for the next step.
    """

    name: str
    run: Callable[[Bundle], Bundle]


def steps(
    manifest: Manifest,
    strategy: Strategy,
    transforms: Iterable[Transform] = (),
    moves: Callable[[Module], bool] = lambda model: True,
    trains: bool = True,
) -> list[PrepareStep]:
    """The steps that prepare models, in order.

    Args:
        manifest: the backend's manifest.
        strategy: the backend's strategy.
        transforms: the transforms of the run; this function adds those of `strategy.transforms()`.
        moves: returns whether to move a model to the device.
        trains: False leaves out the step that calls `Strategy.setup`, for models that are only evaluated.
    """
    before, after = ordered([*transforms, *strategy.transforms()], manifest)
    autocast = _autocast(manifest, strategy)
    early = autocast if manifest.capabilities.autocast_before_wrap else []
    return [
        PrepareStep("place", lambda bundle: _place(bundle, strategy, moves)),
        *(_transformation(transform, strategy) for transform in before),
        *early,
        *([PrepareStep(manifest.name, lambda bundle: _set_up(bundle, manifest.name, strategy))] if trains else []),
        *([] if early else autocast),
        *(_transformation(transform, strategy, around=True) for transform in after),
    ]


def check_bundle(manifest: Manifest, strategy: Strategy, transforms: Iterable[Transform], bundle: Bundle) -> None:
    """Call the checks of the strategy, the precision and every transform, before anything is changed."""
    for item in (*bundle.unchanged, *bundle.models):
        maker = backend_of(item) if isinstance(item, Module) else None
        if maker not in (None, manifest.name):
            raise Conflict(
                f"Cannot prepare {type(item).__name__} with the backend {manifest.name!r}.",
                f"The backend {maker!r} prepared it earlier and changed how it trains.",
                "Create a new model and prepare that one.",
            )
    strategy.check(bundle)
    strategy.context.precision.check(bundle)
    for phase in ordered([*transforms, *strategy.transforms()], manifest):
        for transform in phase:
            transform.check(bundle, strategy.context)


def numbered(planned: Sequence[PrepareStep]) -> str:
    """The steps as text: "1. place, 2. bf16, 3. ddp"."""
    return ", ".join(f"{number}. {step.name}" for number, step in enumerate(planned, start=1))


def _place(bundle: Bundle, strategy: Strategy, moves: Callable[[Module], bool]) -> Bundle:
    def place(model: Module) -> Module:
        # The device map, or the hooks, have placed the weights of a dispatched model.
        return strategy.place(model) if moves(model) and not is_dispatched(model) else model

    return _changed(bundle, place)


def _changed(bundle: Bundle, change: Callable[[Module], Module]) -> Bundle:
    """Replace each model by `change(model)`; optimizers receive the new parameters."""
    before = bundle.parameter_names()
    bundle.models[:] = [change(model) for model in bundle.models]
    bundle.rebind_by_name(before)
    return bundle


def _precise(bundle: Bundle, strategy: Strategy) -> Bundle:
    before = bundle.parameter_names()
    strategy.context.precision.setup(bundle, strategy.capabilities.per_parameter_sharding)
    bundle.rebind_by_name(before)
    return bundle


def _autocast(manifest: Manifest, strategy: Strategy) -> list[PrepareStep]:
    precision = strategy.context.precision
    if manifest.capabilities.own_precision and not precision.swaps_modules:
        return []
    return [PrepareStep(f"precision {precision.name}", lambda bundle: _precise(bundle, strategy))]


def _set_up(bundle: Bundle, name: str, strategy: Strategy) -> Bundle:
    bundle = strategy.setup(bundle)
    record_wrapped(name, strategy.unwrap, bundle.models)
    return bundle


def _transformation(transform: Transform, strategy: Strategy, around: bool = False) -> PrepareStep:
    """The step of a transform; `around`: whether the strategy has wrapped the models already."""

    def change(model: Module) -> Module:
        changed = transform.apply(model, strategy.context)
        if around:
            record_layer(changed, model)
        return changed

    return PrepareStep(transform.name, lambda bundle: _changed(bundle, change))
