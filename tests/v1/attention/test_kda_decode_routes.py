# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Batch kinds over metadata from vLLM's own builder, and the routing table."""

import random
from collections import Counter

import pytest
import torch

from vllm.benchmarks.kda_decode.layer import (
    Batch,
    LayerOptions,
    build_layer,
    common_metadata,
    speculation,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import (
    ROUTES,
    BatchKind,
    Call,
    Capability,
    batch_kind,
)
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

NUM_SPEC = 3


@pytest.fixture(scope="module")
def builders():
    """vLLM's metadata builder without and with speculation, for FULL graphs or not."""
    made = {}
    for num_spec in (0, NUM_SPEC):
        options = LayerOptions(num_spec=num_spec, backend="triton", max_num_seqs=16)
        for full_graphs in (False, True):
            builder = build_layer(options, num_slots=2).builder
            builder.use_full_cuda_graph = full_graphs
            made[num_spec, full_graphs] = builder
    return made


def build(builder, batch):
    device = torch.device("cpu")
    return builder.build(
        0, common_metadata(batch, device), **speculation(batch, device)
    )


def slots(rows, columns):
    return [[r * columns + c + 1 for c in range(columns)] for r in range(rows)]


def decode_batch(rng, columns):
    rows = rng.randint(1, 8)
    return Batch([1] * rows, slots(rows, columns)), BatchKind.SINGLE_TOKEN


def padded_decode_batch(rng, columns):
    rows = rng.randint(1, 7)
    padded = rng.randint(rows + 1, 8)
    batch = Batch(
        [1] * rows,
        slots(rows, columns),
        padded_tokens=padded,
        padded_requests=padded,
    )
    return batch, BatchKind.SINGLE_TOKEN


def decode_with_empty_rows_batch(rng, columns):
    lens = [1] * rng.randint(1, 5) + [0] * rng.randint(1, 3)
    rng.shuffle(lens)
    return Batch(lens, slots(len(lens), columns)), BatchKind.PACKED


def first_chunk_batch(rng, columns):
    decodes, fresh = rng.randint(0, 4), rng.randint(1, 3)
    rows = decodes + fresh
    batch = Batch(
        [1] * decodes + [rng.choice((1, 2, 70)) for _ in range(fresh)],
        slots(rows, columns),
        computed=[9] * decodes + [0] * fresh,
        prefilling=[False] * decodes + [True] * fresh,
    )
    return batch, BatchKind.OTHER


def resumed_chunk_batch(rng, columns):
    """Later chunks of a prompt: one token is a decode, several are a prefill."""
    decodes, resumed = rng.randint(0, 4), rng.randint(1, 3)
    rows = decodes + resumed
    length = rng.choice((1, 5))
    batch = Batch(
        [1] * decodes + [length] * resumed,
        slots(rows, columns),
        computed=[9] * rows,
        prefilling=[False] * decodes + [True] * resumed,
    )
    return batch, BatchKind.SINGLE_TOKEN if length == 1 else BatchKind.OTHER


def speculative_batch(rng, columns):
    rows = rng.randint(1, 6)
    drafts = [rng.randint(0, columns - 1) for _ in range(rows)]
    batch = Batch(
        [d + 1 for d in drafts],
        slots(rows, columns),
        drafts=drafts,
        accepted=[rng.randint(1, columns) for _ in range(rows)],
    )
    if rng.random() < 0.5:
        batch.padded_requests = rng.randint(rows, 8)
        batch.padded_tokens = batch.padded_requests * columns
    return batch, BatchKind.PACKED


def zero_draft_batch(rng, columns):
    rows = rng.randint(1, 6)
    batch = Batch(
        [1] * rows,
        slots(rows, columns),
        drafts=[0] * rows,
        accepted=[rng.randint(1, columns) for _ in range(rows)],
    )
    return batch, BatchKind.PACKED


def speculative_with_plain_rows_batch(rng, columns):
    """vLLM's builder turns the plain rows of such a step into prefills."""
    rows = rng.randint(2, 6)
    drafts = [rng.randint(0, columns - 1) for _ in range(rows)]
    drafts[rng.randrange(rows)] = -1
    if max(drafts) < 0:
        drafts[drafts.index(-1) - 1] = 1
    lens = [rng.choice((1, 6)) if d < 0 else d + 1 for d in drafts]
    return (
        Batch(lens, slots(rows, columns), drafts=drafts, accepted=[1] * rows),
        BatchKind.OTHER,
    )


PLAIN = (
    decode_batch,
    padded_decode_batch,
    decode_with_empty_rows_batch,
    first_chunk_batch,
    resumed_chunk_batch,
)
SPECULATIVE = (
    speculative_batch,
    zero_draft_batch,
    speculative_with_plain_rows_batch,
)


def test_kind_of_random_batches_from_the_real_builder(builders):
    rng = random.Random(5)
    seen = Counter()
    for _ in range(2400):
        num_spec = rng.choice((0, NUM_SPEC))
        make = rng.choice(PLAIN + SPECULATIVE if num_spec else PLAIN)
        batch, wanted = make(rng, num_spec + 1)
        metadata = build(builders[num_spec, rng.random() < 0.5], batch)
        assert batch_kind(metadata) is wanted, (make.__name__, batch, metadata)
        seen[make.__name__] += 1
    assert min(seen[make.__name__] for make in PLAIN + SPECULATIVE) >= 50


def test_nothing_to_decode_is_other(builders):
    batch = Batch([0, 0], [[0], [0]])
    metadata = build(builders[0, False], batch)
    metadata.num_decodes = 0
    assert batch_kind(metadata) is BatchKind.OTHER


@pytest.mark.parametrize("starts", [[0, 1, 2, 2], [0, 1, 1, 2], [0, 2]])
def test_c13_rows_without_a_token_never_reach_the_single_token_call(builders, starts):
    lens = [b - a for a, b in zip(starts[:-1], starts[1:], strict=True)]
    metadata = build(builders[0, False], Batch(lens, slots(len(lens), 1)))
    for capability in Capability:
        calls = ROUTES[capability, batch_kind(metadata)]
        assert Call.RUN_KDA_SINGLE_TOKEN not in calls
        assert Call.ONE_LAUNCH not in calls


def test_c3_first_chunk_is_a_prefill_without_initial_state(builders):
    batch = Batch(
        [1, 1, 1],
        slots(3, 1),
        computed=[8, 0, 4],
        prefilling=[False, True, True],
    )
    metadata = build(builders[0, False], batch)
    assert batch_kind(metadata) is BatchKind.OTHER
    assert metadata.num_prefills == 2
    assert metadata.has_initial_state.tolist() == [True, False, True]


def test_c2_builder_keeps_accepted_counts_of_at_least_one(builders):
    """The precondition of B12X's and vLLM's kernels, padded rows included."""
    batch = Batch(
        [4, 4],
        slots(2, 4),
        drafts=[3, 3],
        accepted=[1, 2],
        padded_requests=4,
        padded_tokens=16,
    )
    metadata = build(builders[NUM_SPEC, True], batch)
    assert metadata.num_accepted_tokens.tolist() == [1, 2, 1, 1]
    assert (metadata.spec_state_indices_tensor[2:] == NULL_BLOCK_ID).all()


def test_table_is_complete_and_ends_in_vllm():
    assert set(ROUTES) == {(c, k) for c in Capability for k in BatchKind}
    for (_, kind), calls in ROUTES.items():
        assert calls[-1] is Call.VLLM
        if kind is BatchKind.OTHER:
            assert calls == (Call.VLLM,)
        if kind is not BatchKind.SINGLE_TOKEN:
            assert Call.RUN_KDA_SINGLE_TOKEN not in calls
