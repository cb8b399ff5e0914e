# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``glm5next-kda``."""

import argparse
import os
import sys
from collections.abc import Sequence

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
        prog="glm5next-kda", description="Check GLM-5.3's KDA decode on this machine."
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
        choices=("all", "b12x", "triton"),
        default="all",
        help="check only the routes of one kda_decode_backend (default: all)",
    )
    return top


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

    from vllm.benchmarks.kda_decode.check import run_check

    sys.exit(0 if run_check(GLM53_HEADS // options.tp, options.backend) else 1)
