"""Checks a pickle without running it: a table of rules defines which objects it may create.

A pickle is a program. `check_pickle` interprets its opcodes on a stack of descriptions instead of objects, so it
imports, calls and allocates nothing that the pickle names. It accepts only the opcodes that pickles of data need, the
names in the table, and for each name the one way in which pickles of data create it. An accepted pickle does the same
in `pickle` and in `torch.load`: both interpret the same opcodes and make the same calls, with arguments that the rules
have checked.

A rule for a name receives descriptions (`Made`, `Global`) of the objects, and the remaining memory budget (`Budget`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, Final, TypeAlias

__all__ = (
    "BYTES_PER_BYTE",
    "Budget",
    "CallRule",
    "Global",
    "Made",
    "PickleRefused",
    "Rule",
    "Rules",
    "check_pickle",
    "demand",
    "is_made",
    "numbers_in",
)

BYTES_PER_BYTE: Final = 64
"""Bytes of memory that the content may use for each byte of the file."""

_FREE_BYTES: Final = 1 << 28

_DEPTH: Final = 200
"""The deepest nesting of containers, so that recursive readers of the data do not overflow their stack."""

_KEY_SIZE: Final = 4096
"""The maximum number of values inside a key of a mapping: hashing a tuple of shared tuples takes exponential time."""

_TOO_LARGE: Final = 1 << 40
_LARGEST_KEY: Final = 2**61 - 2
"""The largest integer that is its own hash; larger ones can be chosen so that all have the same hash."""

_FREE_NODES: Final = 1 << 22


class PickleRefused(ValueError):
    """Raised for a pickle that is damaged, or does something that pickles of data do not do."""


def demand(condition: object, text: str) -> None:
    """Refuse a pickle unless a condition is true.

    Raises:
        PickleRefused: the condition is false.
    """
    if not condition:
        raise PickleRefused(text)


@dataclass
class Budget:
    """The memory that the content of a file may use: 64 bytes for each byte of the file, plus 256 MiB.

    Args:
        size: size of the file in bytes.
    """

    size: int
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = BYTES_PER_BYTE * self.size + _FREE_BYTES

    def spend(self, count: int) -> None:
        """Count bytes that reading allocates.

        Raises:
            PickleRefused: the budget is exceeded.
        """
        self.left -= count
        demand(self.left >= 0, f"its {self.size} bytes would take more memory than {self.size} bytes of data can")


@dataclass(frozen=True)
class Global:
    """A class, function or constant that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """Describes a container or an object that the unpickler would create.

    Attributes:
        kind: "tuple", "list", "dict", "set", or the name of the callable that created it.
        parts: its items; for mappings keys and values alternate, for objects the arguments of the call.
        state: the argument of its BUILD opcode.
        facts: data that its rule stores for later checks.
        carries: whether it is a tuple that contains names that are not data; only a call may use it.
    """

    __slots__ = ("carries", "facts", "kind", "parts", "rule", "size", "state")

    def __init__(self, kind: str, parts: list[Any], facts: Any = None) -> None:
        self.kind = kind
        self.parts = parts
        self.facts = facts
        self.state: Any = None
        self.rule: Rule | None = None
        self.carries = False
        self.size = 1


CallRule: TypeAlias = Callable[[Global, list[Any], Budget], Any]
Build: TypeAlias = Callable[[Made, Any, Budget], None]


@dataclass(frozen=True)
class Rule:
    """How pickles of data may use one name.

    Args:
        call: checks the arguments of a call and describes its result; if None, calls are refused.
        new: the same for `cls.__new__`.
        build: checks the state of an object, which is set once after its creation; if None, states are refused.
        constant: whether the name itself is data, such as a dtype.
        items: whether it is a mapping with items that are set one by one.
        key: whether it may be a key of a mapping.
    """

    call: CallRule | None = None
    new: CallRule | None = None
    build: Build | None = None
    constant: bool = False
    items: bool = False
    key: bool = False


Rules: TypeAlias = Mapping[tuple[str, str], Rule]


def is_made(value: Any, *kinds: str) -> bool:
    """Whether a value is a container or object of one of these kinds."""
    return isinstance(value, Made) and value.kind in kinds


def numbers_in(value: Any) -> list[int]:
    """The integers of a tuple or `torch.Size`, which must not be negative.

    Raises:
        PickleRefused: the value is something else.
    """
    demand(is_made(value, "tuple", "list", "torch.Size"), "a shape is not a tuple")
    demand(
        all(type(part) is int and 0 <= part < 2**63 for part in value.parts), "a shape has a part that is not a size"
    )
    return list(value.parts)


class _Reading:
    """The interpreter of one pickle: its position, stack, marks and memo."""

    def __init__(self, data: bytes | mmap, start: int, rules: Rules, storage: CallRule | None, budget: Budget) -> None:
        self.data = data
        self.at = start
        self.start = start
        self.rules = rules
        self.storage = storage
        self.budget = budget
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.done = False

    def run(self) -> Any:
        """Interpret all opcodes; returns the description of the result."""
        data, steps = self.data, _STEPS
        end = len(data)
        while not self.done:
            demand(self.at < end, "it ends too early")
            opcode = data[self.at]
            self.at += 1
            step = steps.get(opcode)
            if step is None:
                raise PickleRefused(f"it has an opcode that data does not need: {bytes([opcode])!r}")
            step(self)
        demand(len(self.stack) == 1 and not self.marks, "it ends with values left over")
        self.demand_data(self.stack[0])
        return self.stack[0]

    # ------------------------------------------------------------------ arguments of opcodes

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        demand(len(found) == count, "it ends too early")
        self.at += count
        return found

    def unpack(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 1000)
        demand(end >= 0, "a name is too long")
        text = self.data[self.at : end]
        self.at = end + 1
        return text.decode("utf-8")

    # ------------------------------------------------------------------ the stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        demand(self.stack, "it takes a value that is not there")
        return self.stack.pop()

    def top(self) -> Any:
        demand(self.stack, "it takes a value that is not there")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        demand(self.marks, "it uses a mark that does not exist")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        # Python stores the memo in an array: one large index would take gigabytes.
        demand(index <= self.at - self.start, "it stores a value under a number that is too large")
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        demand(index in self.memo, "it loads a value that it has not stored")
        self.push(self.memo[index])

    # ------------------------------------------------------------------ what may go where

    def rule_of(self, name: Any) -> Rule:
        demand(isinstance(name, Global), "it calls something that is not a name")
        return self.rules[name.module, name.name]

    def is_data(self, value: Any) -> bool:
        if isinstance(value, Made):
            return not value.carries
        return not isinstance(value, Global) or self.rule_of(value).constant

    def demand_data(self, value: Any) -> None:
        if not self.is_data(value):
            raise PickleRefused(f"it uses {value if isinstance(value, Global) else 'a name'} as data")

    def demand_key(self, value: Any) -> None:
        if isinstance(value, Made):
            is_tuple = value.kind == "tuple"
            demand(is_tuple or (value.rule is not None and value.rule.key), f"a {value.kind} is a key")
            demand(value.size <= _KEY_SIZE, "a key is too large")
            for part in value.parts if is_tuple else ():
                self.demand_key(part)
        elif type(value) is int:
            demand(-_LARGEST_KEY <= value <= _LARGEST_KEY, "a key is too large")
        self.demand_data(value)

    def make(self, kind: str, parts: list[Any], cost: int) -> Made:
        made = Made(kind, parts)
        self.budget.spend(cost)
        return made

    def make_tuple(self, parts: list[Any]) -> None:
        made = self.make("tuple", parts, 48 + 8 * len(parts))
        made.carries = not all(map(self.is_data, parts))
        made.size += min(_TOO_LARGE, sum(part.size if isinstance(part, Made) else 1 for part in parts))
        self.push(made)

    def put_items(self, items: list[Any]) -> None:
        target = self.top()
        mapping = is_made(target, "dict") or (isinstance(target, Made) and target.rule and target.rule.items)
        demand(mapping and len(items) % 2 == 0, "it sets items of something that is not a mapping")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.demand_key(key)
            self.demand_data(value)
        self.budget.spend(100 * len(items))
        target.parts.extend(items)

    def append(self, items: list[Any]) -> None:
        target = self.top()
        demand(is_made(target, "list"), "it appends to something that is not a list")
        for item in items:
            self.demand_data(item)
        self.budget.spend(8 * len(items))
        target.parts.extend(items)

    def add(self, items: list[Any]) -> None:
        target = self.top()
        demand(is_made(target, "set"), "it adds to something that is not a set")
        for item in items:
            self.demand_key(item)
        self.budget.spend(100 * len(items))
        target.parts.extend(items)

    # ------------------------------------------------------------------ names and objects

    def name(self, module: Any, name: Any) -> None:
        demand(type(module) is str and type(name) is str, "it refers to a name that is not a string")
        module = "builtins" if module == "__builtin__" else module
        demand((module, name) in self.rules, f"it refers to {module}.{name}")
        self.push(Global(module, name))

    def call(self, new: bool) -> None:
        arguments, name = self.pop(), self.pop()
        rule = self.rule_of(name)
        check = rule.new if new else rule.call
        demand(is_made(arguments, "tuple"), f"it calls {name} with something that is not a tuple")
        if check is None:
            raise PickleRefused(f"it creates {name} in a way that pickles of data do not")
        made = check(name, arguments.parts, self.budget)
        if isinstance(made, Made):
            self.budget.spend(400)
            made.rule = made.rule or rule
        self.push(made)

    def build(self) -> None:
        state, made = self.pop(), self.top()
        what = made.kind if isinstance(made, Made) else made
        rule = made.rule if isinstance(made, Made) else None
        if rule is None or rule.build is None or made.state is not None:
            raise PickleRefused(f"it sets a state of {what}")
        self.demand_data(state)
        rule.build(made, state, self.budget)
        made.state = state
        made.size += _size_of(state)

    def persistent(self) -> None:
        key = self.pop()
        if self.storage is None or not is_made(key, "tuple"):
            raise PickleRefused("it refers to something outside the pickle")
        self.push(self.storage(Global("", "storage"), key.parts, self.budget))


def _size_of(state: Any) -> int:
    """Number of values in the state of an object, one level deep: the values that its hash reads."""
    if not isinstance(state, Made):
        return 1
    return sum(part.size if isinstance(part, Made) else 1 for part in state.parts)


def _protocol(reading: _Reading) -> None:
    demand(reading.at == reading.start + 1, "it declares its protocol after the beginning")
    demand(reading.take(1)[0] <= 5, "its protocol is unknown")


def _frame(reading: _Reading) -> None:
    demand(reading.unpack("<Q") <= len(reading.data) - reading.at, "it ends too early")


def _stop(reading: _Reading) -> None:
    reading.done = True


def _mark(reading: _Reading) -> None:
    reading.marks.append(reading.stack)
    reading.stack = []


def _constant(value: Any) -> Callable[[_Reading], None]:
    return lambda reading: reading.push(value)


def _number(form: str) -> Callable[[_Reading], None]:
    def step(reading: _Reading) -> None:
        reading.push(reading.unpack(form))

    return step


def _text(form: str) -> Callable[[_Reading], None]:
    def step(reading: _Reading) -> None:
        text = reading.take(reading.unpack(form))
        reading.budget.spend(64 + 4 * len(text))
        reading.push(text.decode("utf-8", "surrogatepass"))

    return step


def _bytes(form: str) -> Callable[[_Reading], None]:
    def step(reading: _Reading) -> None:
        reading.push(reading.take(reading.unpack(form)))

    return step


def _container(kind: str, cost: int) -> Callable[[_Reading], None]:
    return lambda reading: reading.push(reading.make(kind, [], cost))


def _tuple_of(count: int) -> Callable[[_Reading], None]:
    def step(reading: _Reading) -> None:
        demand(len(reading.stack) >= count, "it takes a value that is not there")
        parts = reading.stack[len(reading.stack) - count :]
        del reading.stack[len(reading.stack) - count :]
        reading.make_tuple(parts)

    return step


def _set_item(reading: _Reading) -> None:
    value, key = reading.pop(), reading.pop()
    reading.put_items([key, value])


def _stack_global(reading: _Reading) -> None:
    name, module = reading.pop(), reading.pop()
    reading.name(module, name)


_STEPS: Final[dict[int, Callable[[_Reading], None]]] = {
    ord(opcode): step
    for opcode, step in {
        b"\x80": _protocol,
        b"\x95": _frame,
        b".": _stop,
        b"(": _mark,
        b"N": _constant(None),
        b"\x88": _constant(True),
        b"\x89": _constant(False),
        b"J": _number("<i"),
        b"K": _number("<B"),
        b"M": _number("<H"),
        b"G": _number(">d"),
        b"\x8a": lambda reading: reading.push(
            int.from_bytes(reading.take(reading.unpack("<B")), "little", signed=True)
        ),
        b"U": _text("<B"),
        b"\x8c": _text("<B"),
        b"X": _text("<I"),
        b"C": _bytes("<B"),
        b"B": _bytes("<I"),
        b"]": _container("list", 64),
        b"}": _container("dict", 64),
        b"\x8f": _container("set", 216),
        b")": _tuple_of(0),
        b"\x85": _tuple_of(1),
        b"\x86": _tuple_of(2),
        b"\x87": _tuple_of(3),
        b"t": lambda reading: reading.make_tuple(reading.pop_mark()),
        b"a": lambda reading: reading.append([reading.pop()]),
        b"e": lambda reading: reading.append(reading.pop_mark()),
        b"s": _set_item,
        b"u": lambda reading: reading.put_items(reading.pop_mark()),
        b"\x90": lambda reading: reading.add(reading.pop_mark()),
        b"c": lambda reading: reading.name(reading.line(), reading.line()),
        b"\x93": _stack_global,
        b"R": lambda reading: reading.call(new=False),
        b"\x81": lambda reading: reading.call(new=True),
        b"b": lambda reading: reading.build(),
        b"Q": lambda reading: reading.persistent(),
        b"q": lambda reading: reading.remember(reading.unpack("<B")),
        b"r": lambda reading: reading.remember(reading.unpack("<I")),
        b"\x94": lambda reading: reading.remember(len(reading.memo)),
        b"h": lambda reading: reading.recall(reading.unpack("<B")),
        b"j": lambda reading: reading.recall(reading.unpack("<I")),
    }.items()
}
"""The opcodes of pickled data of protocols 2 to 5, as `pickle` and `torch.save` write them."""


def check_pickle(
    data: bytes | mmap, rules: Rules, budget: Budget, *, storage: CallRule | None = None, start: int = 0
) -> tuple[Any, int]:
    """Check one pickle.

    Args:
        data: bytes that contain the pickle.
        rules: the objects it may create, by module and name.
        budget: the memory that they may use.
        storage: describes the object of a persistent id; without it, persistent ids are refused.
        start: offset of the pickle in `data`.

    Returns:
        A description of the object it creates, and the offset of its end.

    Raises:
        PickleRefused: it is damaged, creates an object without a rule, or exceeds the budget.
    """
    reading = _Reading(data, start, rules, storage, budget)
    try:
        made = reading.run()
    except (UnicodeDecodeError, struct.error, OverflowError, RecursionError) as error:
        raise PickleRefused(f"it is damaged: {error}") from error
    _demand_tree(made, budget)
    return made, reading.at


def _demand_tree(root: Any, budget: Budget) -> None:
    """Refuse data that contain themselves, are nested too deep, or are huge to traverse because of shared parts."""
    known: dict[int, tuple[int, int]] = {}
    open_: set[int] = set()
    limit = BYTES_PER_BYTE * budget.size + _FREE_NODES
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        made, leaving = waiting.pop()
        if not isinstance(made, Made) or id(made) in known:
            continue
        inner = _inner(made)
        if not leaving:
            demand(id(made) not in open_, "its data contain themselves")
            open_.add(id(made))
            waiting.append((made, True))
            waiting.extend((part, False) for part in inner)
            continue
        sizes = [known[id(part)] for part in inner]
        count = 1 + len(made.parts) + sum(size for size, _ in sizes)
        depth = 1 + max((depth for _, depth in sizes), default=0)
        demand(count <= limit, "its shared parts expand to more data than its size allows")
        demand(depth <= _DEPTH, f"its data are nested more than {_DEPTH} levels deep")
        known[id(made)] = count, depth
        open_.discard(id(made))


def _inner(made: Made) -> Sequence[Made]:
    parts: Iterable[Any] = made.parts if made.state is None else [*made.parts, made.state]
    return [part for part in parts if isinstance(part, Made)]
