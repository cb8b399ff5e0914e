# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write a reduced GLM-5.3 model folder, for engines with dummy weights.

``python make_model.py FOLDER --layers 45 --share 8`` is one rank's share of tensor
parallelism 8 at full depth. The folder holds a config.json and nothing else; what is
not an option keeps the size that transformers gives the model.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import Glm5NextTextConfig

DENSE_LAYERS = 3
# Of the checkpoint; a tensor-parallel share divides them.
HEADS, MOE_WIDTH, DENSE_WIDTH, VOCABULARY = 64, 2048, 12288, 154880


def text_config(layers: int, experts: int, share: int) -> dict[str, Any]:
    """The text model's configuration, as a checkpoint's config.json has it.

    Args:
        layers: Decoder layers, three KDA to one MLA; the first three are dense.
        experts: Routed experts of a sparse layer.
        share: Tensor-parallel size of which this is one rank's share.
    """
    heads = HEADS // share
    config = Glm5NextTextConfig(
        num_hidden_layers=layers,
        n_routed_experts=experts,
        mlp_layer_types=(["dense"] * DENSE_LAYERS + ["sparse"] * layers)[:layers],
        indexer_types=["full"] * layers,
        linear_num_heads=heads,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        moe_intermediate_size=MOE_WIDTH // share,
        intermediate_size=DENSE_WIDTH // share,
        vocab_size=VOCABULARY // share,
        pad_token_id=0,
    ).to_dict()
    config.pop("transformers_version", None)
    # Keys that vLLM reads and the transformers class does not declare.
    return config | {
        "architectures": ["Glm5NextForCausalLM"],
        "dtype": "bfloat16",
        "mhc": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "mla_use_nope": True,
        "indexer_rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 32768,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--share", type=int, default=8)
    options = parser.parse_args()
    # vLLM finds the MTP module of a checkpoint by this outer model type.
    whole = {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "text_config": text_config(options.layers, options.experts, options.share),
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "config.json").write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
