# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One engine, one case: decode with it and write what happened as JSON.

``python serve_case.py MODEL CASE OUT`` with the plugin switched by ``VLLM_PLUGINS``
as a user would. ``test_serve.py`` runs the cases and compares their reports.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

import torch  # noqa: E402

DRAFTS = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}

# Engine arguments of each case, over those of every case.
CASES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 64, "max_num_seqs": 16},
    "prefix": {"enable_prefix_caching": True, "mamba_cache_mode": "align"},
    "drafts1": {"speculative_config": {**DRAFTS, "num_speculative_tokens": 1}},
    "drafts3": {"speculative_config": {**DRAFTS, "num_speculative_tokens": 3}},
    "drafts5": {"speculative_config": {**DRAFTS, "num_speculative_tokens": 5}},
    "sync": {"async_scheduling": False},
    "preempt": {"num_gpu_blocks_override": 40},
    "sleep": {"enable_sleep_mode": True},
    "reload": {},
    "dim_first": {},
    "runner_v1": {},
}
# What a case puts in the environment before vLLM is imported.
ENVIRONMENT = {
    "dim_first": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
    "runner_v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
}


@torch.no_grad()
def seed_weights(model: torch.nn.Module, seed: int) -> None:
    """Give dummy weights a scale at which greedy decoding does not repeat itself.

    Every matrix gets normal values of variance 1 / fan-in, so that a layer keeps its
    input's scale; norms stay near one, the KDA gates spread over their range.
    """
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator(parameter.device).manual_seed(
            seed * 100_003 + index
        )
        if not parameter.is_floating_point():
            continue
        shape = parameter.shape
        value = torch.randn(
            shape, generator=generator, device=parameter.device, dtype=torch.float32
        )
        if name.endswith("A_log"):
            value = value.abs_().log_()
        elif "norm" in name and parameter.dim() == 1:
            value = value.mul_(0.05).add_(1.0)
        elif name.endswith("bias"):
            value.mul_(0.1)
        elif "conv1d" in name:
            value.mul_(0.5)
        elif parameter.dim() > 1:
            value.mul_(shape[-1] ** -0.5)
        parameter.copy_(value)
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


def prompts(count: int, vocabulary: int, repeating: bool) -> list[dict[str, Any]]:
    """Prompts of mixed lengths; repeating ones give a draft model something to find."""
    generator = torch.Generator().manual_seed(count)
    made = []
    for index in range(count):
        length = 3 + (index * 37) % 180
        ids = torch.randint(10, vocabulary, (length,), generator=generator).tolist()
        if repeating:
            ids = (ids[:7] * 40)[: max(length, 24)]
        made.append({"prompt_token_ids": ids})
    return made


class Watch:
    """Counts the batch kinds that the metadata builder makes, and the layers."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.mamba.gdn.kda_decode.routes import batch_kind
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

        self.kinds: Counter[str] = Counter()
        build = GDNAttentionMetadataBuilder.build

        def counted(builder: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = build(builder, *args, **kwargs)
            self.kinds[batch_kind(metadata).name] += 1
            if metadata.num_prefills and metadata.num_decodes:
                self.kinds["prefill with decode"] += 1
            if metadata.num_spec_decodes and metadata.num_prefills:
                self.kinds["prefill with verify"] += 1
            drafted = metadata.num_spec_decode_tokens - metadata.num_spec_decodes
            if metadata.num_spec_decodes and not drafted:
                self.kinds["nothing drafted"] += 1
            return metadata

        GDNAttentionMetadataBuilder.build = counted


def make_engine(model: str, case: str, kda_backend: str | None) -> Any:
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
        "disable_log_stats": True,
        "seed": 0,
        "kernel_config": {"enable_jit_warmup": False},
    } | CASES[case]
    if kda_backend:
        arguments["additional_config"] = {"kda_decode_backend": kda_backend}
    return LLM(**arguments)


def decode(engine: Any, batch: list[dict[str, Any]], tokens: int) -> list[dict]:
    """Greedy tokens of each request, and the likeliest few at each place."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=5,
    )
    outputs = engine.generate(batch, greedy, use_tqdm=False)
    return [
        {
            "ids": list(output.outputs[0].token_ids),
            "likeliest": [
                {token: entry.logprob for token, entry in place.items()}
                for place in output.outputs[0].logprobs
            ],
        }
        for output in outputs
    ]


def run_case(engine: Any, case: str, vocabulary: int, tokens: int) -> dict[str, Any]:
    """Decode as the case wants; token ids by the name of what was decoded."""
    found: dict[str, Any] = {}
    repeating = case.startswith("drafts")
    batches = (1, 5, 32) if case in ("graphs", "eager") else (6, 20)
    for count in batches:
        batch = prompts(count, vocabulary, repeating)
        found[f"batch {count}"] = decode(engine, batch, tokens)
    if case == "prefix":
        shared = prompts(1, vocabulary, False)[0]["prompt_token_ids"] * 200
        batch = [{"prompt_token_ids": shared[:600] + [11 + i]} for i in range(4)]
        found["first"] = decode(engine, batch, tokens)
        found["hits"] = decode(engine, batch, tokens)
    if case == "sleep":
        engine.sleep(level=1)
        engine.wake_up()
        found["awake"] = decode(engine, prompts(6, vocabulary, False), tokens)
    if case == "reload":
        engine.apply_model(lambda model: seed_weights(model, 2))
        found["new weights"] = decode(engine, prompts(6, vocabulary, False), tokens)
    return found


def layers(engine: Any) -> dict[str, int]:
    context = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    return Counter(type(layer).__name__ for layer in context.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--kda-backend")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    os.environ |= ENVIRONMENT.get(options.case, {})

    watch = Watch()
    start = time.perf_counter()
    engine = make_engine(options.model, options.case, options.kda_backend)
    started = time.perf_counter() - start
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    engine.apply_model(lambda model: seed_weights(model, 1))
    watch.kinds.clear()
    found = run_case(engine, options.case, vocabulary, options.tokens)
    report = {
        "tokens": found,
        "kinds": watch.kinds,
        "layers": layers(engine),
        "seconds to start": started,
        "cudagraph mode": str(
            engine.llm_engine.vllm_config.compilation_config.cudagraph_mode
        ),
    }
    options.out.write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
