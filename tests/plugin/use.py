"""Uses the installed mechanism as if it were built in. Run with a folder to save models in, then with `load` and that folder."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import subquad as sq
from subquad.cli import app
from subquad.models import SubquadConfig, SubquadForCausalLM

TOKENS = torch.arange(12)[None] % 17


def save(folder):
    assert "squared_relu" in sq.methods(is_causal=True, decode=True)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    out, state = sq.attention(q, k, v, "squared_relu", is_causal=True, return_state=True)
    mechanism = type(sq.Attention(16, 2, "squared_relu").mechanism.method)
    assert mechanism.__module__ == "squared_relu"
    torch.testing.assert_close(sq.attention(q, k, v, mechanism(), is_causal=True), out)
    assert state.length == 9
    assert sq.why_not("squared_relu", scale=True)

    layer = sq.Attention(16, 2, "squared_relu")
    assert layer(torch.randn(2, 7, 16), is_causal=True).shape == (2, 7, 16)

    sizes = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = SubquadForCausalLM(SubquadConfig(**sizes, method=mechanism(floor=0.2))).eval()
    converted = sq.convert(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), mechanism(floor=0.3))
    for name, one in {"model": model, "converted": converted}.items():
        one.save_pretrained(folder / name)
        torch.save([one(TOKENS).logits, written(one)], folder / f"{name}.pt")

    app(["list"], standalone_mode=False)
    app(["show", "squared_relu", "--length", "12"], standalone_mode=False)


@torch.no_grad()
def load(folder):
    """In another process, where nothing but the name in the saved configuration leads to the mechanism."""
    from_pretrained = AutoModelForCausalLM.from_pretrained
    for name, loader in (("model", SubquadForCausalLM.from_pretrained), ("converted", from_pretrained), ("converted", sq.load)):
        model = loader(folder / name).eval()
        logits, tokens = torch.load(folder / f"{name}.pt")
        assert torch.equal(model(TOKENS).logits, logits)
        assert torch.equal(written(model), tokens)
    assert "squared_relu" in sys.modules


def written(model):
    """Tokens decoded greedily; one forward pass over all of them chooses the same."""
    tokens = model.generate(TOKENS[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1)
    assert torch.equal(model(tokens[:, :-1]).logits[:, 4:].argmax(-1), tokens[:, 5:])
    return tokens


if __name__ == "__main__":
    (load if sys.argv[1] == "load" else save)(Path(sys.argv[-1]))
