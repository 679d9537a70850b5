"""Names of packages that this one does not require: without their package they can be imported, but not used.

A script that imports `MegatronLMPlugin` for one of its branches runs without accel-megatron if it takes another branch.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from accel_plugins.separate import SEPARATE_PACKAGES, install_remedy
from accel_state.errors import Missing

__all__ = ("SEPARATE", "MissingName")

SEPARATE: Final = {package.replace("-", "_"): package for package in SEPARATE_PACKAGES.values()}
"""Import name of each such package -> its name on an index."""


class MissingName(type):
    """The metaclass of a class that stands for a name of a package that is not installed.

    `isinstance` with such a class is False; all else raises.

    Args:
        name: the name.
        package: the import name of the package that defines it.

    Example:
        >>> plugin = MissingName("MegatronLMPlugin", "accel_megatron")
        >>> isinstance(3, plugin)
        False
    """

    _package: str

    def __new__(cls, name: str, package: Any, *subclass: Any) -> MissingName:
        """Create the class; a subclass of it raises."""
        if subclass:
            package[0]._refuse(f"derive the class {name} from")  # noqa: SLF001 - of the same class
        created = super().__new__(cls, name, (), {})
        created._package = package
        return created

    def __init__(cls, name: str, package: Any, *subclass: Any) -> None:
        super().__init__(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error that names the package to install."""
        cls._refuse("call")

    def __getitem__(cls, key: Any) -> NoReturn:
        """Raise, for names that stand for tables."""
        cls._refuse("read")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._refuse(f"read the attribute {name!r} of")

    def _refuse(cls, use: str) -> NoReturn:
        distribution = SEPARATE[cls._package]
        raise Missing(
            f"Cannot {use} accelerate's {cls.__name__}.",
            f"It is defined by the package {distribution!r}, which is not installed.",
            install_remedy(distribution),
        )
