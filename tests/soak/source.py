"""A drawn call as plain Python: what the soak test runs, and what it prints to reproduce a finding.

The text of `inputs` defines q, k, v, hidden, mechanism, module, options and target. The other functions go on from there.
"""

from __future__ import annotations

from typing import Any

from subquad.registry import resolve
from tests.soak.drawing import Spec, made

WIDTH = 11  # of hidden states


def inputs(spec: Spec) -> str:
    mechanism = made(spec.mechanism, spec.options)
    lines = [
        f"torch.set_default_dtype(torch.{'float64' if spec.dtype == 'float64' else 'float32'})",
        "torch.manual_seed(0)",
        f"g = torch.Generator().manual_seed({spec.tensor_seed})",
        "",
        "",
        "def randn(*shape):",
        "    return torch.randn(*shape, generator=g, dtype=torch.float64)",
        "",
        "",
    ]
    shapes = {
        "q": [spec.batch, spec.heads, spec.queries, spec.dim],
        "k": [spec.batch, spec.kv_heads, spec.keys, spec.dim],
        "v": [spec.batch, spec.kv_heads, spec.keys, spec.value_dim],
    }
    _spoil(spec, shapes)
    for name, shape in shapes.items():
        lines.append(f"{name} = randn({', '.join(map(str, shape))})")
        if name in spec.magnitudes:
            lines.append(f"{name} *= {spec.magnitudes[name]}")
        lines += [f"{name}[:, :, {t}] *= {factor}" for t, factor in spec.spikes.get(name, []) if t < shape[2]]
        limit = ".clamp(-3e4, 3e4)" if spec.dtype == "float16" else ""
        if _dtype(spec, name) != "float64":
            lines.append(f"{name} = {name}{limit}.to(torch.{_dtype(spec, name)})")
    if spec.has_nan_query:
        lines.append("q[0, 0, -1, 0] = torch.nan")
    lines += _padding(spec)
    for name, shape in shapes.items():
        lines += _strided(name, shape, *spec.strides.get(name, ("contiguous", 0)))
    if mechanism.shares_query_and_key and shapes["q"] == shapes["k"]:
        lines.append("q = k")
    lines += _module(spec, mechanism)
    lines += _options(spec, mechanism)
    return "\n".join(lines) + "\n"


def _spoil(spec: Spec, shapes: dict[str, list[int]]) -> None:
    """One wrong size, if that is what is wrong."""
    name, dim = {"batch": ("k", 0), "length": ("v", 2), "channels": ("k", 3), "heads": ("v", 1)}.get(spec.wrong or "", ("", 0))
    if name:
        shapes[name][dim] += 1


def _dtype(spec: Spec, name: str) -> str:
    if spec.wrong == "dtype" and name == "k":
        return "float32" if spec.dtype != "float32" else "float64"
    return spec.dtype


def _padding(spec: Spec) -> list[str]:
    if spec.padding is None:
        return []
    batch, keys = spec.batch, spec.keys
    lines = [f"real = torch.ones({batch}, {keys}, dtype=torch.bool)"]
    if spec.padding == "inner":
        lines = [f"real = torch.rand({batch}, {keys}, generator=g) < 0.7"]
    elif batch and keys:
        pads = max(1, keys // 3)
        part = {"left": f":{pads}", "right": f"-{pads}:", "empty": ":"}[spec.padding]
        lines.append(f"real[0, {part}] = False")
    if spec.fill != "0" and not spec.wrong:
        filled = ("q", "k", "v") if spec.fills_queries else ("k", "v")
        lines += [f"{x} = {x}.masked_fill(~real[:, None, :, None], float('{spec.fill}'))" for x in filled]
    return lines


def _strided(name: str, shape: list[int], kind: str, dim: int) -> list[str]:
    """The same numbers in another place in memory; for "expanded", the first along a dimension for all."""
    if kind == "transposed":
        swapped = f"{name}.transpose({dim}, {dim + 1})"
        return [f"{name} = {swapped}.contiguous().transpose({dim}, {dim + 1})"]
    if kind == "sliced":
        return [f"{name} = {name}.repeat_interleave(2, dim={dim})[{':, ' * dim}::2]"]
    if kind == "expanded" and shape[dim]:
        return [f"{name} = {name}.narrow({dim}, 0, 1).expand({', '.join(map(str, shape))})"]
    if kind == "misaligned":
        return [f"{name} = torch.cat([{name}.new_zeros(1), {name}.flatten()])[1:].view({', '.join(map(str, shape))})"]
    if kind == "lazy":
        return [f"{name} = torch._neg_view(-{name})"]
    return []


def _module(spec: Spec, mechanism: Any) -> list[str]:
    options = ", ".join(f"{name}={value!r}" for name, value in spec.options.items())
    cls = type(resolve(spec.mechanism))
    sizes = f"heads={spec.heads}, kv_heads={spec.kv_heads}, head_dim={spec.dim}, value_dim={spec.value_dim}, dim={WIDTH}"
    where = "sq" if cls.__module__.startswith("subquad.") else cls.__module__
    lines = [] if where == "sq" else [f"import {where}"]
    lines += [f"mechanism = {where}.{cls.__name__}({options})", f"module = mechanism.build({sizes}).eval()"]
    if mechanism.info.parameters:
        lines.append("for parameter in module.parameters():  # away from the initial values, which may hide a fault")
        lines.append("    parameter.data += randn(*parameter.shape).to(parameter.dtype) / 4")
    return [*lines, *([f"module.to(torch.{spec.weights})"] if spec.weights in ("float16", "bfloat16") else [])]


def _options(spec: Spec, mechanism: Any) -> list[str]:
    hidden, lines = "None", []
    if mechanism.reads_tokens:
        hidden = f"randn({spec.batch}, {spec.keys}, {WIDTH}).to(torch.{spec.dtype})"
    lines.append(f"hidden = {hidden}")
    options = {"is_causal": spec.is_causal}
    if spec.padding is not None:
        options["key_padding_mask"] = "real[:, :-1]" if spec.wrong == "padding" else "real"
    if spec.attn_mask is not None:
        full = (spec.batch, spec.heads, spec.queries, spec.keys)[4 - len(spec.mask_shape) :]
        shape = ", ".join(str(size if kept else 1) for size, kept in zip(full, spec.mask_shape, strict=True))
        lines.append(f"mask = randn({shape})")
        if spec.attn_mask == "bool":
            options["attn_mask"] = "mask > -0.5"
        else:
            dtype = "int64" if spec.wrong == "mask dtype" else spec.dtype
            options["attn_mask"] = f"mask.masked_fill(mask < -1, -torch.inf).to(torch.{dtype})"
    if spec.has_global_mask:
        options["global_mask"] = f"torch.rand({spec.batch}, {spec.keys}, generator=g) < 0.2"
    if spec.scale is not None or spec.wrong == "scale":
        options["scale"] = "10**400" if spec.wrong == "scale" else spec.scale
    if spec.dropout_p or spec.wrong == "dropout":
        options["dropout_p"] = 1.0 if spec.wrong == "dropout" else spec.dropout_p
    if spec.wrong == "causal":
        options["is_causal"] = 1
    lines.append(f"options = dict({', '.join(f'{name}={value}' for name, value in options.items())})")
    lines.append(f"target = randn({spec.batch}, {spec.heads}, {spec.queries}, {spec.value_dim}).to(torch.{spec.dtype})")
    if spec.padding is not None and spec.fills_queries:
        lines.append("target = target.masked_fill(~real[:, None, :, None], 0)")
    return lines


def is_wrong(spec: Spec) -> bool:
    """Whether `wrong` made a difference: it cannot spoil what the call does not have."""
    if spec.wrong == "padding":
        return spec.padding is not None and spec.keys > 0
    if spec.wrong == "mask dtype":
        return spec.attn_mask == "float"
    return spec.wrong is not None


def script(spec: Spec, check: str) -> str:
    """The whole reproduction: the call as in `inputs`, and how its result differs."""
    is_about_gradients = check == "gradients"
    grads = [name for name in spec.grad if name in ("q", "k", "v")]
    text = (
        inputs(spec) if is_about_gradients else "".join(x for x in inputs(spec).splitlines(True) if not x.startswith("target"))
    )
    lines = ["import torch", "", "import subquad as sq", "from subquad import reference", "", text]
    if not spec.is_native:
        lines.insert(0, "import os\n\nos.environ['SUBQUAD_NATIVE'] = '0'  # the PyTorch fallbacks")
    if spec.threads > 1:
        lines.append(f"torch.set_num_threads({spec.threads})")
    if is_about_gradients:
        lines += [f"{name}.requires_grad_()" for name in grads]
    lines += _call(spec)
    if spec.attn_mask == "float":
        lines.append("options['attn_mask'] = options['attn_mask'].double()")
    if spec.dropout_p:
        lines.append("del options['dropout_p']")
    query = "q.masked_fill(~real[:, None, :, None], 0)" if spec.padding and spec.fills_queries and spec.fill != "0" else "q"
    hidden = ", hidden=hidden.double()" if made(spec.mechanism, spec.options).reads_tokens else ""
    lines += [
        "weights = dict(module.named_parameters()) | dict(module.named_buffers())",
        f"expected = reference.attention(mechanism, {query}.double(), k.double(), v.double(), weights=weights{hidden}, **options)",
        "print(float((out.double() - expected).abs().max()), 'of', float(expected.abs().max()))",
    ]
    if is_about_gradients:
        wrt = ", ".join([*grads, *(["*module.parameters()"] if "weights" in spec.grad else [])])
        lines += [
            f"found = torch.autograd.grad(out, [{wrt}], target, allow_unused=True)",
            f"right = torch.autograd.grad(expected, [{wrt}], target.double(), allow_unused=True)",
            "print([None if a is None or b is None else float((a.double() - b.double()).abs().max()) for a, b in zip(found, right)])",
        ]
    return "\n".join(lines) + "\n"


def _call(spec: Spec) -> list[str]:
    gqa = ", enable_gqa=True" if spec.heads != spec.kv_heads else ""
    run = (
        f"sq.attention(q, k, v, mechanism{gqa}, **options"
        if spec.entry == "function"
        else "module(q, k, v, hidden=hidden, **options"
    )
    if spec.pieces is None:
        if spec.compiler:
            return [f"out = torch.compile(lambda: {run}), backend={spec.compiler!r})()"]
        return [f"out = {run})"]
    piece = run.replace("(q, k, v", "(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]").replace(
        "hidden=hidden", "hidden=None if hidden is None else hidden[:, a:b]"
    )
    lines = ["state, outs, a, padding = None, [], 0, options.pop('key_padding_mask', None)"]
    lines += [f"for number, b in enumerate(torch.tensor({list(spec.pieces)}).cumsum(0).tolist()):"]
    lines += ["    mask = None if padding is None else padding[:, a:b]"]
    lines += [f"    out, state = {piece}, key_padding_mask=mask, state=state, return_state=True)"]
    if spec.saved_after is not None:
        lines += [f"    if number == {spec.saved_after}:", "        state = sq.State.from_state_dict(state.state_dict())"]
    lines += ["    outs, a = [*outs, out], b", "out = torch.cat(outs, dim=2)"]
    return [*lines, *(["options['key_padding_mask'] = padding"] if spec.padding else [])]
