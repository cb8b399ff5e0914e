# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``glm5next-kda``."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from vllm.benchmarks.kda_decode import check
from vllm.benchmarks.kda_decode.bench import LAYERS, state_pools
from vllm.benchmarks.kda_decode.check import SCENARIOS, Route, check_step, run_check
from vllm.benchmarks.kda_decode.cli import parser


def test_module_form_starts_the_interpreter_by_itself():
    done = subprocess.run(
        [sys.executable, "-m", "vllm.benchmarks.kda_decode", "check", "--help"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "--tp" in done.stdout


@pytest.mark.parametrize(
    "arguments", ([], ["check", "--tp", "3"], ["bench2"], ["bench", "--heads", "0"])
)
def test_bad_arguments_end_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(arguments)
    assert stop.value.code == 2
    assert "usage: glm5next-kda" in capsys.readouterr().err


def test_table_and_status(capsys):
    with mock.patch.object(check, "SCENARIOS", SCENARIOS[:2]):
        assert run_check(1, "triton")
        table = capsys.readouterr().out
        assert "2 passed, 0 failed" in table
        assert "fused_recurrent_kda" in table and "interpreter" in table


@pytest.mark.parametrize("target", ("output", "state", "conv", "other slot"))
def test_a_wrong_result_is_a_mismatch(target):
    """Break one result of a right step, and the verdict must follow."""
    real = check.LayerUnderTest.run

    def broken(under_test, hidden_states, metadata):
        def spoil(_, args):
            if target == "output":
                args[0][1] *= 1.05

        handle = under_test.layer.o_proj.register_forward_pre_hook(spoil, prepend=True)
        result = real(under_test, hidden_states, metadata)
        handle.remove()
        if target == "state":
            under_test.recurrent_state[SCENARIOS[0].batch.slots[0][0]] *= 1.05
        if target == "conv":
            under_test.conv_state[SCENARIOS[0].batch.slots[0][0], 5, 1] += 1
        if target == "other slot":
            under_test.recurrent_state[20, 0, 0, 0] += 1e-6
        return result

    route = Route("vLLM", "triton")
    cpu = torch.device("cpu")
    assert check_step(SCENARIOS[0], route, 1, cpu).passed
    with mock.patch.object(check.LayerUnderTest, "run", broken):
        assert not check_step(SCENARIOS[0], route, 1, cpu).passed


def test_nothing_to_check_is_not_a_pass(capsys):
    with mock.patch.object(check, "doubled_routes", list):
        assert not run_check(1, "b12x")
    assert "no route for backend b12x" in capsys.readouterr().out


def test_a_nan_is_a_mismatch():
    wanted = torch.ones(4, dtype=torch.float64)
    found = wanted.clone()
    found[2] = torch.nan
    error = check.Error.of(found, wanted)
    assert not error.relative <= 1.0


# Bytes of a state slot of two heads.
PAGE = 2 * 128 * (128 * 4 + 3 * 3 * 2)


@pytest.mark.parametrize("block_bytes", (None, PAGE, 3 * PAGE + 16))
def test_state_pools_give_every_slot_of_every_layer_its_own_bytes(block_bytes):
    pools = state_pools(2, 5, block_bytes, device="cpu")
    assert len(pools) == LAYERS
    for conv, state in pools:
        assert conv.shape == (5, 3 * 2 * 128, 3) and conv.stride(1) == 1
        assert state.shape == (5, 2, 128, 128) and state[0].is_contiguous()
        distance = block_bytes or PAGE
        assert state.stride(0) * 4 == conv.stride(0) * 2 == distance
    for value, (conv, state) in enumerate(pools):
        conv.fill_(value)
        state.fill_(value)
    for value, (conv, state) in enumerate(pools):
        assert bool((conv == value).all()) and bool((state == value).all())


@pytest.mark.parametrize("off", (-16, 8))
def test_state_pools_refuse_blocks_that_hold_no_page(off):
    with pytest.raises(RuntimeError, match="--block-bytes"):
        state_pools(2, 5, PAGE + off, device="cpu")
