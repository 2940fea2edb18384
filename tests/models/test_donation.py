"""Models donate the states of their cache: the same tokens as without, in place, and in one graph when compiled."""

import pytest
import torch

import subquad as sq
from subquad.models import SubquadCache, SubquadConfig, SubquadForCausalLM
from subquad.models.cache import RewindableState
from tests.engines.test_native import needs_compiled

METHODS = ["linear", "performer", "hybrid", "local", "reformer", "softmax"]


def model(method, layers=2):
    torch.manual_seed(0)
    config = SubquadConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=40, method=method
    )
    return SubquadForCausalLM(config).eval()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_is_the_same_without_donation(method, options, monkeypatch):
    built, prompt = model(method), torch.randint(1, 31, (2, 9))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0

    def generate():
        return built.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)

    found = generate()
    monkeypatch.setattr(RewindableState, "to_replace", lambda self: self.value)
    assert torch.equal(found, generate())


@needs_compiled
@torch.no_grad()
def test_the_states_of_a_cache_are_overwritten():
    built = model("linear")
    cache = SubquadCache(built.config)
    built(torch.randint(31, (1, 5)), past_key_values=cache)
    built(torch.tensor([[1]]), past_key_values=cache)
    before = [layer.state for layer in cache.layers]
    memory = [state.tensors["S"].data_ptr() for state in before]
    built(torch.tensor([[2]]), past_key_values=cache)
    assert [layer.state.tensors["S"].data_ptr() for layer in cache.layers] == memory
    with pytest.raises(sq.StateError, match="was donated"):
        before[0].clone()


@torch.no_grad()
def test_a_cache_that_records_donates_nothing():
    built = model("linear")
    cache = SubquadCache(built.config)
    built(torch.randint(31, (1, 5)), past_key_values=cache)
    expected = built(torch.tensor([[3]]), past_key_values=branch(cache, built)).logits
    cache.activate_past_recording()
    built(torch.tensor([[1, 2]]), past_key_values=cache)
    cache.crop(-2)
    assert torch.equal(built(torch.tensor([[3]]), past_key_values=cache).logits, expected)


def branch(cache, built):
    other = SubquadCache(built.config)
    for new, old in zip(other.layers, cache.layers, strict=True):
        new.past.value = old.state.clone()
    other.position.value = cache.position.value
    return other


@needs_compiled
@torch.no_grad()
def test_a_compiled_model_decodes_with_one_graph():
    built, graphs = model("linear"), []

    def backend(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(
        lambda ids, cache: built(ids, past_key_values=cache).logits, fullgraph=True, dynamic=True, backend=backend
    )
    ids = torch.randint(31, (1, 12))
    expected = built(ids).logits
    cache = SubquadCache(built.config)
    built(ids[:, :6], past_key_values=cache)
    found = [step(ids[:, i : i + 1].clone(), cache) for i in range(6, 12)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected[:, 6:], rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
    assert "subquad.kernelized_step.default" in graphs[0]
    assert cache.get_seq_length() == 12
