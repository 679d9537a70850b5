"""Change the backend for the first model of a run, if it arrives distributed and no backend was chosen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from accel_state import current
from accel_state.errors import Conflict

if TYPE_CHECKING:
    from accel_torch.session import Session

__all__ = ("session_for",)

_logger: Final = logging.getLogger(__name__)

_CARRIED: Final = ("report", "tracking", "uploader")
"""Attributes of a session that do not depend on the backend."""


def session_for(session: Session, objects: Iterable[Any]) -> Session:
    """The session that prepares some objects: the given one, or a new one that continues it with another backend.

    Args:
        session: the session of the Accelerator.
        objects: the arguments of `prepare`.

    Raises:
        NotOffered: a model arrives distributed, and the backend that was chosen does not accept it.
        Conflict: the run has begun already, so that its backend cannot change.
    """
    if session.backend.capabilities.distributed_models or session.process.world_size == 1:
        return session
    # Without DTensors no model can have them, and the import takes time.
    if "torch.distributed.tensor" not in sys.modules or not any(_arrives(item) for item in objects):
        return session
    from accel_plugins.resolve import for_distributed_models
    from accel_torch.start_run import leave, open_sessions, start_session

    options = session.options
    if options.backend or options.backend_config is not None or session.backend.switched_on:
        session.backend.demand("distributed_models")
    failed = "Cannot prepare a model that arrives distributed."
    chosen = for_distributed_models(session.process, failed)
    prepared = session.prepared
    begun = [*prepared.models, *prepared.optimizers, *prepared.schedulers, *prepared.loaders]
    if begun or len(open_sessions()) > 1 or session.preemption is not None or session.continuous is not None:
        raise Conflict(
            failed,
            f"The run has begun with the backend {session.backend.name!r}, which distributes whole models itself.",
            f"Prepare this model before anything else, or choose Accelerator(backend={chosen.name!r}).",
        )
    leave(session)
    current.set_run(None)
    changed = start_session(options._replace(backend=chosen.name))
    for name in _CARRIED:
        setattr(changed, name, getattr(session, name))
    changed.prepared.custom = prepared.custom
    changed.prepared.save_hooks, changed.prepared.load_hooks = prepared.save_hooks, prepared.load_hooks
    _logger.info("A model arrives distributed, so the backend is %r instead of %r.", chosen.name, session.backend.name)
    return changed


def _arrives(item: Any) -> bool:
    from torch.nn import Module

    from accel_plugins.arrived_models import arrives_distributed

    return isinstance(item, Module) and arrives_distributed(item)
