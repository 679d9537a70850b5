"""Batches limited by their tokens: a batch sampler for map-style data sets, and a stream of batches for streams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from accel_data.order import permutation
from accel_data.streams import own_shard, seed_stream, shards_itself
from accel_data.token_plan import Buckets, Cost, TokenPlan, as_lengths, cost_function, plan_steps
from accel_state.errors import DataError, SettingError

__all__ = ("TokenBatchSampler", "TokenBatches", "generator_of")


def generator_of(*key: object) -> torch.Generator:
    """A generator that depends on the values of a key only."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of samples of similar length, each with at most `max_tokens` tokens.

    Every sample is in exactly one batch of an epoch. A prepared loader gives each process one batch of every step: all
    take the same number of steps, and the batches of a step have nearly equal cost. The order depends on seed and epoch
    only, and a run can be resumed in the middle of an epoch on another number of processes.

    Args:
        lengths: the tokens of each sample: a list, an array or a tensor of integers.
        max_tokens: tokens of a batch at most.
        padded: whether samples are padded to the longest of their batch. If so, the tokens of a batch are its samples
            times its longest; else they are the sum of its lengths.
        cost: what is nearly equal in the batches of a step: "tokens", "attention" (the sum of the squared lengths) or a
            function of the lengths in a batch. If `padded`, each sample counts as long as the longest. Costs other than
            "tokens" are as equal as the lengths permit.
        shuffle: draw the order of the steps, and which samples of similar length are in one batch, in each epoch.
            Without it, the most expensive steps come first.
        seed: the seed of the order.
        drop_last: leave batches out that do not fill a step. Without it, batches are split to fill it.

    Attributes:
        epoch: number of the next epoch.

    Raises:
        SettingError: a sample is longer than `max_tokens`, or an argument is out of range.

    Example:
        >>> sampler = TokenBatchSampler([3, 9, 4, 2, 8, 1], max_tokens=10, shuffle=False)
        >>> [batch for batch in sampler]
        [[1], [2, 0], [4], [3, 5]]
        >>> loader = DataLoader(texts, batch_sampler=sampler, collate_fn=pad)
    """

    def __init__(
        self,
        lengths: Any,
        max_tokens: int,
        *,
        padded: bool = True,
        cost: Cost = "tokens",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        cost_function(cost)
        self.max_tokens, self.padded, self.cost = max_tokens, padded, cost
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._buckets = Buckets(as_lengths(lengths, max_tokens))
        # Parts of the epoch that are done: (number of processes, steps).
        self._done: list[tuple[int, int]] = []
        self._yielded = 0
        self._plans: dict[int, TokenPlan] = {}

    def __iter__(self) -> Iterator[list[int]]:
        self._yielded = 0
        for (batch,) in self.steps(1):
            self._yielded += 1
            yield batch
        self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        return self.steps_on(1)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        if epoch != self.epoch:
            self._done = []
        self.epoch, self._yielded = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch, and which part of it is done.

        Outside a prepared loader these are the batches that were drawn, which DataLoader workers do in advance.
        """
        done = [*self._done, (1, self._yielded)] if self._yielded else self._done
        return {"seed": self.seed, "epoch": self.epoch, "done": [list(part) for part in done]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state in the next iteration, on any number of processes."""
        self.seed, self.epoch, self._yielded = state_dict["seed"], state_dict["epoch"], 0
        self._done = [(processes, steps) for processes, steps in state_dict["done"]]

    def steps_on(self, processes: int) -> int:
        """The steps of a whole epoch on a number of processes."""
        return len(self._plan(processes).steps)

    def steps(self, processes: int, start: int = 0) -> Iterator[list[list[int]]]:
        """The steps of the epoch: for each, the batch of every process; empty if there are too few samples.

        Args:
            processes: number of processes.
            start: steps since the beginning of the epoch that are skipped, on whatever processes they were.
        """
        samples = self._buckets.samples(self._generator("samples"))
        left: Tensor | None = None
        done, first = self._done, 0
        if done and done[-1][0] == processes:
            # On as many processes as before, the plan goes on.
            *done, (_, first) = done
        for part, (earlier, steps) in enumerate(done):
            plan = self._plan(earlier, left)
            rest = [plan.batch(number) for step in self._in_order(plan, part)[steps:] for number in step]
            left = torch.cat([torch.arange(0), *rest]).sort().values.long()
            start -= steps
        plan = self._plan(processes, left)
        for step in islice(self._in_order(plan, len(done)), max(start, first), None):
            yield [samples[plan.batch(number).long()].tolist() for number in step]

    def _plan(self, processes: int, left: Tensor | None = None) -> TokenPlan:
        """The plan of an epoch, or of those places that are left."""
        if left is None and processes in self._plans:
            return self._plans[processes]
        places = self._buckets.places if left is None else self._buckets.places[left]
        padded, cost, drop_last = self.padded, self.cost, self.drop_last
        plan = plan_steps(places, self.max_tokens, processes, padded=padded, cost=cost, drop_last=drop_last)
        if left is None:
            self._plans = {processes: plan}
            return plan
        return plan._replace(places=left[plan.places.long()])

    def _generator(self, *purpose: object) -> torch.Generator | None:
        return generator_of(self.seed, self.epoch, *purpose) if self.shuffle else None

    def _in_order(self, plan: TokenPlan, part: int) -> list[list[int]]:
        """The batches of each step, in the order of the epoch."""
        generator = self._generator("steps", part)
        if generator is None or not plan.steps:
            return plan.steps
        steps = torch.tensor(plan.steps)
        whole = int((steps >= 0).all(dim=1).sum())
        # The batches of a step are sorted by cost: which process has the largest must vary.
        turns = torch.rand(whole, steps.shape[1], generator=generator).argsort(dim=1)
        drawn: list[list[int]] = steps[:whole].gather(1, turns)[permutation(whole, generator).long()].tolist()
        return drawn + plan.steps[whole:]


class TokenBatches(IterableDataset[list[Any]]):
    """A stream of batches, as lists of samples, each with at most `max_tokens` tokens.

    Samples are read into a buffer, and divided as `TokenBatchSampler` divides a data set of that size. On several
    processes, each reads the whole stream and takes one batch of every step; or it reads its shard, if the stream
    can be sharded. Processes take the same number of steps.

    Args:
        stream: the samples. It must yield the same samples on all processes, and again after a resume.
        length: returns the tokens of a sample.
        max_tokens: tokens of a batch at most.
        padded: whether samples are padded to the longest of their batch; see `TokenBatchSampler`.
        buffer: samples that are read before their batches are planned.
        shuffle: draw the order of the batches of a buffer in each epoch.
        seed: the seed of the order.

    Raises:
        DataError: a sample is longer than `max_tokens`; raised when it is read.

    Example:
        >>> loader = DataLoader(TokenBatches(texts, len, 4096), batch_size=None, collate_fn=pad)
    """

    def __init__(
        self,
        stream: Iterable[Any],
        length: Callable[[Any], int],
        max_tokens: int,
        *,
        padded: bool = True,
        buffer: int = 1024,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if buffer < 1:
            raise SettingError(
                f"Cannot plan batches with buffer={buffer}.", "It must be at least 1.", "Give a larger buffer."
            )
        as_lengths([], max_tokens)
        self.stream, self.length, self.max_tokens = stream, length, max_tokens
        self.padded, self.buffer, self.shuffle, self.seed = padded, buffer, shuffle, seed
        self.epoch = 0
        self._processes, self._index = 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, and pass it on to the stream."""
        self.epoch = epoch
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def split_by_node(self, index: int, processes: int) -> TokenBatches:
        """The batches of one process; a prepared loader calls it."""
        other = copy.copy(self)
        if shards_itself(self.stream, processes, "auto"):
            other.stream = own_shard(self.stream, processes, index, "auto")
        else:
            other._processes, other._index = processes, index
        return other

    def __iter__(self) -> Iterator[list[Any]]:
        seed_stream(self.stream, self.epoch)
        for part, samples in enumerate(self._buffers()):
            lengths = [self.length(sample) for sample in samples]
            batches = TokenBatchSampler(
                lengths, self.max_tokens, padded=self.padded, shuffle=self.shuffle, seed=(self.seed << 32) + part
            )
            batches.set_epoch(self.epoch)
            for step in batches.steps(self._processes):
                if step[self._index]:
                    yield [samples[place] for place in step[self._index]]

    def _buffers(self) -> Iterator[list[Any]]:
        """The samples, a buffer at a time; the last one has enough for all processes, if the stream has."""
        samples = iter(self.stream)
        following = list(islice(samples, self.buffer))
        read = 0
        while following:
            current, following = following, list(islice(samples, self.buffer))
            if len(following) < self._processes:
                current, following = current + following, []
            for number, sample in enumerate(current, read):
                if self.length(sample) > self.max_tokens:
                    raise DataError(
                        f"Cannot plan batches of at most {self.max_tokens} tokens.",
                        f"Sample {number} of the stream has a length of {self.length(sample)}.",
                        "Truncate or remove the sample, or raise max_tokens.",
                    )
            read += len(current)
            yield current
