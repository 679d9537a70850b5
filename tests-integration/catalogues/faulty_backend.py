"""One backend of a catalogue: what is wrong with it, and the manifest by which a run finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from accel_plugins.manifest import Axis, Capabilities, Manifest
from accel_plugins.strategy import Strategy

__all__ = ("Faults", "FaultyBackend")

StrategyClass = TypeVar("StrategyClass", bound=type[Strategy])


@dataclass(frozen=True)
class FaultyBackend:
    """One backend of a catalogue and what is known of it.

    Args:
        name: of the entry; the backend is called the same.
        strategy: the class.
        truth: what is wrong, in one line; "nothing" for the control.
        where: the method that is wrong.
        finding: what a detector has to report.
        manifest: what the backend declares about itself.
    """

    name: str
    strategy: type[Strategy]
    truth: str
    where: str
    finding: str
    manifest: Manifest

    @property
    def target(self) -> str:
        """The way to `manifest`, as "module:name"."""
        return f"{self.strategy.__module__}:{self.name}"


class Faults(dict[str, FaultyBackend]):
    """The faults of one correct backend, by name.

    Args:
        config: the settings class of all of them, as "module:class".
        capabilities: what all of them declare.

    Attributes:
        control: the correct backend.
    """

    control: FaultyBackend

    def __init__(self, config: str, capabilities: Capabilities) -> None:
        super().__init__()
        self._config = config
        self._capabilities = capabilities

    def correct(self, name: str) -> Callable[[StrategyClass], StrategyClass]:
        """Register the correct backend."""

        def register(strategy: StrategyClass) -> StrategyClass:
            self.control = self._entry(name, strategy, "nothing", "", "nothing", self._capabilities)
            return strategy

        return register

    def broken(
        self, name: str, *, truth: str, where: str, finding: str, capabilities: Capabilities | None = None
    ) -> Callable[[StrategyClass], StrategyClass]:
        """Register a backend with one fault."""

        def register(strategy: StrategyClass) -> StrategyClass:
            self[name] = self._entry(name, strategy, truth, where, finding, capabilities or self._capabilities)
            return strategy

        return register

    def manifest(self, name: str) -> Manifest:
        """The manifest of an entry or of the control.

        Raises:
            AttributeError: there is no such entry.
        """
        if name == self.control.name:
            return self.control.manifest
        if name not in self:
            raise AttributeError(f"This catalogue has no backend {name!r}.")
        return self[name].manifest

    def _entry(
        self, name: str, strategy: type[Strategy], truth: str, where: str, finding: str, capabilities: Capabilities
    ) -> FaultyBackend:
        manifest = Manifest(
            name=name,
            strategy=f"{strategy.__module__}:{strategy.__name__}",
            config=self._config,
            axes=frozenset({Axis.REPLICATE}),
            capabilities=capabilities,
            protocol=3,
        )
        return FaultyBackend(name, strategy, truth, where, finding, manifest)
