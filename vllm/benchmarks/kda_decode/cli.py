# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``glm5next-kda``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm.benchmarks.kda_decode.layer import (
    GLM53_HEADS,
    interpreter_environment,
    use_interpreter,
)

_TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16, 32)


def parser() -> argparse.ArgumentParser:
    """The command line of ``glm5next-kda``."""
    top = argparse.ArgumentParser(
        prog="glm5next-kda",
        description="Check and time GLM-5.3's KDA decode on this machine.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="run every decode route against a float64 reference",
        description="Build GLM-5.3's KDA layer, drive it through each kind of step "
        "on each decode route that this machine has, and compare with a float64 "
        "reference. Without a GPU the kernels run in Triton's interpreter, and "
        "B12X's behind a double of its entry points. Exit status 1 on a mismatch.",
    )
    check.add_argument(
        "--tp",
        type=int,
        choices=_TENSOR_PARALLEL_SIZES,
        default=32,
        help=f"tensor-parallel size whose share of the {GLM53_HEADS} heads is built "
        "(default: %(default)s, a small layer; 8 gives 8 heads)",
    )
    check.add_argument(
        "--backend",
        choices=("all", "b12x", "one_launch", "triton"),
        default="all",
        help="check only the routes of one kda_decode_backend (default: all)",
    )
    _add_bench(commands)
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time the decode paths side by side (needs a GPU)",
        description="Microseconds per layer of each decode path, in one CUDA graph of "
        "34 layers with separate state pools, and of moving as many state bytes.",
    )
    bench.add_argument(
        "--heads",
        type=_positive,
        nargs="+",
        metavar="H",
        default=(8, 16, 32, 64),
        help="local head counts (default: %(default)s); 12, 24, 48 and 96 also time "
        "vLLM's compiled op",
    )
    bench.add_argument(
        "--batches",
        type=_positive,
        nargs="+",
        metavar="B",
        default=(1, 4, 16, 64, 256),
        help="batch sizes (default: %(default)s)",
    )
    bench.add_argument(
        "--replays",
        type=_positive,
        default=50,
        help="replays behind a median (default: 50)",
    )
    bench.add_argument(
        "--block-bytes",
        type=_positive,
        metavar="N",
        help="lay the slots of a layer N bytes apart, with other layers' between, as "
        "vLLM's KV cache does (default: each layer has a dense pool)",
    )
    bench.add_argument("--output-json", type=Path, help="write the figures here")
    bench.add_argument("--plot", type=Path, help="draw them here (needs matplotlib)")


def _run_bench(options: argparse.Namespace) -> int:
    from vllm.benchmarks.kda_decode.bench import run_bench

    try:
        run_bench(
            options.heads,
            options.batches,
            options.replays,
            options.output_json,
            options.plot,
            options.block_bytes,
        )
    except RuntimeError as error:
        print(f"glm5next-kda: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its status.

    Args:
        arguments: The command line after the program's name; ``sys.argv`` if None.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        if os.environ.get("TRITON_INTERPRET") != "1":
            # Triton reads its switch when it is imported: start over with it set.
            command = [sys.executable, "-m", "vllm.benchmarks.kda_decode", *arguments]
            os.execve(sys.executable, command, os.environ | interpreter_environment())
        use_interpreter()

    if options.command == "bench":
        sys.exit(_run_bench(options))

    from vllm.benchmarks.kda_decode.check import run_check

    sys.exit(0 if run_check(GLM53_HEADS // options.tp, options.backend) else 1)
