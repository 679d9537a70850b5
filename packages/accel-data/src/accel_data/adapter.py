"""A loader around another one: torch and users take it for a `DataLoader`, and it shows all attributes of the inner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from accel_data.stateful import stateful_loader_class
from accel_state.errors import NotOffered

__all__ = ("DataLoaderAdapter",)


class DataLoaderAdapter(DataLoader[Any]):
    """Holds an inner `DataLoader` and shows its attributes as its own.

    Args:
        dataset: the data set.
        use_stateful_dataloader: make torchdata's `StatefulDataLoader`.
        batch_sampler: gives the batches of indices.
        kwargs: of `torch.utils.data.DataLoader`.

    Attributes:
        base_dataloader: the inner loader.
        dl_state_dict: what `state_dict` returned last.

    Raises:
        Missing: torchdata is needed and not installed.
    """

    base_dataloader: DataLoader[Any]
    use_stateful_dataloader: bool
    dl_state_dict: dict[str, Any]

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        loader_class = stateful_loader_class() if use_stateful_dataloader else DataLoader
        self.hold(loader_class(dataset, batch_sampler=batch_sampler, **kwargs), use_stateful_dataloader)

    def hold(self, base: DataLoader[Any], use_stateful_dataloader: bool = False) -> None:
        """Set the inner loader."""
        self.__dict__.update(base_dataloader=base, use_stateful_dataloader=use_stateful_dataloader)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the inner loader, so that `isinstance` answers for both."""
        return type(self.__dict__.get("base_dataloader", self))

    def __copy__(self) -> DataLoaderAdapter:
        return _made_of(type(self), self.__dict__)

    def __reduce__(self) -> Any:
        # Pickle refuses to make an object of a class other than the one that `__class__` names.
        return _made_of, (type(self), self._kept())

    def _kept(self) -> dict[str, Any]:
        """The attributes that a pickle holds."""
        return self.__dict__

    def __getattr__(self, name: str) -> Any:
        # A copy or a pickle that is being made has no inner loader yet.
        if name.startswith("__") or "base_dataloader" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name not in own and "base_dataloader" in own and name in vars(self.base_dataloader):
            setattr(self.base_dataloader, name, value)
        else:
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands.

        Raises:
            NotOffered: the inner loader does not know its position.
        """
        self.dl_state_dict = self._state()
        self.adjust_state_dict_for_prefetch()
        return self.dl_state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` says.

        Raises:
            NotOffered: the inner loader does not know its position.
        """
        self._positioned().load_state_dict(state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Correct `dl_state_dict` in place before it is returned; for subclasses.

        This class corrects nothing: positions count what the loop received, not what was read ahead.
        """

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._positioned().state_dict()
        return state

    def _positioned(self) -> Any:
        base = self.base_dataloader
        if not hasattr(base, "state_dict"):
            raise NotOffered(
                f"Cannot save or load the position of a {type(base).__name__}.",
                "Only torchdata's StatefulDataLoader and prepared loaders know their position.",
                "Give use_stateful_dataloader=True, or prepare the loader.",
            )
        return base


def _made_of(kind: type[DataLoaderAdapter], attributes: dict[str, Any]) -> DataLoaderAdapter:
    loader = kind.__new__(kind)
    loader.__dict__.update(attributes)
    return loader
