"""A stand-in for torch_npu, by its documentation: no NPU is here to ask.

Each function has the documented name, argument names, order and defaults, refuses what the documentation refuses
(dtypes, ranks, layouts, lists against tensors), and computes the documented formula in plain torch. What autograd
torch_npu registers is autograd here; npu_grouped_matmul has none, so its result is detached.

Legend: T packed tokens, S keys, N heads, K kv heads, H head dim, M rows of experts, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
calls: list[str] = []
"""Names of the functions called, in order."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"torch_npu refuses: {what}")


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    calls.append("npu_rms_norm")
    check(input.dtype in FLOATS and gamma.dtype == input.dtype, f"gamma {gamma.dtype}, input {input.dtype}")
    check(tuple(gamma.shape) == tuple(input.shape[-gamma.dim() :]), "gamma has the last dimensions of the input")
    wide = input.float()
    rstd = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    calls.append("npu_swiglu")
    check(input.dtype in FLOATS and input.shape[dim] % 2 == 0, "an even size in the dimension that is split")
    gate, up = input.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    calls.append("npu_rotary_mul")
    check(input.dim() == r1.dim() == r2.dim() == 4, "four dimensions")
    check(input.dtype in FLOATS and input.dtype == r1.dtype == r2.dtype, "one dtype")
    size = input.shape[-1]
    check(size % 2 == 0 and size <= 896 and r1.shape == r2.shape and r1.shape[-1] == size, "an even head up to 896")
    check(all(a in (1, b) for a, b in zip(r1.shape, input.shape)), "r1 and r2 broadcast")
    check(rotary_mode == "half", "mode")
    first, second = input.chunk(2, -1)
    return input * r1 + torch.cat([-second, first], -1) * r2


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, ...]:
    calls.append("npu_fusion_attention")
    if input_layout == "BNSD":
        p, most, total = _softmax(query, key, value, head_num, atten_mask, scale, sparse_mode)
        out = p @ value.float().repeat_interleave(head_num // key.shape[1], 1)
        empty = torch.empty(0)
        return out.to(query.dtype), most, total, empty, torch.tensor(0), torch.tensor(0), torch.tensor(0)
    check(input_layout == "TND" and query.dim() == key.dim() == value.dim() == 3, "TND is three dimensions")
    check(query.dtype in FLOATS and query.dtype == key.dtype == value.dtype, "one dtype")
    check(head_num == query.shape[1] and head_num % key.shape[1] == 0, "head_num is the query's; kv heads divide it")
    check(sparse_mode == 3 and atten_mask is not None, "the mode this project uses")
    assert atten_mask is not None and actual_seq_qlen is not None and actual_seq_kvlen is not None
    check(atten_mask.dtype == torch.bool and tuple(atten_mask.shape) == (2048, 2048), "the compressed mask, bool")
    check(bool(atten_mask[0, 1]) and not bool(atten_mask[1, 0]), "1 hides")
    for ends, tensor in ((actual_seq_qlen, query), (actual_seq_kvlen, key)):
        check(isinstance(ends, list) and all(type(end) is int for end in ends), "lengths are host integers")
        check(ends == sorted(ends) and ends[0] > 0 and ends[-1] == len(tensor), "cumulative, without 0, to the end")
    outs = []
    for i, (q_end, k_end) in enumerate(zip(actual_seq_qlen, actual_seq_kvlen, strict=True)):
        q = query[(actual_seq_qlen[i - 1] if i else 0) : q_end].float()
        k, v = (x[(actual_seq_kvlen[i - 1] if i else 0) : k_end].float() for x in (key, value))
        k, v = (x.repeat_interleave(head_num // key.shape[1], 1) for x in (k, v))
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = (torch.einsum("tnh,snh->nts", q, k) * scale).masked_fill(hidden, -math.inf)
        outs.append(torch.einsum("nts,snh->tnh", scores.softmax(-1), v).to(query.dtype))
    empty = torch.empty(0)
    return torch.cat(outs), empty, empty, empty, torch.tensor(0), torch.tensor(0), torch.tensor(0)


def _softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    atten_mask: Tensor | None,
    scale: float,
    sparse_mode: int,
    stats: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [B, N, S, S'] and the statistics [B, N, S, 8], fp32, of layout BNSD; `stats`: those to use instead."""
    check(query.dim() == key.dim() == value.dim() == 4, "BNSD is four dimensions")
    check(all(x.is_contiguous() for x in (query, key, value)), "contiguous")
    check(query.dtype in FLOATS and query.dtype == key.dtype == value.dtype, "one dtype")
    check(head_num == query.shape[1] and head_num % key.shape[1] == 0, "head_num is the query's; kv heads divide it")
    scores = query.float() @ key.float().repeat_interleave(head_num // key.shape[1], 1).transpose(-1, -2) * scale
    if sparse_mode == 3:
        assert atten_mask is not None
        check(atten_mask.dtype == torch.bool and tuple(atten_mask.shape) == (2048, 2048), "the compressed mask, bool")
        queries, keys = scores.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    else:
        check(sparse_mode == 0 and atten_mask is None, "the modes this project uses")
    if stats is None:
        most = scores.amax(-1, keepdim=True)
        stats = most.expand(-1, -1, -1, 8), (scores - most).exp().sum(-1, keepdim=True).expand(-1, -1, -1, 8)
    for x in stats:
        check(x.dtype == torch.float32 and tuple(x.shape) == (*query.shape[:3], 8), "statistics [B, N, S, 8], fp32")
    return (scores - stats[0][..., :1]).exp() / stats[1][..., :1], *stats


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, ...]:
    calls.append("npu_fusion_attention_grad")
    check(input_layout == "BNSD", "the layout this project uses")
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    check(dy.dtype == attention_in.dtype == query.dtype, "one dtype")
    stats = softmax_max, softmax_sum
    p, _, _ = _softmax(query, key, value, head_num, atten_mask, scale_value, sparse_mode, stats)
    repeat = head_num // key.shape[1]
    k, v = (x.float().repeat_interleave(repeat, 1) for x in (key, value))
    inner = (dy.float() * attention_in.float()).sum(-1, keepdim=True)
    ds = p * (dy.float() @ v.transpose(-1, -2) - inner) * scale_value
    dk, dv = (x.unflatten(1, (-1, repeat)).sum(2) for x in (ds.transpose(-1, -2) @ query.float(), p.mT @ dy.float()))
    return *(x.to(query.dtype) for x in (ds @ k, dk, dv)), torch.empty(0)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    output_dtype: Any = None,
) -> list[Tensor]:
    calls.append("npu_grouped_matmul")
    check(isinstance(x, list) and isinstance(weight, list) and len(x) == len(weight) == 1, "lists of one tensor")
    check(x[0].dtype in FLOATS and x[0].dtype == weight[0].dtype, "one dtype")
    check(group_list is not None and group_list.dtype == torch.int64 and group_list.dim() == 1, "int64 group_list")
    check(split_item in (2, 3), "one output: split_item 2 or 3")
    check(group_list_type == 0 and group_type in (0, 2), "the types this project uses")
    assert group_list is not None
    ends = group_list.tolist()
    spans = list(zip([0, *ends], ends))
    if group_type == 0:  # [M, I] x [E, I, O] -> [M, O]
        check(x[0].dim() == 2 and weight[0].dim() == 3 and len(weight[0]) == len(ends), "2 and 3 dimensions")
        check(ends[-1] == len(x[0]), "the last end is the number of rows")
        out = torch.cat([x[0][a:b] @ weight[0][i] for i, (a, b) in enumerate(spans)])
    else:  # [I, M] x [M, O] -> [E, I, O]
        check(x[0].dim() == weight[0].dim() == 2 and x[0].shape[1] == len(weight[0]) == ends[-1], "2 and 2 dimensions")
        out = torch.stack([x[0][:, a:b] @ weight[0][a:b] for a, b in spans])
    return [out.detach()]


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    calls.append("npu_moe_token_permute")
    check(tokens.dim() == 2 and tokens.dtype in FLOATS and not padded_mode, "two dimensions")
    check(indices.dtype in (torch.int32, torch.int64) and indices.dim() in (1, 2), "integer indices")
    order = torch.argsort(indices.flatten(), stable=True)
    top_k = indices.shape[1] if indices.dim() == 2 else 1
    return tokens[order // top_k], torch.argsort(order).to(torch.int32)


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    calls.append("npu_moe_token_unpermute")
    check(permuted_tokens.dim() == 2 and sorted_indices.dtype == torch.int32, "int32 indices")
    check(sorted_indices.dim() == 1 and len(sorted_indices) == len(permuted_tokens), "an index a row")
    check(not padded_mode and restore_shape is None, "not supported")
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    check(probs.dtype == permuted_tokens.dtype and probs.dim() == 2 and probs.shape[1] <= 512, "probs like the tokens")
    return (rows.unflatten(0, tuple(probs.shape)).float() * probs[..., None].float()).sum(1).to(rows.dtype)


def module() -> ModuleType:
    """The functions above as the module torch_npu."""
    made = ModuleType("torch_npu")
    for name, value in list(globals().items()):
        if name.startswith("npu_"):
            setattr(made, name, value)
    calls.clear()
    return made
