"""The tracker interface (a tracker stores the metrics of a run), and a base class for trackers that use a library.

An `Accelerator` constructs its trackers before the run begins (no vendor library is imported), starts them when it
begins, passes them the configuration and the metrics, and finishes them. To add a tracker, subclass `GeneralTracker`,
or `LibraryTracker` if a library stores the metrics. Pass an instance to `log_with=`, or register the class by name:
`register_tracker_class`, or the entry-point group `accel.trackers` of your package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from accel_state import current
from accel_state.errors import NotOffered
from accel_state.settings.installed import Requirement
from accel_state.topology import read_topology

__all__ = ("GeneralTracker", "LibraryTracker", "Tracker", "is_main_process", "on_main_process")

F = TypeVar("F", bound=Callable[..., Any])


def is_main_process() -> bool:
    """Whether this process is rank 0, from its state if there is one, else from the launcher's variables."""
    process = current.process_or_none()
    return (read_topology() if process is None else process).rank == 0


def on_main_process(function: F) -> F:
    """Decorator for a tracker method: only the main process runs it, and other processes return None.

    With `main_process_only = False` every process runs it. Each call checks the rank again, because a tracker may exist
    before the process group does.
    """

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and not is_main_process():
            return None
        return function(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class GeneralTracker:
    """Base class of every tracker; with `_blank=True`, a tracker that accepts every call and stores nothing.

    A subclass defines `name`, `requires_logging_directory` and `tracker`, and overrides the methods that
    it supports: `start`, `store_init_configuration`, `log`, `log_images`, `log_table`, `finish`. Its constructor takes
    the run's name first, and `logging_dir` second if the class requires one.

    Raises:
        NotOffered: a subclass lacks one of these three attributes.

    Example:
        class PrintTracker(GeneralTracker):
            name = "print"
            requires_logging_directory = False

            @property
            def tracker(self):
                return None

            @on_main_process
            def log(self, values, step=None, **kwargs):
                print(step, values)
    """

    name: str
    """Name that selects the tracker in `log_with=`."""

    requires_logging_directory: bool
    """Whether the tracker writes into a folder."""

    main_process_only: bool = True
    """Whether methods decorated with `on_main_process` run only on the main process."""

    requirement: ClassVar[Requirement | None] = None
    """The package that the tracker requires, or None."""

    def __init__(self, _blank: bool = False) -> None:
        self._blank = _blank
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if not hasattr(type(self), name)]
        # A subclass may also set `tracker` on the instance before it calls this constructor.
        missing = [name for name in missing if name not in vars(self)]
        if missing and not _blank:
            raise NotOffered(
                f"Cannot construct a tracker of the class {type(self).__qualname__}.",
                f"The class lacks the required attributes: {', '.join(f'`{name}`' for name in missing)}.",
                "Define them in the class; `tracker` is a property that returns the library's own object.",
            )

    def start(self) -> None:
        """Start the run: import the library and open what it writes to."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters of the run."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log metrics at a step.

        Args:
            values: name to number, text, or a mapping of these; numbers may be tensors.
            step: step of the metrics; if None, the tracker uses its own counter.
            kwargs: arguments for the library's own function.
        """

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: name to a batch of arrays, in the layout that the library expects, or of image objects.
            step: step of the images; if None, the tracker uses its own counter.
            kwargs: arguments for the library's own function.

        Raises:
            NotOffered: the tracker does not support images.
        """
        self._refuse("images")

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given as `columns` and rows of `data`, or as a `dataframe`.

        Args:
            table_name: name of the table.
            columns: names of the columns, with `data`.
            data: rows, each with one value per column.
            dataframe: a pandas DataFrame instead of `columns` and `data`.
            step: step of the table; if None, the tracker uses its own counter.
            kwargs: arguments for the library's own function.

        Raises:
            NotOffered: the tracker does not support tables.
        """
        self._refuse("tables")

    def finish(self) -> None:
        """Finish the run: when this returns, everything that was logged is stored."""

    def _refuse(self, what: str) -> None:
        if not self._blank:
            raise NotOffered(
                f"Cannot log {what} with the tracker {self.name!r}.",
                f"It does not support {what}.",
                "Log them with another tracker, from get_tracker(name), or as numbers and text.",
            )


Tracker = GeneralTracker


class LibraryTracker(GeneralTracker):
    """Base of a tracker that passes everything to a library; a subclass defines `open`, and the methods it supports.

    A subclass sets `name`, `requirement` and, if it writes into a folder, `requires_logging_directory`.

    Args:
        run_name: name of the run, or of the project that contains it.
        kwargs: arguments for the library's function that opens a run.

    Example:
        class ExampleTracker(LibraryTracker):
            name = "example"
            requirement = Requirement("examplelib", versions=">=2")

            def open(self):
                import examplelib

                return examplelib.start(self.run_name, **self.init_kwargs)

            @on_main_process
            def log(self, values, step=None, **kwargs):
                self.tracker.log(scalars_as_numbers(values), step=step, **kwargs)
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._opened: Any = None
        super().__init__()

    @property
    def tracker(self) -> Any:
        """The library's own object for the run; None until `start`, and on processes that do not log."""
        return self._opened

    @tracker.setter
    def tracker(self, opened: Any) -> None:
        self._opened = opened

    def open(self) -> Any:
        """Import the library, open the run, and return the library's object for it."""
        raise NotImplementedError("a subclass of LibraryTracker must define `open`")

    @on_main_process
    def start(self) -> None:
        """Open the run of the library.

        Raises:
            Missing: the library is not installed.
        """
        if self.requirement is not None:
            self.requirement.demand(f"Cannot start the tracker {self.name!r}.")
        self._opened = self.open()
