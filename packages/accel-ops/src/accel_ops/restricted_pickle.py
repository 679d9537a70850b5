"""Read pickles that consist of a fixed list of classes and values, without running anything else.

The names that a pickle may use are given as a table. Nothing is imported for a name that is not in it, and a state is
given only to instances of classes in it: given to a class or a module, a state would change the program.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

__all__ = ("load_restricted",)

Names = Mapping[tuple[str, str], Any]

_MAX_HASHED_PARTS: Final = 1000
"""Of what is hashed: tuples that contain each other twice would be hashed forever."""
_MAX_ARGUMENT_PARTS: Final = 1 << 16


class _Unpickler(pickle._Unpickler):
    """An unpickler in Python, because the one in C gives a state to any object.

    Args:
        file: the pickle.
        names: see `load_restricted`.
    """

    # A copy, so that other unpicklers stay as they are.
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: Any, names: Names) -> None:
        super().__init__(file)
        self._names = names
        self._classes = tuple(value for value in names.values() if isinstance(value, type))

    def find_class(self, module: str, name: str) -> Any:
        """The value of a name in the table."""
        try:
            return self._names[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data") from None

    def persistent_load(self, pid: Any) -> Any:
        """Refuse a reference to something outside of the pickle."""
        raise pickle.UnpicklingError("it refers to something outside of it")

    def load_build(self) -> None:
        """Give a state to an instance of a class in the table."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state, instance = stack.pop(), stack[-1]
        if type(instance) not in self._classes:
            raise pickle.UnpicklingError(f"it gives a state to {instance!r:.100}")
        if hasattr(instance, "__setstate__"):
            instance.__setstate__(state)
        elif type(state) is dict and all(type(key) is str and key.isidentifier() for key in state):
            vars(instance).update(state)
        else:
            raise pickle.UnpicklingError(f"the state of {type(instance).__name__} does not consist of fields")

    def _demand_few_parts(self, items: Iterable[Any], most: int = _MAX_HASHED_PARTS) -> None:
        """Refuse what consists of too many parts, counted as often as hashing meets them."""
        for item in items:
            parts, count = [item], 0
            while parts:
                part, count = parts.pop(), count + 1
                if count > most:
                    raise pickle.UnpicklingError("it has values inside of each other without end")
                if isinstance(part, (tuple, list, frozenset)):
                    parts.extend(part)
                elif type(part) in self._classes:
                    parts.extend(getattr(part, "__dict__", {}).values())

    def load_setitem(self) -> None:
        """Set an item of a dict."""
        self._demand_few_parts(self.stack[-2:-1])  # type: ignore[attr-defined]
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        """Set items of a dict."""
        self._demand_few_parts(self.stack[::2])  # type: ignore[attr-defined]
        super().load_setitems()  # type: ignore[misc]

    def load_dict(self) -> None:
        """Make a dict of items."""
        self._demand_few_parts(self.stack[::2])  # type: ignore[attr-defined]
        super().load_dict()  # type: ignore[misc]

    def load_additems(self) -> None:
        """Add elements to a set."""
        self._demand_few_parts(self.stack)  # type: ignore[attr-defined]
        super().load_additems()  # type: ignore[misc]

    def load_frozenset(self) -> None:
        """Make a frozen set."""
        self._demand_few_parts(self.stack)  # type: ignore[attr-defined]
        super().load_frozenset()  # type: ignore[misc]

    def load_reduce(self) -> None:
        """Call something in the table, such as a set."""
        self._demand_few_parts(self.stack[-1:], _MAX_ARGUMENT_PARTS)  # type: ignore[attr-defined]
        super().load_reduce()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.FROZENSET[0]] = load_frozenset
    dispatch[pickle.REDUCE[0]] = load_reduce


def load_restricted(content: bytes, names: Names) -> Any:
    """The object of a pickle that uses only some names.

    Args:
        content: the pickle.
        names: by module and name as in pickles, what a pickle may use: classes, functions, and values such as dtypes.
            Any arguments may be passed to a class or function, so all of them must be harmless.

    Raises:
        pickle.UnpicklingError: it uses another name, or gives a state to something that is not an instance of a class.
        Exception: whatever a damaged pickle makes an unpickler raise.

    Example:
        >>> load_restricted(pickle.dumps({"a": {1}}), {})
        {'a': {1}}
        >>> load_restricted(pickle.dumps(print), {})
        Traceback (most recent call last):
        _pickle.UnpicklingError: it names builtins.print, which is not data
    """
    return _Unpickler(io.BytesIO(content), names).load()
