"""What a kernelized mechanism may state to its engine: decay and write strength, and the combinations that are refused."""

import pytest
import torch

import subquad as sq
from subquad.engines import kernelized
from subquad.engines.call import Call
from subquad.ops.feature_map import FeatureMap, NativeMap
from subquad.ops.kernelized import KernelizedRule


def phi(x):
    return x.exp()


def call(length=70, **options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 5, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    return Call(query=q, key=k, value=v, **{"is_causal": True, **options})


def gate(length=70):
    """(B, K, M), between 0 and 1."""
    return torch.rand(2, 2, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.5 + 0.4


def recurrence(call, decay, write):
    """S <- g S + w phi(k) v^T, token by token."""
    outs, S, z = [], 0, 0
    for t in range(call.key.shape[2]):
        fq = phi(call.query[:, :, t]).unflatten(1, (2, 2))  # (B, K, G, m)
        fk = phi(call.key[:, :, t]) * write[:, :, t, None]
        S = decay[:, :, t, None, None] * S + fk[..., :, None] * call.value[:, :, t, None, :]
        z = decay[:, :, t, None] * z + fk
        outs.append((fq @ S / (fq @ z[..., None])).flatten(1, 2))
    return torch.stack(outs, dim=2)


@pytest.mark.parametrize("has_decay", [False, True], ids=["kept", "decayed"])
@pytest.mark.parametrize("has_write", [False, True], ids=["plain", "weighted"])
def test_decay_and_write_are_separate(has_decay, has_write):
    ones, decay, write = torch.ones_like(gate()), gate(), 3 * gate().flip(2)
    rule = KernelizedRule(
        feature_map=FeatureMap.symmetric(phi, 5),
        log_decay=decay.log() if has_decay else None,
        write=write if has_write else None,
    )
    found, _ = kernelized.attend(call(), rule)
    expected = recurrence(call(), decay if has_decay else ones, write if has_write else ones)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("given", ["log_decay", "write"])
def test_a_gated_map_with_a_native_form_is_refused_when_it_is_made(given):
    with pytest.raises(sq.InputError, match=r"cannot have a native form.*got native='elu'\. Pass FeatureMap\(native=None"):
        KernelizedRule(feature_map=FeatureMap.symmetric(phi, 5, NativeMap("elu")), **{given: gate()})


def test_a_decay_needs_a_causal_call():
    rule = KernelizedRule(feature_map=FeatureMap.symmetric(phi, 5), log_decay=gate().log())
    with pytest.raises(sq.InputError, match="needs is_causal=True; got is_causal=False"):
        kernelized.attend(call(is_causal=False), rule)


@pytest.mark.parametrize("given", ["log_decay", "write"])
def test_a_gated_map_with_exponents_is_refused(given):
    exponential = FeatureMap(query=phi, key=lambda x: (x.exp(), x.sum(-1, keepdim=True)), features=5)
    with pytest.raises(sq.InputError, match=r"need a feature map phi = f; got a map that gives phi = e\^b f"):
        kernelized.attend(call(), KernelizedRule(feature_map=exponential, **{given: gate()}))
