# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``glm5next-kda check``: every step kind on every route, against float64."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from vllm.benchmarks.kda_decode.layer import (
    Batch,
    LayerOptions,
    LayerUnderTest,
    build_layer,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode import one_launch
from vllm.model_executor.layers.mamba.gdn.kda_decode import step as step_module
from vllm.model_executor.layers.mamba.gdn.kda_decode.b12x import (
    B12xFeatures,
    installed_b12x,
)
from vllm.model_executor.layers.mamba.gdn.kda_decode.one_launch import (
    MIN_COMPUTE_CAPABILITY,
)
from vllm.model_executor.layers.mamba.ops.kda_single_token import (
    CONV_WIDTH,
    reference_kda_decode,
)

NUM_SPEC = 3
NUM_SLOTS = 24

# Bounds on ||difference|| / ||reference||. On a GPU two values differ where a sum
# lies so near a rounding boundary that float32 and float64 fall on its two sides:
# bfloat16 rounding of the convolved q, k and v moves the state, and that of the
# attention output moves the result. The interpreter truncates to bfloat16 where a
# GPU rounds, so there every value differs.
OUTPUT_BOUND = {"cuda": 4e-3, "cpu": 8e-3}
STATE_BOUND = {"cuda": 2e-4, "cpu": 8e-3}
BF16_STATE_BOUND = {"cuda": 4e-3, "cpu": 8e-3}
# Chunked prefill multiplies in bfloat16.
PREFILL_BOUND = 2e-2


@dataclass(frozen=True)
class Scenario:
    """One kind of step.

    Attributes:
        name: What the table calls it.
        batch: The step.
        num_spec: Draft tokens that the layer is configured for.
        has_prefill: It needs a GPU: prefill does not run in the interpreter.
    """

    name: str
    batch: Batch
    num_spec: int = 0
    has_prefill: bool = False


_TABLE = [[4 * r + c for c in range(1, 5)] for r in range(4)]

SCENARIOS = (
    Scenario("plain decode", Batch([1] * 4, [[3], [9], [5], [7]])),
    Scenario(
        "padded decode",
        Batch([1, 1], [[3], [9]], padded_tokens=4, padded_requests=4),
    ),
    Scenario("plain decode, drafts configured", Batch([1] * 3, _TABLE[:3]), NUM_SPEC),
    Scenario(
        "verify, drafts rejected",
        Batch([4] * 3, _TABLE[:3], drafts=[3] * 3, accepted=[2, 1, 4]),
        NUM_SPEC,
    ),
    Scenario(
        "verify, nothing drafted",
        Batch([1] * 3, _TABLE[:3], drafts=[0] * 3, accepted=[1, 3, 4]),
        NUM_SPEC,
    ),
    Scenario(
        "verify, variable length",
        Batch([4, 1, 2, 3], _TABLE, drafts=[3, 0, 1, 2], accepted=[1, 4, 2, 3]),
        NUM_SPEC,
    ),
    Scenario("decode, empty last row", Batch([1, 1, 0], [[3], [9], [5]])),
    Scenario(
        "prefill",
        Batch([70, 5], [[3], [9]], computed=[0, 64], prefilling=[True, True]),
        has_prefill=True,
    ),
    Scenario(
        "prefill with decode",
        Batch(
            [1, 1, 70],
            [[3], [9], [5]],
            computed=[8, 20, 0],
            prefilling=[False, False, True],
        ),
        has_prefill=True,
    ),
    Scenario(
        "verify behind other rows",
        Batch(
            [1, 4, 6, 4],
            _TABLE,
            computed=[9, 20, 0, 20],
            drafts=[-1, 3, -1, 3],
            accepted=[1, 2, 1, 3],
            prefilling=[False, False, True, False],
        ),
        NUM_SPEC,
        has_prefill=True,
    ),
)


@dataclass(frozen=True)
class Route:
    """One way to run the decode steps.

    Attributes:
        name: What the table calls it.
        backend: Its ``kda_decode_backend``.
        features: Makes the B12X that the layer is to find; None for the installed.
    """

    name: str
    backend: str
    features: Callable[[], B12xFeatures] | None = None


@dataclass(frozen=True)
class Error:
    """How far a result lies from its reference.

    Attributes:
        largest: Largest |difference|.
        relative: ||difference|| / ||reference||.
    """

    largest: float
    relative: float

    @classmethod
    def of(cls, found: torch.Tensor, wanted: torch.Tensor) -> "Error":
        """Compare in float64; a NaN makes both figures NaN, which meet no bound."""
        wanted = wanted.detach()
        difference = found.detach().double() - wanted
        return cls(
            float(difference.abs().max()), float(difference.norm() / wanted.norm())
        )


@dataclass
class Outcome:
    """One row of the table."""

    scenario: str
    route: str
    calls: str
    copied: int
    output: Error
    state: Error
    passed: bool


def routes(device: torch.device, backend: str) -> list[Route]:
    """The routes that this machine has.

    Args:
        device: Where they run.
        backend: A ``kda_decode_backend`` to keep to, or ``all``.

    Returns:
        The routes. On a CPU, B12X's are those of its double.
    """
    found = [Route("vLLM", "triton")]
    if device.type == "cpu":
        found += [Route("one launch", "one_launch", B12xFeatures), *doubled_routes()]
    else:
        if torch.cuda.get_device_capability(device) >= MIN_COMPUTE_CAPABILITY:
            found.append(Route("one launch", "one_launch"))
        if installed_b12x().missing is None:
            found.append(Route("B12X", "b12x"))
    return [route for route in found if backend in ("all", route.backend)]


def doubled_routes() -> list[Route]:
    """B12X's routes behind its double; none if b12x is not installed."""
    try:
        from vllm.benchmarks.kda_decode.double import B12xDouble
    except ImportError as error:
        print(f"B12X's routes are left out: {error}")
        return []

    def features(**has: bool) -> B12xFeatures:
        return B12xDouble(**has).features()

    return [
        Route("B12X single-token", "b12x", partial(features, single_token=True)),
        Route("B12X live", "b12x", features),
        Route("B12X staged", "b12x", partial(features, live=False)),
    ]


class CopyCounter(TorchDispatchMode):
    """Counts the bytes that copying operators write while it is active."""

    # In inference mode composite operators arrive whole, so "to" and "reshape" stand
    # beside what they decompose to.
    _COPIES = frozenset(
        (
            "_to_copy",
            "cat",
            "clone",
            "contiguous",
            "copy_",
            "flatten",
            "index",
            "index_copy_",
            "index_put_",
            "index_select",
            "reshape",
            "to",
        )
    )

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._paused = False

    def __enter__(self) -> "CopyCounter":
        self._stack = ExitStack()
        if os.environ.get("TRITON_INTERPRET") == "1":
            self._stack.enter_context(self._ignore_interpreter())
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()

    @contextmanager
    def _ignore_interpreter(self) -> Iterator[None]:
        """Leave out the copies that Triton's interpreter makes of its arguments."""
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def uncounted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self._paused = True
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self._paused = False

        with mock.patch.object(GridExecutor, "__call__", uncounted):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self._paused and (name.endswith("_") or not is_view(result, args)):
            self.count(name, result)
        return result

    def count(self, name: str, result: Any) -> None:
        """Take note of an operator that wrote ``result``."""
        if name in self._COPIES:
            self.bytes += result.numel() * result.element_size()


def is_view(result: Any, args: Any) -> bool:
    """Whether an operator's result lies in its first argument's storage."""
    if not (args and isinstance(args[0], torch.Tensor)):
        return False
    results = result if isinstance(result, (tuple, list)) else (result,)
    storage = args[0].untyped_storage().data_ptr()
    return all(
        isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() == storage
        for r in results
    )


@contextmanager
def between_projections(
    layer: Any, counter: CopyCounter, seen: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Count the copies between a layer's last projection in and ``o_proj``.

    Args:
        layer: The KDA layer.
        counter: Active in between.
        seen: Gets the projections (``projected``, ``raw_g``, ``z``) and the attention
            ``output``.
    """

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, result: Any) -> None:
            # vLLM's own convolution overwrites the projections.
            seen[name] = result[0].clone()

        return hook

    def enter(module: Any, args: Any, result: Any) -> None:
        counter.__enter__()

    def leave(module: Any, args: Any) -> None:
        counter.__exit__(None, None, None)
        seen["output"] = args[0].clone()

    handles = [
        layer.in_proj_qkvbfg_a.register_forward_hook(keep("projected")),
        layer.f_b_proj.register_forward_hook(keep("raw_g")),
        layer.g_b_proj.register_forward_hook(keep("z")),
        layer.g_b_proj.register_forward_hook(enter),
        layer.o_proj.register_forward_pre_hook(leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_B12X_ENTRY_POINTS = ("run_kda", "run_kda_single_token")
_VLLM_ENTRY_POINTS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_kda_with_fused_gate",
    "fused_recurrent_kda",
)


@contextmanager
def recorded_calls(layer: Any, calls: Counter[str]) -> Iterator[None]:
    """Count a layer's calls into B12X and into vLLM's kernels, by name."""
    from vllm.models.glm5next.common import kda

    places = [(kda, name) for name in _VLLM_ENTRY_POINTS]
    places.append((step_module, "causal_conv1d_update"))
    places.append((one_launch, "kda_single_token"))
    api = getattr(getattr(layer._decode, "features", None), "api", None)
    places += [(api, name) for name in _B12X_ENTRY_POINTS if hasattr(api, name)]

    def counted(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for place, name in places:
            function = getattr(place, name)
            stack.enter_context(mock.patch.object(place, name, counted(name, function)))
        handle = layer.o_norm.register_forward_hook(
            lambda *_: calls.update(["rms_norm_gated"])
        )
        try:
            yield
        finally:
            handle.remove()


def float64_step(
    under_test: LayerUnderTest,
    seen: dict[str, torch.Tensor],
    batch: Batch,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a step should give, in float64.

    Args:
        under_test: The layer, after the step.
        seen: The step's projections, from :func:`between_projections`.
        batch: The step.
        conv_state: The convolution states before it.
        recurrent_state: The recurrent states before it.

    Returns:
        Output ``[tokens, H, D]`` of the tokens that belong to a request, and both
        states.
    """
    layer, tokens = under_test.layer, batch.num_tokens
    heads, dim = layer.local_num_heads, layer.head_dim
    width = 3 * layer.local_projection_size
    projected = seen["projected"][:tokens]
    conv_state, recurrent_state = conv_state.clone(), recurrent_state.clone()
    fresh = [
        slots[0]
        for slots, computed in zip(batch.slots, batch.computed or (), strict=False)
        if computed == 0
    ]
    # A prefill writes the window alone; columns for drafts keep what they hold.
    conv_state[fresh, :, : CONV_WIDTH - 1] = 0
    recurrent_state[fresh] = 0
    convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    arguments = {
        "mixed_qkv": projected[:, :width],
        "conv_weight": torch.cat([conv.weight.squeeze(1) for conv in convs]),
        "raw_g": seen["raw_g"][:tokens].view(-1, heads, dim),
        "raw_beta": projected[:, width : width + heads],
        "z": seen["z"][:tokens].view(-1, heads, dim),
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "norm_weight": layer.o_norm.weight,
    }
    return _float64_rows(
        arguments,
        batch,
        conv_state,
        recurrent_state,
        lower_bound=layer.kda_lower_bound,
        eps=layer.o_norm.eps,
    )


def _float64_rows(
    arguments: dict[str, torch.Tensor],
    batch: Batch,
    conv_state: torch.Tensor,
    recurrent_state: torch.Tensor,
    **options: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference over requests that decode, verify drafts or prefill."""
    starts = [0, *accumulate(batch.query_lens)]
    slots = torch.tensor(batch.slots)
    drafts = batch.drafts
    plain = drafts is None and max(batch.query_lens) <= 1
    if plain or (drafts is not None and min(drafts) >= 0):
        return reference_kda_decode(
            **arguments,
            conv_state=conv_state,
            recurrent_state=recurrent_state,
            state_indices=slots[:, :1] if plain else slots,
            query_start_loc=torch.tensor(starts),
            num_accepted_tokens=None
            if drafts is None
            else torch.tensor(batch.accepted),
            **options,
        )
    output = []
    for row, first, last, verify in _reference_calls(batch, starts):
        of_tokens = {
            name: tensor[first:last]
            for name, tensor in arguments.items()
            if name in ("mixed_qkv", "raw_g", "raw_beta", "z")
        }
        accepted = torch.tensor(batch.accepted[row : row + 1]) if verify else None
        result, conv_state, recurrent_state = reference_kda_decode(
            **arguments | of_tokens,
            conv_state=conv_state,
            recurrent_state=recurrent_state,
            state_indices=slots[row : row + 1, : None if verify else 1],
            query_start_loc=torch.tensor([0, last - first]),
            num_accepted_tokens=accepted,
            **options,
        )
        output.append(result)
    return torch.cat(output), conv_state, recurrent_state


def _reference_calls(
    batch: Batch, starts: list[int]
) -> Iterator[tuple[int, int, int, bool]]:
    """Row, first and last token, and whether drafts are verified, of each call.

    A prefill is the same recurrence, token by token in one slot.
    """
    for row, (begin, end) in enumerate(pairwise(starts)):
        if batch.drafts is not None and batch.drafts[row] >= 0:
            yield row, begin, end, True
        else:
            for token in range(begin, end):
                yield row, token, token + 1, False


def _bound(bounds: dict[str, float], scenario: Scenario, device: torch.device) -> float:
    return PREFILL_BOUND if scenario.has_prefill else bounds[device.type]


def check_step(
    scenario: Scenario,
    route: Route,
    num_heads: int,
    device: torch.device,
    options: LayerOptions | None = None,
) -> Outcome:
    """Run one scenario on one route and judge it.

    Args:
        scenario: The step.
        route: How it runs.
        num_heads: Local heads of the layer.
        device: Where it runs.
        options: What else the layer is built with.

    Returns:
        The row of the table. It passes if output and recurrent state lie within
        their bounds, the convolution state is exact, the slots that the step does
        not name keep their bytes, and the rows past its tokens are zero.
    """
    rows = scenario.batch.padded_requests or len(scenario.batch.slots)
    options = replace(
        options or LayerOptions(),
        # B12X's single-token call compiles for each; one is enough for one step.
        capture_sizes=(rows,),
        num_heads=num_heads,
        num_spec=scenario.num_spec,
        backend=route.backend,
        max_num_seqs=max(16, len(scenario.batch.slots)),
    )
    slots = (slot for slots in scenario.batch.slots for slot in slots)
    under_test = build_layer(
        options,
        num_slots=1 + max(NUM_SLOTS, *slots),
        device=device,
        b12x=route.features() if route.features else None,
    )
    conv, state = under_test.conv_state.clone(), under_test.recurrent_state.clone()
    seen: dict[str, torch.Tensor] = {}
    calls: Counter[str] = Counter()
    counter = CopyCounter()
    with (
        between_projections(under_test.layer, counter, seen),
        recorded_calls(under_test.layer, calls),
    ):
        _run(under_test, scenario.batch, options.hidden_size)
    errors, passed = _judge(under_test, scenario, seen, conv, state)
    return Outcome(
        scenario.name,
        route.name,
        ", ".join(f"{n} {name}" if n > 1 else name for name, n in calls.items()),
        counter.bytes,
        *errors,
        # vLLM's own path leaves a padded batch's rows as it found them.
        passed and (route.backend == "triton" or not _rows_after(seen, scenario).any()),
    )


def _run(under_test: LayerUnderTest, batch: Batch, hidden_size: int) -> None:
    rows = batch.padded_tokens or batch.num_tokens
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(rows, hidden_size, generator=generator)
    hidden = hidden.to(under_test.device, torch.bfloat16)
    under_test.run(hidden, under_test.metadata(batch))


def _rows_after(seen: dict[str, torch.Tensor], scenario: Scenario) -> torch.Tensor:
    return seen["output"][scenario.batch.num_tokens :]


def _judge(
    under_test: LayerUnderTest,
    scenario: Scenario,
    seen: dict[str, torch.Tensor],
    conv: torch.Tensor,
    state: torch.Tensor,
) -> tuple[tuple[Error, Error], bool]:
    """Compare a step that has run with the reference, from the states before it."""
    batch, device = scenario.batch, under_test.device
    output, wanted_conv, wanted_state = float64_step(
        under_test, seen, batch, conv, state
    )
    found = seen["output"][: batch.num_tokens].view(output.shape)
    named = torch.zeros(len(state), dtype=torch.bool)
    named[[slot for slots in batch.slots for slot in slots]] = True
    of_output = Error.of(found, output)
    of_state = Error.of(under_test.recurrent_state[named], wanted_state[named])
    state_bound = BF16_STATE_BOUND if state.dtype == torch.bfloat16 else STATE_BOUND
    passed = (
        of_output.relative <= _bound(OUTPUT_BOUND, scenario, device)
        and of_state.relative <= _bound(state_bound, scenario, device)
        and torch.equal(under_test.conv_state, wanted_conv)
        and torch.equal(under_test.recurrent_state[~named], state[~named])
    )
    return (of_output, of_state), passed


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print the outcomes, aligned."""
    head = ("step", "route", "copied B", "max output err", "max state err", "", "calls")
    rows = [
        (
            o.scenario,
            o.route,
            str(o.copied),
            f"{o.output.largest:.1e}",
            f"{o.state.largest:.1e}",
            "ok" if o.passed else "MISMATCH",
            o.calls,
        )
        for o in outcomes
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def run_check(num_heads: int, backend: str) -> bool:
    """Run every scenario on every route that this machine has, and print a table.

    Args:
        num_heads: Local heads of the layer.
        backend: A ``kda_decode_backend`` to keep to, or ``all``.

    Returns:
        Whether every row passed, and there was a route to check.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print(
            "No GPU: vLLM's kernels run in Triton's interpreter, B12X's kernels too, "
            "behind a double of B12X's entry points (which says nothing of the entry "
            "points that the installed B12X has). Prefill is left out."
        )
    else:
        b12x = installed_b12x()
        print(f"GPU: {torch.cuda.get_device_name(device)}")
        print(f"B12X: {b12x.missing or b12x.origin}")
    found = routes(device, backend)
    if not found:
        print(f"Nothing to check: this machine has no route for backend {backend}.")
        return False
    planned = [
        (scenario, route)
        for scenario in SCENARIOS
        if device.type == "cuda" or not scenario.has_prefill
        for route in found
    ]
    outcomes = [
        check_step(scenario, route, num_heads, device)
        for scenario, route in tqdm(planned, desc="glm5next-kda check", unit="step")
    ]
    print_table(outcomes)
    failed = sum(not outcome.passed for outcome in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return not failed
