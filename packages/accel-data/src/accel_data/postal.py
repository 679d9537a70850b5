"""Steps from the main process to all: one message to each, on its way before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakSet

import torch

from accel_data.envelope import BATCH, END, FAILURE, Announcement, Form, put_together, take_apart
from accel_data.padding import Padding
from accel_data.rounds import Round
from accel_ops.objects import broadcast_object_list
from accel_state.errors import AccelError, CollectiveError, DataError
from accel_state.protocol import HeaderCall, start_all_gather_bytes
from accel_state.transport.base import Transport

__all__ = ("Arrival", "alone", "receive", "send")

_MAIN: Final = 0


@dataclass
class Arrival:
    """One step as a process receives it.

    Args:
        part: its batch.
        padding: see `Round`.
        last: whether the epoch ends with it.
        base: what torchdata needs to continue after it, in the main process.
    """

    part: Any
    padding: Padding | None
    last: bool
    base: dict[str, Any] | None = None


def alone(steps: Iterator[Round], index: int = 0) -> Iterator[Arrival]:
    """The steps of a run of one process."""
    upcoming = next(steps, None)
    while upcoming is not None:
        step, upcoming = upcoming, next(steps, None)
        yield Arrival(step.parts[index], step.padding, upcoming is None, step.base)


_out_of_step: WeakSet[Transport] = WeakSet()
"""Transports on which a message was sent that nobody took, or is awaited that nobody sends."""


def _begin(transport: Transport, announced: Announcement | None = None) -> Announcement:
    """What the main process announces, once all processes iterate a loader."""
    with HeaderCall(transport, "DataLoader.__iter__") as call:
        if transport in _out_of_step:
            raise CollectiveError(
                "A dispatching loader was to be iterated.",
                "One before it was left by some of the processes alone, whose messages would be taken for its own.",
                "Start the run anew, and let all processes iterate loaders to the same step.",
            )
        everyones = call.all_gather_bytes(b"" if announced is None else announced.header().numpy().tobytes())
    return announced or Announcement.read(torch.frombuffer(bytearray(everyones[_MAIN]), dtype=torch.uint8))


class _Step:
    """A message that is under way, behind a header that says that all processes take part in it.

    Args:
        transport: between the processes.
        output: where the own part comes.
        inputs: the parts of all, in the main process.
    """

    def __init__(self, transport: Transport, output: torch.Tensor, inputs: list[torch.Tensor] | None) -> None:
        self._transport = transport
        self._posted = start_all_gather_bytes(transport, "DataLoader.__next__", b"")
        self._work = transport.scatter(output, inputs, _MAIN)

    def wait(self) -> None:
        """Return when it has arrived.

        Raises:
            ShapeMismatch: on every process, when one of them called something else.
            CollectiveError: a process is gone or did not come in time.
        """
        try:
            self._posted.wait((self._work,))
        except AccelError:
            _out_of_step.add(self._transport)
            raise


class _Outgoing:
    """A step, ready to be sent.

    Args:
        step: its parts.
        indices: by rank, which part each process gets.
        last_forms: what the processes know already.
    """

    def __init__(self, step: Round, indices: Sequence[int], last_forms: list[Form] | None) -> None:
        self.step = step
        self.parcels = [take_apart(step.parts[index]) for rank, index in enumerate(indices) if rank != _MAIN]
        self.forms = self._shared(last_forms or [])
        self.new_form = self.forms is not last_forms
        self.nbytes = max(parcel.nbytes for parcel in self.parcels)

    def _shared(self, known: list[Form]) -> list[Form]:
        """The forms of the parcels, or one when they are alike; those known already, which have their packing."""
        forms = [parcel.form for parcel in self.parcels]
        if all(form == forms[0] for form in forms[1:]):
            forms = forms[:1]
        forms = known if forms == known else forms
        for number, parcel in enumerate(self.parcels):
            parcel.form = forms[number if len(forms) > 1 else 0]
        return forms


_Upcoming = _Outgoing | Exception | None
"""What follows a step: another one, what went wrong, or the end."""


class _Sender:
    def __init__(self, transport: Transport, steps: Iterator[Round], indices: Sequence[int]) -> None:
        self.transport = transport
        self.steps = steps
        self.indices = indices
        self.forms: list[Form] | None = None
        # Two sets in turn: one may still be on its way. The main process's own message carries nothing and is not sent,
        # but all of them have to have one length.
        self.buffers: list[list[torch.Tensor]] = [[], []]

    def read(self) -> _Upcoming:
        """The next step; an error is kept until its turn comes."""
        try:
            step = next(self.steps, None)
            if step is None:
                return None
            outgoing = _Outgoing(step, self.indices, self.forms)
        except Exception as error:
            return error
        self.forms = outgoing.forms
        return outgoing

    def post(self, outgoing: _Outgoing, following: _Upcoming) -> _Step:
        """Start sending a step."""
        if outgoing.new_form:
            broadcast_object_list([outgoing.forms], _MAIN)
        own, *messages = self._messages(outgoing.nbytes)
        announced = _with_padding(_announced(following), outgoing.step.padding)
        header, objects = announced.header(), announced.objects
        for message, parcel in zip(messages, outgoing.parcels, strict=True):
            if len(parcel.objects) != objects:
                objects = len(parcel.objects)
                header = replace(announced, objects=objects).header()
            parcel.write(header, message)
        device = self.transport.device
        own = own.to(device)
        inputs = [own, *(message.to(device) for message in messages)]
        return _Step(self.transport, own, inputs)

    def _messages(self, nbytes: int) -> list[torch.Tensor]:
        self.buffers.reverse()
        if not self.buffers[0] or self.buffers[0][0].numel() != nbytes:
            self.buffers[0] = [torch.empty(nbytes, dtype=torch.uint8) for _ in self.indices]
        return self.buffers[0]


def send(transport: Transport, steps: Iterator[Round], indices: Sequence[int]) -> Iterator[Arrival]:
    """The main process's own steps, while the others are sent theirs.

    Args:
        transport: between the processes.
        steps: parts of all.
        indices: by rank, which part each process gets.
    """
    sender = _Sender(transport, steps, indices)
    outgoing, following = sender.read(), None
    _begin(transport, _announced(outgoing))
    work: _Step | None = None
    try:
        while isinstance(outgoing, _Outgoing):
            if work is None:
                following = sender.read()
                work = sender.post(outgoing, following)
            posted, work = work, None
            posted.wait()
            step, outgoing = outgoing.step, following
            if isinstance(outgoing, _Outgoing):
                following = sender.read()
                work = sender.post(outgoing, following)
            yield Arrival(step.parts[indices[_MAIN]], step.padding, outgoing is None, step.base)
        if outgoing is not None:
            broadcast_object_list([f"{type(outgoing).__name__}: {outgoing}"], _MAIN)
            raise outgoing
    finally:
        if work is not None:
            work.wait()


def receive(transport: Transport, processes: int) -> Iterator[Arrival]:
    """The steps of a process that the main process reads for.

    Args:
        transport: between the processes.
        processes: number of different parts of a step.

    Raises:
        CollectiveError: the main process is gone.
        DataError: the main process could not read.
    """
    inbox = _Inbox(transport)
    announced = _begin(transport)
    message, work = inbox.expect(announced)
    try:
        while work is not None:
            posted, work = work, None
            posted.wait()
            form, arrived = inbox.form, message
            announced = Announcement.read(arrived)
            message, work = inbox.expect(announced)
            part = put_together(form, arrived, announced.objects)
            yield Arrival(part, _padding_in(announced, processes), announced.kind == END)
    finally:
        if work is not None:
            work.wait()
    if announced.kind == FAILURE:
        reason = [""]
        broadcast_object_list(reason, _MAIN)
        raise DataError(
            "The next batch was asked for.",
            f"The main process, which reads for all, could not read it: {reason[0]}",
            "Look at the error of process 0.",
        )


class _Inbox:
    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.form = Form(None, ())
        self.buffers = [torch.empty(0, dtype=torch.uint8, device=transport.device) for _ in range(2)]

    def expect(self, announced: Announcement) -> tuple[torch.Tensor, _Step | None]:
        """Start receiving the message that was announced, if one was."""
        if announced.kind != BATCH:
            return self.buffers[0], None
        if announced.new_form:
            forms: list[Any] = [None]
            broadcast_object_list(forms, _MAIN)
            mine = 0 if len(forms[0]) == 1 else self.transport.rank - 1
            self.form = forms[0][mine]
        self.buffers.reverse()
        if self.buffers[0].numel() != announced.nbytes:
            self.buffers[0] = torch.empty(announced.nbytes, dtype=torch.uint8, device=self.transport.device)
        return self.buffers[0], _Step(self.transport, self.buffers[0], None)


def _announced(following: _Upcoming) -> Announcement:
    if following is None:
        return Announcement(END)
    if isinstance(following, Exception):
        return Announcement(FAILURE)
    return Announcement(BATCH, following.nbytes, following.new_form)


def _with_padding(announced: Announcement, padding: Padding | None) -> Announcement:
    if padding is None:
        return announced
    if padding.counts is None:
        return replace(announced, total=padding.total, part=padding.batch_size)
    return replace(announced, total=sum(count is None for count in padding.counts), part=1, single=True)


def _padding_in(announced: Announcement, processes: int) -> Padding | None:
    if announced.total < 0:
        return None
    padding = Padding(announced.total, announced.part, processes)
    return padding.of_single() if announced.single else padding
