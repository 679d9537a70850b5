"""The cluster: connection, free resources, actors on its nodes, and detection of a lost head."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from accel_ray.process import Place, RankProcess
from accel_state.errors import LaunchError, NotFound, SettingError

__all__ = ("Cluster", "Layout", "Placed", "connected")

_LAUNCH_FAILURE: Final = "Cannot launch on Ray."
_POLL_INTERVAL_S: Final = 0.2
_ERROR_EXIT_CODE: Final = 2
"""Exit code of `accel` for its own errors."""

_CONNECT_TIMEOUT_S: Final = 5.0
"""Seconds for which the head may take to accept a connection."""

_MAX_MISSED_CONNECTIONS: Final = 3
"""Connections that the head may refuse, one a second, before it counts as lost."""

_SUSPECT_NODE_S: Final = 60.0
"""Seconds after the loss of an actor in which Ray may still list its dead node as alive."""

_WAIT_FOR_ROOM_S: Final = 5.0
"""Seconds for which an elastic run waits for a listed node without free resources."""

_START_TIMEOUT_S: Final = 60.0
"""Seconds in which placed actors must start."""


class Layout(NamedTuple):
    """How a run is placed on nodes.

    Args:
        bundles: largest number of groups of processes; None for one on every node with enough free resources.
        fewest: smallest number of groups with which the run continues.
        each: processes of a group; None starts one for each GPU of a node, and one on a node without a GPU.
        spread: whether each group has a separate node; otherwise groups share as few nodes as possible.
        cpus: CPUs of a process.
        gpus: GPUs of a process; None for one if the cluster has GPUs.
        resources: further resources of a process.
    """

    bundles: int | None
    fewest: int
    each: int | None
    spread: bool
    cpus: int
    gpus: int | None
    resources: tuple[tuple[str, float], ...] = ()


class Placed(NamedTuple):
    """One placed process of a run.

    Args:
        actor: handle of its `RankProcess`.
        place: the node of the actor.
    """

    actor: Any
    place: Place


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """Connect to a running cluster.

    Args:
        address: address of its head, or None for the cluster of this machine.

    Raises:
        NotFound: there is no running cluster.
        SettingError: the address is that of a Ray client.
    """
    import ray

    if address is not None and "://" in address:
        raise SettingError(
            _LAUNCH_FAILURE,
            f"{address} is an address for Ray clients, which cannot start processes.",
            "Run `accel launch` on a node of the cluster, and give HOST:PORT of its head.",
        )
    if address is not None and address != "auto":
        _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise NotFound(
            _LAUNCH_FAILURE,
            f"No Ray cluster answers at {address or 'this machine'}: {str(error).strip().splitlines()[0]}",
            "Start one with `ray start --head`, or give --ray_address.",
        ) from None
    cluster = Cluster(ray)
    try:
        yield cluster
    finally:
        cluster.leave()


def _check_reachable(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise SettingError(_LAUNCH_FAILURE, f"{address!r} is not an address.", "Give HOST:PORT, such as 10.0.0.1:6379.")
    error = _cannot_connect(host, int(port))
    if error:
        raise NotFound(
            _LAUNCH_FAILURE,
            f"No Ray cluster answers at {address}: {error}",
            "Check --ray_address; `ray status` shows the head.",
        )


def _cannot_connect(host: str, port: int, patience: float = _CONNECT_TIMEOUT_S) -> str:
    """Why a connection fails; empty if it succeeds."""
    try:
        socket.create_connection((host.strip("[]"), port), patience).close()
    except OSError as error:
        return str(error)
    return ""


class Cluster:
    """A cluster to which this process is connected; see `connected`."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.address: str = ray.get_runtime_context().gcs_address
        """Address of the head."""
        self._head = self.address.rpartition(":")[::2]
        self._missed, self._looked = 0, time.monotonic()
        self._suspected: dict[str, float] = {}
        self._actor_lost = ray.exceptions.RayActorError
        self._unavailable = getattr(ray.exceptions, "ActorUnavailableError", ())

    def check_head(self) -> None:
        """Check, at most once a second, whether the head answers.

        Raises:
            LaunchError: the head has not answered for several seconds.
        """
        if time.monotonic() - self._looked < 1:
            return
        host, port = self._head
        error = _cannot_connect(host, int(port), 1.0)
        self._missed = self._missed + 1 if error else 0
        self._looked = time.monotonic()
        if self._missed >= _MAX_MISSED_CONNECTIONS:
            raise LaunchError(
                "Cannot continue the run.",
                f"The head of the Ray cluster at {self.address} is lost: {error}",
                "Start the cluster and the run again; a script that saves resumes from its newest checkpoint.",
            )

    @property
    def head_is_lost(self) -> bool:
        """Whether `check_head` found the head lost."""
        return self._missed >= _MAX_MISSED_CONNECTIONS

    def wait(self, references: Sequence[Any], patience: float, tick: Callable[[], bool]) -> list[Any]:
        """The references that are done: at least one of them, unless the time is over or `tick` returns true."""
        deadline = time.monotonic() + patience
        while True:
            left = max(min(_POLL_INTERVAL_S, deadline - time.monotonic()), 0)
            done: list[Any] = self._ray.wait(list(references), timeout=left)[0]
            if done or tick() or time.monotonic() >= deadline:
                return done

    def value(self, reference: Any) -> Any:
        """The value of a reference that is done."""
        return self._ray.get(reference)

    def lost(self, error: BaseException) -> bool:
        """Whether an error means that an actor has died."""
        return isinstance(error, self._actor_lost)

    def maybe_lost(self, error: BaseException) -> bool:
        """Whether an error means that an actor does not answer now, but may answer later."""
        return isinstance(error, self._unavailable)

    def suspect(self, node: str) -> None:
        """Ignore a node whose actor was lost; Ray lists a dead node as alive for some time."""
        self._suspected[node] = time.monotonic() + _SUSPECT_NODE_S

    def _usable_nodes(self) -> list[dict[str, float]]:
        """The resources of each node that is known to be alive."""
        now = time.monotonic()
        return [
            node["Resources"]
            for node in self._ray.nodes()
            if node["Alive"] and self._suspected.get(node["NodeID"], 0.0) < now
        ]

    def place(self, layout: Layout, patience: float, tick: Callable[[], bool]) -> tuple[Any, list[Placed]] | None:
        """Reserve resources for a run and start its actors; None if `tick` returned true before.

        Returns:
            The placement group, and the actors, ordered by node.

        Raises:
            LaunchError: the cluster did not have enough free resources in time.
        """
        deadline = time.monotonic() + patience
        each, demand = self._demand(layout)
        nodes = self._usable_nodes()
        fitting = sum(all(node.get(name, 0) >= amount for name, amount in demand.items()) for node in nodes)
        most = fitting if layout.bundles is None else layout.bundles
        if layout.spread:
            # Request even more than there is: pending requests make a cluster scale up.
            most = max(min(most, fitting), layout.fewest)
        for count in range(most, layout.fewest - 1, -1):
            # Only the last attempt uses all the time: fewer nodes are better than none.
            until = deadline if count == layout.fewest else min(deadline, time.monotonic() + _WAIT_FOR_ROOM_S)
            group = self._reserve(count, demand, layout.spread, until, tick)
            if group is not None:
                return group, self._start_actors(group, count, each, demand)
            if tick():
                return None
        raise self._too_small(layout, demand, fitting, patience)

    def _demand(self, layout: Layout) -> tuple[int, dict[str, float]]:
        """Processes of each group, and the resources of a group."""
        nodes = self._usable_nodes()
        gpus = layout.gpus
        if gpus is None:
            gpus = int(any(node.get("GPU", 0) >= 1 for node in nodes))
        each = layout.each
        if each is None:
            counts = [int(node["GPU"] // gpus) for node in nodes if gpus and node.get("GPU", 0) >= gpus]
            each = max(min(counts, default=1), 1)
        needed = {"CPU": layout.cpus, "GPU": gpus, **dict(layout.resources)}
        return each, {name: float(amount * each) for name, amount in needed.items() if amount}

    def _reserve(
        self, count: int, demand: dict[str, float], spread: bool, until: float, tick: Callable[[], bool]
    ) -> Any:
        """A placement group that is ready, or None."""
        from ray.util.placement_group import placement_group

        # A bundle must not be empty, even if its processes reserve nothing.
        bundle = demand or {"CPU": 0.001}
        group = placement_group([bundle] * count, strategy="STRICT_SPREAD" if spread else "PACK")
        if self.wait([group.ready()], max(until - time.monotonic(), 0.0), tick):
            return group
        self.free(group)
        return None

    def _start_actors(self, group: Any, count: int, each: int, demand: dict[str, float]) -> list[Placed]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = self._ray.remote(RankProcess)
        amounts = {name: amount / each for name, amount in demand.items()}
        options = {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0), "resources": amounts}
        actors = []
        for bundle in range(count):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            for _ in range(each):
                actor = remote.options(
                    **options, scheduling_strategy=strategy, max_restarts=0, max_concurrency=4
                ).remote()
                actors.append(actor)
        try:
            places = self._ray.get([actor.place.remote() for actor in actors], timeout=_START_TIMEOUT_S)
        except Exception as error:
            self.free(group, actors)
            raise LaunchError(
                _LAUNCH_FAILURE,
                f"The actors did not start: {str(error).strip().splitlines()[-1]}",
                "Install accel-ray on every node, for the same Python; `ray status` shows the nodes.",
            ) from None
        placed = [Placed(actor, place) for actor, place in zip(actors, places, strict=True)]
        order = list(dict.fromkeys(one.place.node for one in placed))
        return sorted(placed, key=lambda one: order.index(one.place.node))

    def _too_small(self, layout: Layout, demand: dict[str, float], fitting: int, patience: float) -> LaunchError:
        nodes = self._usable_nodes()
        free = self._ray.available_resources()
        amount = ", ".join(f"{number:g} {name}" for name, number in demand.items()) or "nothing"
        there = ", ".join(f"{free.get(name, 0):g} {name}" for name in demand) or "nothing"
        what = "nodes" if layout.spread else "processes"
        return LaunchError(
            f"Cannot place the run on the Ray cluster at {self.address}.",
            f"It needs {layout.fewest} {what} with {amount} each; in {patience:g} s the cluster had {len(nodes)} "
            f"node(s), {fitting} of them large enough, and {there} free.",
            "Start fewer processes, add nodes, or wait longer with --ray_wait.",
        )

    def free(self, group: Any, actors: Sequence[Any] = ()) -> None:
        """End actors, and release the reserved resources."""
        from ray.util.placement_group import remove_placement_group

        if self.head_is_lost:
            # Both calls need the head. The actors have ended their processes, and end with this process.
            return
        for actor in actors:
            self._ray.kill(actor)
        remove_placement_group(group)

    def leave(self) -> None:
        """Close the connection, unless the head is lost."""
        if self.head_is_lost:
            # Ray would wait for the head, and then crash this process instead of ending it.
            atexit.register(_end_at_once)
        else:
            self._ray.shutdown()


def _end_at_once() -> None:
    """End this process with the command's error, before Ray's exit handlers run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_ERROR_EXIT_CODE)
