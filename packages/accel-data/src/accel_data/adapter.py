"""A loader that wraps another loader, and shows the attributes and the class of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from accel_data.stateful import stateful_loader_class
from accel_state.errors import NotOffered

__all__ = ("DataLoaderAdapter",)


class DataLoaderAdapter(DataLoader[Any]):
    """Wraps an inner `DataLoader` and has all its attributes.

    Args:
        dataset: the data set.
        use_stateful_dataloader: create torchdata's `StatefulDataLoader`.
        batch_sampler: yields batches of indices.
        kwargs: arguments of `torch.utils.data.DataLoader`.

    Attributes:
        base_dataloader: the inner loader.
        dl_state_dict: the last result of `state_dict`.

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
        base: DataLoader[Any] = loader_class(dataset, batch_sampler=batch_sampler, **kwargs)
        # Without `DataLoader.__setattr__`, which this object is not ready for.
        vars(self).update(base_dataloader=base, use_stateful_dataloader=use_stateful_dataloader)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the inner loader: scripts expect an instance of it, and of this class."""
        return type(vars(self).get("base_dataloader", self))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __reduce__(self) -> Any:
        # The default gives up where `__class__` is not the type.
        return object.__new__, (type(self),), self.__getstate__()

    def __getattr__(self, name: str) -> Any:
        # An object that is being copied or unpickled has no inner loader yet.
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
        """The loader's position.

        Raises:
            NotOffered: the inner loader has no `state_dict`.
        """
        self.dl_state_dict = self._state()
        self.adjust_state_dict_for_prefetch()
        return self.dl_state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the position of `state_dict`.

        Raises:
            NotOffered: the inner loader has no `load_state_dict`.
        """
        self._positioned().load_state_dict(state_dict)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Correct `dl_state_dict` in place before it is returned; for subclasses.

        This class corrects nothing: positions count the batches that the loop received, not prefetched ones.
        """

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._positioned().state_dict()
        return state

    def _positioned(self) -> Any:
        base = self.base_dataloader
        if not hasattr(base, "state_dict"):
            raise NotOffered(
                f"Cannot save or load the position of a {type(base).__name__}.",
                "Only torchdata's StatefulDataLoader and prepared loaders have a position.",
                "Give use_stateful_dataloader=True, or prepare the loader.",
            )
        return base
