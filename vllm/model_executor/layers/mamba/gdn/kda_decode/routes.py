# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What kind of batch a step is, and which call takes it.

Both answers are pure: the kind is read from the host integers of
:class:`~vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata` and never from a
tensor's shape or contents, and the call is looked up in :data:`ROUTES`.
"""

from enum import Enum

from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


class BatchKind(Enum):
    """The three kinds of step that a KDA layer tells apart."""

    SINGLE_TOKEN = "plain one-token decode"
    PACKED = "decode of another width"
    OTHER = "prefill, or nothing to decode"


class Capability(Enum):
    """What this install can run, settled when the layer is built."""

    B12X_SINGLE_TOKEN = "B12X with run_kda_single_token"
    B12X_PACKED = "B12X without run_kda_single_token"
    ONE_LAUNCH = "in-tree one-launch kernel"
    VLLM = "vLLM's own kernels"


class Call(Enum):
    """The call that advances one layer's states in one step."""

    RUN_KDA_SINGLE_TOKEN = "run_kda_single_token"
    RUN_KDA = "run_kda"
    ONE_LAUNCH = "one_launch"
    VLLM = "vllm"


# In order of preference: a call whose operands do not meet its requirements gives
# way to the next one. Call.VLLM has none, so it ends every row.
ROUTES: dict[tuple[Capability, BatchKind], tuple[Call, ...]] = {
    (Capability.B12X_SINGLE_TOKEN, BatchKind.SINGLE_TOKEN): (
        Call.RUN_KDA_SINGLE_TOKEN,
        Call.RUN_KDA,
        Call.VLLM,
    ),
    (Capability.B12X_SINGLE_TOKEN, BatchKind.PACKED): (Call.RUN_KDA, Call.VLLM),
    (Capability.B12X_SINGLE_TOKEN, BatchKind.OTHER): (Call.VLLM,),
    (Capability.B12X_PACKED, BatchKind.SINGLE_TOKEN): (Call.RUN_KDA, Call.VLLM),
    (Capability.B12X_PACKED, BatchKind.PACKED): (Call.RUN_KDA, Call.VLLM),
    (Capability.B12X_PACKED, BatchKind.OTHER): (Call.VLLM,),
    (Capability.ONE_LAUNCH, BatchKind.SINGLE_TOKEN): (Call.ONE_LAUNCH, Call.VLLM),
    (Capability.ONE_LAUNCH, BatchKind.PACKED): (Call.VLLM,),
    (Capability.ONE_LAUNCH, BatchKind.OTHER): (Call.VLLM,),
    (Capability.VLLM, BatchKind.SINGLE_TOKEN): (Call.VLLM,),
    (Capability.VLLM, BatchKind.PACKED): (Call.VLLM,),
    (Capability.VLLM, BatchKind.OTHER): (Call.VLLM,),
}


def batch_kind(metadata: GDNAttentionMetadata) -> BatchKind:
    """Classify one step.

    Plain one-token decode means that row r of the token tensors is request r, for
    every row, padding included. The padded rows of a FULL graph count as decodes
    (their state index is ``NULL_BLOCK_ID``), so they keep the equalities; a row
    without a token breaks them.

    Args:
        metadata: The step's metadata, from vLLM's builder. Only host integers and
            the presence of ``spec_sequence_masks`` are read.

    Returns:
        The kind. A step with a prefill row, and one with no decode row at all, is
        :attr:`BatchKind.OTHER`.
    """
    if metadata.num_prefills > 0:
        return BatchKind.OTHER
    if metadata.num_spec_decodes > 0 and metadata.spec_sequence_masks is not None:
        return BatchKind.PACKED
    if metadata.num_decodes == 0:
        return BatchKind.OTHER
    one_token_a_row = (
        metadata.num_decodes == metadata.num_decode_tokens == metadata.num_actual_tokens
    )
    plain = metadata.num_spec_decodes == 0 and metadata.spec_sequence_masks is None
    return BatchKind.SINGLE_TOKEN if plain and one_token_a_row else BatchKind.PACKED
