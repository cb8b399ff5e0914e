# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compile the one-launch kernel for GPUs that are not here.

Triton needs no device to compile. It does in a process of its own, since the tests'
process has Triton in its interpreter.
"""

import json
import os
import subprocess
import sys

import pytest

ARCHITECTURES = (80, 90, 120)
# Words that a kernel argument is compiled for, by name; the rest are 32-bit integers.
POINTERS = {
    "x_ptr": "*bf16",
    "conv_ptr": "*bf16",
    "weight_ptr": "*fp32",
    "g_ptr": "*bf16",
    "beta_ptr": "*bf16",
    "z_ptr": "*bf16",
    "a_log_ptr": "*fp32",
    "dt_bias_ptr": "*fp32",
    "norm_weight_ptr": "*bf16",
    "state_ptr": "*fp32",
    "index_ptr": "*i32",
    "output_ptr": "*bf16",
    "arrivals_ptr": "*i32",
}
FLOATS = ("scale", "lower_bound", "eps")


def compiled_ptx(architecture, variant, aligned):
    """PTX of a variant, on caches as vLLM lays them out."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm.model_executor.layers.mamba.ops import kda_single_token as op

    kernel = op._kda_single_token_kernel
    launch_pdl = architecture >= 90
    constants = {
        "D": op.HEAD_DIM,
        "TILES": variant.tiles,
        "CHUNKS": variant.chunks,
        "PREFETCH_STATE": variant.prefetch_state,
        "W": op.NUM_WARPS,
        "IN_ALIGN": 4 if aligned else 1,
        "OUT_ALIGN": 8 if aligned else 1,
        "QK_EPS": op.QK_NORM_EPS,
        "launch_pdl": launch_pdl,
        "conv_stride_channel": 1,
        "weight_stride_channel": 1,
    }
    if variant.tiles == 1:
        constants["arrivals_ptr"] = None
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        kind = POINTERS.get(name, "fp32" if name in FLOATS else "i32")
        signature[name] = "constexpr" if name in constants else kind
        fixed = name in POINTERS or name.startswith(("conv_", "weight_", "state_"))
        if fixed and name not in constants and name not in op._LIVE_ARGUMENTS:
            attributes[(place,)] = [["tt.divisibility", 16]]
    by_place = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    built = triton.compile(
        ASTSource(kernel, signature, by_place, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": op.NUM_WARPS, "launch_pdl": launch_pdl},
    )
    return built.asm["ptx"]


def main():
    from vllm.model_executor.layers.mamba.ops import kda_single_token as op

    counts = {}
    for architecture in ARCHITECTURES:
        for number, variant in enumerate(op._VARIANTS):
            for aligned in (True, False) if architecture == 90 else (True,):
                ptx = compiled_ptx(architecture, variant, aligned)
                counts[f"{architecture} {number} {aligned}"] = {
                    "two bytes": ptx.count("ld.global.b16"),
                    "sixteen bytes": ptx.count("ld.global.v4.b32"),
                    "programmatic launch": ptx.count("griddepcontrol.wait"),
                }
    print(json.dumps(counts))


@pytest.fixture(scope="module")
def counts():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


VARIANTS = range(4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_compiles(counts, architecture, variant):
    found = counts[f"{architecture} {variant} True"]
    assert found["sixteen bytes"] > 0
    assert bool(found["programmatic launch"]) == (architecture >= 90)


@pytest.mark.parametrize("variant", VARIANTS)
def test_aligned_rows_are_read_in_wider_words(counts, variant):
    aligned, other = (counts[f"90 {variant} {a}"] for a in (True, False))
    assert aligned["two bytes"] < other["two bytes"]


if __name__ == "__main__":
    main()
