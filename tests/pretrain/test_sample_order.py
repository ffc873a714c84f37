"""The order of samples: a permutation per epoch, the same for every layout and every machine."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4_plugin.pretrain.sample_order import BatchLayout, SampleOrder


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.integers(0, 10**6))
def test_every_epoch_visits_every_sequence_once(num_sequences, seed, epoch):
    samples = np.arange(num_sequences) + epoch * num_sequences
    sequences = SampleOrder(num_sequences, seed).sequences(samples)
    assert sorted(sequences) == list(range(num_sequences))


@settings(deadline=None)
@given(
    st.integers(1, 10**12), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 10**15), min_size=1)
)
def test_a_sample_does_not_depend_on_the_batch_it_is_asked_in(num_sequences, seed, samples):
    order = SampleOrder(num_sequences, seed)
    together = order.sequences(np.array(samples))
    assert together.tolist() == [int(order.sequences(np.array([s]))[0]) for s in samples]
    assert all(0 <= sequence < num_sequences for sequence in together)


def test_seeds_and_epochs_have_their_own_order():
    samples = np.arange(1000)
    orders = [
        SampleOrder(1000, 0).sequences(samples),
        SampleOrder(1000, 0).sequences(samples + 1000),
        SampleOrder(1000, 1).sequences(samples),
        samples,
    ]
    for index, order in enumerate(orders):
        for other in orders[index + 1 :]:
            # Two unrelated orders agree in about one place.
            assert (order == other).sum() < 10


def test_neighbours_do_not_stay_neighbours():
    sequences = SampleOrder(100_000, 0).sequences(np.arange(100_000))
    correlation = np.corrcoef(sequences[:-1], sequences[1:])[0, 1]
    assert abs(correlation) < 0.02


def test_the_order_never_changes_between_versions():
    assert SampleOrder(46_166, 0).sequences(np.arange(6)).tolist() == [
        25698,
        33202,
        29557,
        1154,
        21400,
        3545,
    ]


@given(
    st.sampled_from([(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 1, 8)]),
    st.integers(0, 10**6),
)
def test_a_step_holds_the_same_samples_for_every_layout(layout, step):
    micro_batch, grad_accum, world_size = layout
    cut = BatchLayout(micro_batch, grad_accum, world_size)
    samples = [
        sample
        for rank in range(world_size)
        for micro_step in range(grad_accum)
        for sample in cut.samples(step, micro_step, rank)
    ]
    assert sorted(samples) == list(range(step * 8, step * 8 + 8))
