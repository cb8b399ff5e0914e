# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two tensor-parallel ranks against one, weights through vLLM's own loaders.

Each rank is a process: on CPUs with gloo in Triton's interpreter, on two GPUs of one
host with NCCL.
"""

import pytest
import torch
from torch import multiprocessing

WORLD = 2
HEADS = 4
SLOTS = 12
SLOT_TABLE = [[1, 2, 3, 4], [5, 6, 7, 8]]


def _batches():
    from vllm.benchmarks.kda_decode.layer import Batch

    return (
        Batch([4, 2], SLOT_TABLE, drafts=[3, 1], accepted=[1, 1]),
        Batch([1, 1], SLOT_TABLE, drafts=[0, 0], accepted=[2, 1]),
        Batch([1, 1], SLOT_TABLE),
    )


def _start(rank, world, store, device_type):
    """Join the group as an engine's worker does, and return the rank's device."""
    from vllm.benchmarks.kda_decode.layer import use_interpreter

    if device_type == "cpu":
        use_interpreter()
    from vllm.benchmarks.kda_decode.layer import LayerOptions, make_config
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    device = torch.device(device_type, rank if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    with set_current_vllm_config(make_config(LayerOptions(), device)):
        init_distributed_environment(
            world_size=world,
            rank=rank,
            distributed_init_method=f"file://{store}",
            local_rank=rank,
            backend="gloo" if device_type == "cpu" else "nccl",
        )
        initialize_model_parallel(world)
    return device


def _load(layer):
    """Load one checkpoint's weights, of which each rank keeps its share."""
    generator = torch.Generator().manual_seed(4)
    part, heads, dim = layer.head_dim * HEADS, HEADS, layer.head_dim
    for name, parameter in sorted(layer.named_parameters()):
        if name.startswith("in_proj"):
            for shard, rows in enumerate((part, part, part, heads, dim, dim)):
                weight = torch.randn(rows, parameter.shape[1], generator=generator)
                parameter.weight_loader(parameter, weight * 0.06, shard)
            continue
        shape = list(parameter.shape)
        if name == "A_log":
            shape = [heads]
        elif name != "o_norm.weight":
            shape[1 if name.startswith("o_proj") else 0] *= layer.tp_size
        weight = torch.randn(shape, generator=generator) * 0.1
        if name == "o_norm.weight":
            parameter.data.copy_(weight + 1)
        else:
            parameter.weight_loader(parameter, weight)


def _fill_states(under_test, rank, world):
    """Give each rank its heads of the same states."""
    generator = torch.Generator().manual_seed(6)
    dim = under_test.layer.head_dim
    state = torch.randn(SLOTS, HEADS, dim, dim, generator=generator) * 0.3
    under_test.recurrent_state.copy_(state.chunk(world, dim=1)[rank])
    columns = under_test.conv_state.shape[-1]
    conv = torch.randn(SLOTS, 3, HEADS * dim, columns, generator=generator)
    share = conv.chunk(world, dim=2)[rank].reshape(SLOTS, -1, columns)
    under_test.conv_state.copy_(share)


def _serve(rank, world, store, device_type, results):
    """Build the layer as rank ``rank``, run the steps, and report."""
    device = _start(rank, world, store, device_type)
    from vllm.benchmarks.kda_decode.layer import LayerOptions, build_layer
    from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import B12xFeatures

    under_test = build_layer(
        LayerOptions(num_heads=HEADS, num_spec=3, backend="one_launch"),
        num_slots=SLOTS,
        device=device,
        b12x=B12xFeatures() if device_type == "cpu" else None,
    )
    _load(under_test.layer)
    _fill_states(under_test, rank, world)
    generator = torch.Generator().manual_seed(8)
    outputs, calls = [], []
    for batch in _batches():
        hidden = torch.randn(batch.num_tokens, 256, generator=generator).bfloat16()
        output = under_test.run(hidden.to(device), under_test.metadata(batch))
        outputs.append(output.float().cpu())
        calls.append(under_test.layer.last_call.name)
    report = {
        "heads": under_test.layer.local_num_heads,
        "outputs": outputs,
        "calls": calls,
        "state": under_test.recurrent_state.float().cpu(),
    }
    torch.save(report, f"{results}/{world}-{rank}.pt")


def _check(folder, device_type):
    for world in (1, WORLD):
        multiprocessing.spawn(
            _serve,
            args=(world, folder / f"store{world}", device_type, folder),
            nprocs=world,
        )
    alone = torch.load(folder / "1-0.pt")
    ranks = [torch.load(folder / f"{WORLD}-{rank}.pt") for rank in range(WORLD)]
    assert [rank["heads"] for rank in ranks] == [HEADS // WORLD] * WORLD
    assert alone["calls"] == ["VLLM", "VLLM", "ONE_LAUNCH"]
    for rank in ranks:
        assert rank["calls"] == alone["calls"]
        for found, wanted in zip(rank["outputs"], alone["outputs"], strict=True):
            # o_proj sums the ranks' halves in bfloat16.
            assert (found - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    states = torch.cat([rank["state"] for rank in ranks], dim=1)
    bound = 1e-2 if device_type == "cpu" else 1e-5
    assert (states - alone["state"]).abs().max() <= bound
    return states, alone["state"]


@pytest.mark.slow
def test_two_ranks_equal_one_on_cpus(tmp_path):
    _check(tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
def test_two_ranks_equal_one_on_gpus(tmp_path):
    _check(tmp_path, "cuda")
