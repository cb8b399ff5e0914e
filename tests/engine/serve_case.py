# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One engine, one case: decode with it and write what happened as JSON.

``python serve_case.py MODEL CASE OUT`` with the plugin switched by ``VLLM_PLUGINS``
as a user would. ``test_serve.py`` runs the cases and compares their reports.
"""

import argparse
import inspect
import json
import os
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Functions are sent to the workers of several processes.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}

# As many of the likeliest tokens at each place tell a near-tie from a fault.
LOGPROBS = 50

# Random weights do not predict themselves, so drafts are kept by lot.
_KEPT_BY_LOT = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 1.7,
}
_NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_SHORT_STEPS = {"max_num_batched_tokens": 256, "max_num_seqs": 16}
_SYNC_CHECK = {"VLLM_GPU_SYNC_CHECK": "warn"}


def drafting(tokens: int, **how: Any) -> dict[str, Any]:
    """Engine arguments for ``tokens`` drafts a step."""
    return {"speculative_config": {**how, "num_speculative_tokens": tokens}}


@dataclass(frozen=True)
class Case:
    """What an engine is started with and what it decodes.

    Attributes:
        arguments: Engine arguments, over those of every case.
        environment: Variables set before vLLM is imported.
        batches: Sizes of the batches decoded one after the other.
        tokens: Tokens generated for each request.
        first_length: Length of the shortest prompt; a first chunk of one token must
            not be taken for a decode.
        repeating: Whether every second prompt repeats itself, so that an n-gram
            drafter finds something.
        devices: GPUs needed.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    batches: tuple[int, ...] = (6, 20)
    tokens: int = 64
    first_length: int = 1
    repeating: bool = False
    devices: int = 1


CASES: dict[str, Case] = {
    "graphs": Case(batches=(1, 5, 32, 32), tokens=512),
    "eager": Case(
        {"enforce_eager": True},
        environment=_SYNC_CHECK,
        batches=(1, 5, 32, 32),
        tokens=512,
    ),
    "large": Case({"max_num_seqs": 128}, batches=(128,)),
    "chunked": Case({"max_num_batched_tokens": 64, "max_num_seqs": 16}),
    "prefix": Case(
        {
            "enable_prefix_caching": True,
            "mamba_cache_mode": "align",
            "max_model_len": 8192,
            "max_num_batched_tokens": 8192,
        }
    ),
    "drafts1": Case(drafting(1, **_NGRAM, **_KEPT_BY_LOT), repeating=True),
    "drafts3": Case(
        drafting(3, **_NGRAM, **_KEPT_BY_LOT) | _SHORT_STEPS,
        environment=_SYNC_CHECK,
        repeating=True,
    ),
    "drafts5": Case(drafting(5, **_NGRAM, **_KEPT_BY_LOT), repeating=True),
    "mtp1": Case(drafting(1, method="mtp", **_KEPT_BY_LOT)),
    "mtp3": Case(drafting(3, method="mtp", **_KEPT_BY_LOT) | _SHORT_STEPS),
    "sync": Case({"async_scheduling": False}),
    "preempt": Case(
        {"max_model_len": 4096, "num_gpu_blocks_override": 60},
        batches=(12,),
        first_length=1400,
        tokens=200,
    ),
    "reload": Case(batches=(6,)),
    "dim_first": Case(environment={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}),
    "bf16_state": Case({"mamba_ssm_cache_dtype": "bfloat16"}),
    "runner_v1": Case(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    # No short steps here: with them vLLM's own prefill outgrows its locked workspace.
    "runner_v1_drafts3": Case(
        drafting(3, **_NGRAM, **_KEPT_BY_LOT) | {"max_num_seqs": 16},
        environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
        repeating=True,
    ),
    "lora": Case({"enable_lora": True}),
    "data_parallel": Case(
        environment={"VLLM_DP_SIZE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        batches=(6,),
        devices=2,
    ),
    # Last: vLLM looks at the whole GPU's memory here, and others may still be starting.
    "sleep": Case({"enable_sleep_mode": True}, batches=(6,)),
}


# --- weights ----------------------------------------------------------------------


def seeded_value(name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
    """A value at whose scale greedy decoding does not repeat itself.

    A matrix is normal with variance 1 / fan-in, so that a layer keeps its input's
    scale; norms stay near one, the KDA gates spread over their range.
    """
    generator = torch.Generator(parameter.device)
    generator.manual_seed(zlib.crc32(name.encode()) + seed)
    value = torch.randn(
        parameter.shape,
        generator=generator,
        device=parameter.device,
        dtype=torch.float32,
    )
    if name.endswith("A_log"):
        value.abs_().log_()
    elif "norm" in name and parameter.dim() == 1:
        value.mul_(0.05).add_(1.0)
    elif name.endswith("bias"):
        value.mul_(0.1)
    elif "conv1d" in name:
        value.mul_(0.5)
    elif parameter.dim() > 1:
        value.mul_(parameter.shape[-1] ** -0.5)
    return value.to(parameter.dtype)


@torch.no_grad()
def seed_weights(model: torch.nn.Module, seed: int) -> None:
    """Give a model with dummy weights those of ``seed``, in place."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.copy_(seeded_value(name, parameter, seed))
    for module in model.modules():
        merge_stock_conv_weight(module)


@torch.inference_mode()
def merge_stock_conv_weight(module: torch.nn.Module) -> None:
    """vLLM's own KDA layer keeps the convolution weights that it merged first."""
    if type(module).__name__ == "Glm5NextLinearAttention":
        merged = module._merged_conv_weight
        if merged is not None:
            convs = (module.q_conv1d, module.k_conv1d, module.v_conv1d)
            merged.copy_(torch.cat([conv.weight.squeeze(1) for conv in convs]))


# A merged parameter's name, and its checkpoint's names in their order.
_MERGED = {
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
    ".fused_qkv_a_proj.": (".q_a_proj.", ".kv_a_proj_with_mqa."),
    ".wk_weights_proj.": (".wk.", ".weights_proj."),
    ".in_proj_qkvbfg_a.": (
        ".q_proj.",
        ".k_proj.",
        ".v_proj.",
        ".b_proj.",
        ".f_a_proj.",
        ".g_a_proj.",
    ),
}


# What vLLM's MLA computes from its weights, and registers among them.
_DERIVED = ("W_UV", "W_UK_T")


def checkpoint_weights(
    model: torch.nn.Module, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of ``seed`` under the names that a GLM-5.3 checkpoint gives them."""
    config = model.config
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in _DERIVED:
            continue
        value = parameter.data
        if parameter.is_floating_point():
            value = seeded_value(name, parameter, seed)
        merged = next((part for part in _MERGED if part in name), None)
        if merged:
            sizes = model.get_submodule(name.rpartition(".")[0]).output_sizes
            for part, rows in zip(_MERGED[merged], value.split(sizes), strict=True):
                if "kv_a_proj" in part and config.mla_use_nope:
                    rows = rows[: len(rows) - config.qk_rope_head_dim]
                yield name.replace(merged, part), rows
        elif ".routed_experts.w13_" in name or ".routed_experts.w2_" in name:
            yield from _expert_weights(name, value)
        else:
            yield name, value


def _expert_weights(
    name: str, value: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    both = ".routed_experts.w13_" in name
    merged = ".routed_experts.w13_" if both else ".routed_experts.w2_"
    for expert, weight in enumerate(value):
        if not both:
            yield name.replace(merged, f".{expert}.down_proj."), weight
            continue
        for part, rows in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
            yield name.replace(merged, f".{expert}.{part}."), rows


def reload(engine: Any, seed: int) -> None:
    """Load the weights of ``seed`` through vLLM's own call for that."""
    [model] = on_models(engine, lambda model: model)
    # vLLM puts the parameters on the meta device before it asks for the first.
    weights = list(checkpoint_weights(model, seed))
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    for module in model.modules():
        merge_stock_conv_weight(module)


# --- what is decoded --------------------------------------------------------------


def prompts(case: Case, count: int, vocabulary: int, seed: int) -> list[dict]:
    """Prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = case.first_length + (index * 37) % 180
        ids = torch.randint(10, vocabulary, (length,), generator=generator).tolist()
        if case.repeating and index % 2:
            ids = (ids[:7] * 40)[: max(length, 24)]
        made.append({"prompt_token_ids": ids})
    return made


def decode(engine: Any, batch: list[dict], tokens: int) -> list[dict]:
    """Greedy tokens of each request, and the likeliest few at each place."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=LOGPROBS,
        seed=1,
    )
    outputs = engine.generate(batch, greedy, use_tqdm=False)
    return [
        {
            "ids": list(output.outputs[0].token_ids),
            "likeliest": [
                {token: round(entry.logprob, 5) for token, entry in place.items()}
                for place in output.outputs[0].logprobs
            ],
            "cached": output.num_cached_tokens,
            "prompt": len(output.prompt_token_ids),
        }
        for output in outputs
    ]


def run_case(engine: Any, name: str, vocabulary: int) -> dict[str, list[dict]]:
    """Decode as the case wants; the texts by the name of what was decoded."""
    case = CASES[name]
    found = {}
    for number, count in enumerate(case.batches):
        batch = prompts(case, count, vocabulary, number)
        found[f"batch {number} of {count}"] = decode(engine, batch, case.tokens)
    more = {
        "graphs": _alone_and_again,
        "prefix": _with_a_shared_prefix,
        "sleep": _after_sleep,
        "reload": _after_reload,
    }.get(name)
    if more is not None:
        batch = prompts(case, case.batches[-1], vocabulary, len(case.batches) - 1)
        found |= more(engine, case, batch)
    return found


def _alone_and_again(
    engine: Any, case: Case, batch: list[dict]
) -> dict[str, list[dict]]:
    """The last batch's first requests, each by itself, and the first batch again."""
    alone = [decode(engine, [request], case.tokens)[0] for request in batch[:4]]
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    first = prompts(case, case.batches[0], vocabulary, 0)
    return {"alone": alone, "batch 0 again": decode(engine, first, case.tokens)}


def _with_a_shared_prefix(
    engine: Any, case: Case, batch: list[dict]
) -> dict[str, list[dict]]:
    """Prompts that begin alike, twice: the second time from cached states.

    A block has 1,024 or 1,536 tokens here, and some requests grow past its end while
    they decode. None has more than the 2,048 beyond which MLA attends to a selection.
    """
    shared = (batch[-1]["prompt_token_ids"] * 400)[:1900]
    lengths = (1900, 1900, 1800, 1700, 1600, 1540, 1530, 1500, 1020, 980)
    longer = [
        {"prompt_token_ids": shared[:length] + [11 + i]}
        for i, length in enumerate(lengths)
    ]
    return {
        "first": decode(engine, longer, case.tokens),
        "hits": decode(engine, longer, case.tokens),
    }


def _after_sleep(engine: Any, case: Case, batch: list[dict]) -> dict[str, list[dict]]:
    reload(engine, 1)
    found = {"before": decode(engine, batch, case.tokens)}
    engine.sleep(level=1)
    engine.wake_up()
    found["after level 1"] = decode(engine, batch, case.tokens)
    engine.sleep(level=2)
    engine.wake_up(tags=["weights"])
    restore_sequence_starts(engine)
    reload(engine, 1)
    engine.wake_up(tags=["kv_cache"])
    found["after level 2"] = decode(engine, batch, case.tokens)
    return found


@torch.inference_mode()
def restore_sequence_starts(engine: Any) -> None:
    """Write what vLLM's sleep at level 2 drops and never restores.

    Its sparse MLA on Hopper counts its queries off by a plain tensor, made with the
    layer and no buffer of a module, so nothing saves it.
    """
    [model] = on_models(engine, lambda model: model)
    for module in model.modules():
        implementation = getattr(module, "impl", None)
        starts = getattr(implementation, "cu_seqlens_q_buffer", None)
        if starts is not None:
            torch.arange(len(starts), out=starts)


def _after_reload(engine: Any, case: Case, batch: list[dict]) -> dict[str, list[dict]]:
    found = {}
    for name, seed in (("weights 1", 1), ("weights 2", 2), ("weights 1 again", 1)):
        reload(engine, seed)
        found[name] = decode(engine, batch, case.tokens)
    return found


# --- the engine -------------------------------------------------------------------


class Watch:
    """What the metadata builder makes in this process.

    Attributes:
        kinds: How often each kind of step was seen.
        least_accepted: The smallest accepted count, on the device, or None.
    """

    def __init__(self) -> None:
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

        self.kinds: Counter[str] = Counter()
        self.least_accepted: torch.Tensor | None = None
        self._wait_once = False
        build = GDNAttentionMetadataBuilder.build

        def watched(*args: Any, **kwargs: Any) -> Any:
            metadata = build(*args, **kwargs)
            if self._wait_once:
                self._wait_once = False
                torch.zeros(1, device="cuda").item()
            self._count(metadata)
            if metadata.num_spec_decodes:
                asked = inspect.signature(build).bind(*args, **kwargs).arguments
                self._look_at_drafts(
                    asked["num_decode_draft_tokens_cpu"], metadata.num_accepted_tokens
                )
            return metadata

        GDNAttentionMetadataBuilder.build = watched

    def start(self) -> None:
        """Forget what was seen so far; wait for the device where vLLM should notice."""
        self.kinds.clear()
        self.least_accepted = None
        self._wait_once = "VLLM_GPU_SYNC_CHECK" in os.environ

    def _count(self, metadata: Any) -> None:
        from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import batch_kind

        self.kinds[batch_kind(metadata).name] += 1
        if metadata.num_prefills and metadata.num_decodes:
            self.kinds["prefill with decode"] += 1
        if metadata.num_spec_decodes and metadata.num_prefills:
            self.kinds["prefill with verify"] += 1

    def _look_at_drafts(self, drafted: torch.Tensor, accepted: torch.Tensor) -> None:
        for count in drafted[drafted >= 0].tolist():
            self.kinds[f"{count} drafted"] += 1
        least = accepted.min()
        if self.least_accepted is not None:
            least = torch.minimum(least, self.least_accepted)
        self.least_accepted = least


def make_engine(model: str, case: Case, kda_backend: str | None) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": float(os.environ.get("GMU", "0.1")),
        # Several engines share the GPU, so none can tell its own memory by profiling.
        "kv_cache_memory_bytes": 4 << 30,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "max_logprobs": LOGPROBS,
        "seed": 0,
        "kernel_config": {"enable_jit_warmup": False},
    } | case.arguments
    if kda_backend:
        arguments["additional_config"] = {"kda_decode_backend": kda_backend}
    return LLM(**arguments)


def on_models(engine: Any, function: Callable[[torch.nn.Module], Any]) -> list[Any]:
    """Call ``function`` on each worker's model, wherever the worker runs.

    ``LLM.apply_model`` sends functions by a pickle that does not know this script's.
    """
    return engine.collective_rpc(lambda worker: function(worker.get_model()))


def count_layers(model: torch.nn.Module) -> dict[str, int]:
    return dict(Counter(type(module).__name__ for module in model.modules()))


def memory(model: torch.nn.Module) -> int:
    """Bytes of the GPU that this worker's tensors and graphs hold."""
    return torch.accelerator.memory_reserved()


_COUNTERS = (
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)


def describe(engine: Any, watch: Watch, found: dict[str, list[dict]]) -> dict:
    layers = Counter()
    for counted in on_models(engine, count_layers):
        layers.update(counted)
    config = engine.llm_engine.vllm_config.compilation_config
    least = watch.least_accepted
    return {
        "tokens": found,
        "kinds": watch.kinds,
        "least accepted": None if least is None else int(least),
        "layers": layers,
        "captured sizes": config.cudagraph_capture_sizes,
        "cudagraph mode": str(config.cudagraph_mode),
        "counters": {
            metric.name: metric.value
            for metric in engine.get_metrics()
            if metric.name in _COUNTERS
        },
    }


def serve(options: argparse.Namespace) -> dict[str, Any]:
    case, watch = CASES[options.case], Watch()
    start = time.perf_counter()
    engine = make_engine(options.model, case, options.kda_backend)
    started = time.perf_counter() - start
    reserved = on_models(engine, memory)
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    on_models(engine, partial(seed_weights, seed=1))
    watch.start()
    if os.environ.get("VLLM_DP_RANK", "0") != "0":
        # The idle rank: done after two tokens, and there for the other's steps.
        decode(engine, prompts(case, 1, vocabulary, 0), 2)
        signal.pause()
    found = run_case(engine, options.case, vocabulary)
    more = {"seconds to start": started, "memory": reserved}
    return describe(engine, watch, found) | more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--kda-backend")
    options = parser.parse_args()
    os.environ |= ENVIRONMENT | CASES[options.case].environment
    try:
        report = serve(options)
    except (ValueError, NotImplementedError) as error:
        report = {"refused": f"{type(error).__name__}: {error}"}
    options.out.write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
