"""Which sequence is trained on when: a shuffled order that any rank can compute for any step.

Samples are numbered 0, 1, 2, ... over the whole run. Sample g lies in epoch g // n at place g % n;
each epoch visits all n sequences once, in an order drawn from (seed, epoch). The order is a
permutation *function*, not a table: a four-round Feistel network over the bits of the place, walked
until it lands below n. So it needs no memory, any position can be resumed from its number alone,
and it depends neither on the world size nor on the version of a random generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["BatchLayout", "SampleOrder"]

# Four multiples of 2^64 / golden ratio: far apart whatever the key.
ROUND_KEYS = tuple(np.uint64(i * 0x9E3779B97F4A7C15 % (1 << 64)) for i in range(4))


def _mix(value: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (xor-shift, multiply): every input bit reaches every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class SampleOrder:
    """The order of `num_sequences` sequences under `seed`, epoch after epoch."""

    num_sequences: int
    seed: int

    def sequences(self, samples: np.ndarray) -> np.ndarray:
        """Sequence index of each global sample number. samples: (B,) int64 >= 0 -> (B,) int64."""
        samples = np.asarray(samples, dtype=np.int64)
        epoch, place = np.divmod(samples, self.num_sequences)
        keys = _mix(epoch.astype(np.uint64) + _mix(np.array([self.seed], dtype=np.uint64)))
        place = self._permute(place.astype(np.uint64), keys)
        while (outside := place >= self.num_sequences).any():
            # The network permutes a power of two; walking on keeps it one-to-one below n.
            place[outside] = self._permute(place[outside], keys[outside])
        return place.astype(np.int64)

    def _permute(self, place: np.ndarray, keys: np.ndarray) -> np.ndarray:
        half = np.uint64(max(1, ((self.num_sequences - 1).bit_length() + 1) // 2))
        mask = np.uint64((1 << int(half)) - 1)
        left, right = place >> half, place & mask
        for round_key in ROUND_KEYS:
            mixed = _mix(right + keys + round_key)
            left, right = right, left ^ (mixed & mask)
        return (left << half) | right


@dataclass(frozen=True)
class BatchLayout:
    """Sequences per optimiser step = micro_batch * grad_accum * world_size = B.

    Step s holds samples s * B .. (s + 1) * B - 1, cut into one slice per rank and micro step, so
    the samples of a step are the same for every layout with the same B.
    """

    micro_batch: int
    grad_accum: int
    world_size: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.grad_accum * self.world_size

    def samples(self, step: int, micro_step: int, rank: int) -> np.ndarray:
        """Global sample numbers of one rank: (micro_batch,) int64."""
        slot = micro_step * self.world_size + rank
        start = step * self.global_batch + slot * self.micro_batch
        return np.arange(start, start + self.micro_batch, dtype=np.int64)
