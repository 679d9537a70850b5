"""What the mixins of the Accelerator share: its session, and how it is copied and pickled."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from accel_torch.start_run import start_session

if TYPE_CHECKING:
    from accel_state.gradient import GradientState
    from accel_state.run_state import AcceleratorState
    from accel_torch.options import Options
    from accel_torch.session import Session

__all__ = ("Facade",)


class Facade:
    """The base of the mixins: a facade over a session.

    Attributes:
        session: what the Accelerator works with; the functions of this package receive it.
    """

    session: Session

    @property
    def state(self) -> AcceleratorState:
        """The process and its run."""
        return self.session.state

    @state.setter
    def state(self, state: AcceleratorState) -> None:
        self.session.state = state

    @property
    def gradient_state(self) -> GradientState:
        """The position in the window of micro-batches."""
        return self.session.gradient

    @gradient_state.setter
    def gradient_state(self, gradient: GradientState) -> None:
        self.session.gradient = gradient

    def __copy__(self) -> Facade:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.session = copy.copy(self.session)
        return other

    def __reduce__(self) -> Any:
        # An unpickled Accelerator joins the run of the process that unpickles it.
        session = self.session
        remembered = {name: value for name, value in vars(session.prepared).items() if name not in ("scaler", "guard")}
        options = session.options
        options = options._replace(backends=dict(options.backends), plugins=dict(options.plugins))
        return _taking_part, (type(self), options, remembered)


def _taking_part(kind: type[Facade], options: Options, remembered: dict[str, Any]) -> Facade:
    accelerator = kind.__new__(kind)
    accelerator.session = start_session(options)
    accelerator.session.restore(remembered)
    return accelerator
