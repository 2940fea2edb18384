"""Save the queries, keys and values of a pretrained model on a text, for `subquad compare --qkv`.

    python examples/save_qkv.py MODEL TEXT.txt --layer 3 --out qkv.safetensors
    subquad compare --lengths 128:512 --qkv qkv.safetensors

MODEL is a folder or a name on the Hugging Face hub. The inputs of a trained model are very different from random ones. With
this file, `subquad compare` also measures the error of each mechanism on the inputs of your model. Needs the extra `hf`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--layer", type=int, default=0, help="index of the attention layer, in the order of execution (0)")
    parser.add_argument("--tokens", type=int, default=512, help="number of tokens, from the beginning of the text (512)")
    parser.add_argument("--out", type=Path, default=Path("qkv.safetensors"))
    options = parser.parse_args()
    if not options.text.is_file():
        parser.error(f"TEXT must be a file; {options.text} does not exist")
    if not options.out.parent.is_dir():
        parser.error(f"--out must be in an existing folder; got {options.out}")

    layers: list[dict[str, Tensor]] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        key_, value_ = (x.repeat_interleave(group, dim=1) for x in (key, value))
        layers.append({"query": query.contiguous(), "key": key_.contiguous(), "value": value_.contiguous()})
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("save_qkv", attend)
    AttentionMaskInterface.register("save_qkv", sdpa_mask)
    model = AutoModel.from_pretrained(options.model, attn_implementation="save_qkv").eval()
    tokens = AutoTokenizer.from_pretrained(options.model)(options.text.read_text(), return_tensors="pt")
    most = min(options.tokens, getattr(model.config, "max_position_embeddings", options.tokens))
    with torch.no_grad():
        model(**{name: t[:, :most] for name, t in tokens.items()})
    if not 0 <= options.layer < len(layers):
        parser.error(f"--layer must be 0 to {len(layers) - 1} for this model; got {options.layer}")
    save_file(layers[options.layer], options.out)
    shape = tuple(layers[options.layer]["query"].shape)
    print(f"saved queries {shape} of layer {options.layer}, with keys and values, to {options.out}")


if __name__ == "__main__":
    main()
