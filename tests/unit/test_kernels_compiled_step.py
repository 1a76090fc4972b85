"""Compiled decode steps: products against float64, steps against the modules, bits that depend on nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import rollout_cases as cases

from docklands.config.schema import RolloutSection
from docklands.core.protocols import Sampling
from docklands.errors import NonFinite
from docklands.kernels import compiled_cache, compiled_step
from docklands.kernels.compiled_processor import matrix_registers
from docklands.kernels.compiled_step import TiledLinear
from docklands.rollout import NativeEngine
from docklands.rollout.decoder import CompiledDecoder, DenseDecoder, ModelDecoder, decoder_for
from docklands.rollout.sampling import Choice, Sampler, uniforms

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if compiled_step.available("cpu", dtype)]


@pytest.fixture
def two_threads(monkeypatch):
    """Every call is divided over two threads, however small."""
    monkeypatch.setattr(compiled_step, "PARALLEL_FROM", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def product(dtype: torch.dtype, outputs: int, inputs: int, rows: int):
    torch.manual_seed(outputs)
    return torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(4, 32), (46, 64), (259, 96), (1030, 32)])
@pytest.mark.parametrize("rows", [1, 5, 6, 7, 97, 200])
def test_products_equal_float64(dtype, outputs, inputs, rows) -> None:
    x, weight, bias = product(dtype, outputs, inputs, rows)
    for b in (None, bias):
        want = x.double() @ weight.double().t() + (0 if b is None else b.double())
        found = TiledLinear(weight, b)(x)
        assert found.dtype == dtype and found.shape == want.shape
        close = 1e-5 if dtype == torch.float32 else 2.0**-8
        assert ((found.double() - want).abs() <= close * want.abs().clamp(min=1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_company(dtype, two_threads) -> None:
    x, weight, bias = product(dtype, 259, 96, 100)
    linear = TiledLinear(weight, bias)
    whole = linear(x)
    for rows in (1, 2, 6, 7, 64):
        assert torch.equal(linear(x[:rows]), whole[:rows])
    torch.set_num_threads(1)
    assert torch.equal(linear(x), whole)
    torch.set_num_threads(4)  # more threads than some have columns for
    assert torch.equal(TiledLinear(weight[:10])(x), TiledLinear(weight)(x)[:, :10])


@pytest.mark.parametrize(("outputs", "inputs"), [(4, 32), (17, 64), (33, 96), (259, 544)])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 290])
def test_products_with_and_without_matrix_registers_agree(outputs, inputs, rows) -> None:
    """Of those that run here, into columns of a wider table, beside which nothing is written; torch's own products in
    between, which use the same registers in another shape.
    """
    from docklands.kernels import compiled_matrix
    from docklands.kernels.compiled_tiles import multiply_rows

    x, weight, _ = product(torch.bfloat16, outputs, inputs, rows)
    bits, found, ways = x.view(torch.uint16).numpy(), [], []
    if torch.bfloat16 in DTYPES:
        ways.append((multiply_rows, bits))
    if matrix_registers():
        ways.append((compiled_matrix.multiply, compiled_matrix.turned(bits)))
    for multiply, ready in ways:
        before = torch.nn.functional.linear(x, weight)
        table = np.full((rows + 1, outputs + 2), 7.0, np.float32)
        multiply(ready, weight.data_ptr(), table[:rows, 1:-1], 0, outputs)
        assert (table[rows] == 7).all() and (table[:, [0, -1]] == 7).all()
        assert torch.equal(torch.nn.functional.linear(x, weight), before)
        found.append(table[:rows, 1:-1])
    want = (x.double() @ weight.double().t()).numpy()
    for one in found:
        assert np.abs(one - want).max() < 1e-5 * np.abs(want).max()


CROWDED = """
import threading, torch
from docklands.kernels.compiled_step import TiledLinear
torch.manual_seed(0)
torch.set_num_threads(1)
linear, x = TiledLinear(torch.randn(96, 64).bfloat16()), torch.randn(40, 64).bfloat16()
want, wrong, parts = linear(x), [], threading.Barrier(4)
def some():
    parts.wait()
    for i in range(1500):
        wrong.append(not torch.equal(linear(x), want))
        bytearray(500 * (i % 20))
threads = [threading.Thread(target=some) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(wrong), sum(wrong))
"""


def test_threads_that_share_a_heap_do_not_share_scratch() -> None:
    """Scratch that was freed too early was another thread's: 1,500 products in each of 4 threads, one malloc arena."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", CROWDED], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["6000", "0"]), done.stderr


def test_compiled_code_is_kept_apart_by_what_the_processor_lets_us_use(monkeypatch, tmp_path) -> None:
    """Code with matrix registers would kill a process that may not use them."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folders = set()
    for granted in (False, True):
        monkeypatch.setattr(compiled_cache, "matrix_registers", lambda granted=granted: granted)
        folders.add(compiled_cache.folder.__wrapped__())
    assert len(folders) == 2
    monkeypatch.setattr(compiled_cache, "folder", lambda: "")  # then numba's own place, which knows nothing of this
    assert type(compiled_cache.njit(lambda: 1, cache=True)._cache).__name__ == "NullCache"


def test_a_team_that_is_busy_changes_nothing(two_threads) -> None:
    x, weight, _ = product(torch.float32, 64, 32, 9)
    whole = TiledLinear(weight)(x)
    with compiled_step._together:
        assert torch.equal(TiledLinear(weight)(x), whole)


def shape(family: str, **more: object):
    """Heads of 32, so that both dtypes fit."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, **more}
    return cases.config(family, **sizes)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", {}), ("qwen3", {}), ("llama", {}), ("llama", {"head_dim": 64, "num_kv_heads": 6}),
        ("qwen2", {"num_heads": 8, "num_kv_heads": 1, "o_bias": True}),
    ],
)  # fmt: skip
def test_generated_logprobs_equal_the_forward_pass(family, more, threads, two_threads) -> None:
    """Prompts over several pages, more queries of a kv head than a tile has rows, biases, norms of heads."""
    torch.set_num_threads(threads)
    model = cases.model(shape(family, **more))
    engine = cases.engine(model, kv_block_tokens=4)
    requests = cases.groups(4, 3, Sampling(12, temperature=0.8))
    found = engine.generate(requests)
    assert type(engine._decoder) is CompiledDecoder
    for request, generation in zip(requests, found):
        want = cases.full_logprobs(model, request, list(generation.token_ids))
        assert (torch.tensor(generation.logprobs) - want).abs().max() < 1e-5


def test_a_sample_is_the_same_alone_and_in_a_batch(two_threads) -> None:
    model = cases.model(shape("llama"))
    requests = cases.groups(5, 3, Sampling(15))
    whole = cases.engine(model, kv_block_tokens=8).generate(requests)
    torch.set_num_threads(1)
    for request, found in zip(requests[::4], whole[::4]):
        alone = cases.engine(model, kv_block_tokens=8, max_batch=1).generate([request])[0]
        assert (alone.token_ids, alone.logprobs) == (found.token_ids, found.logprobs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_has_the_bits_of_its_tokens_fed_one_by_one(dtype, two_threads) -> None:
    """So a sample that starts over, or is carried into the next step, goes on as if it had not been interrupted."""
    model = cases.model(shape("qwen3")).to(dtype)
    engine = NativeEngine(model.config, RolloutSection(max_batch=8, kv_block_tokens=8), dtype=dtype)
    engine.load_weights(model.named_parameters(), 0)
    requests = cases.groups(3, 2, Sampling(20))
    whole = engine.generate(requests)
    for cut in (1, 7, 8, 9):
        carried = [
            replace(r, prompt=r.prompt + tuple(g.token_ids[:cut]), drawn=cut, sampling=Sampling(20 - cut))
            for r, g in zip(requests, whole)
        ]
        for found, before in zip(engine.generate(carried), whole):
            assert list(found.token_ids) == list(before.token_ids[cut:])
            assert list(found.logprobs) == list(before.logprobs[cut:])


@pytest.mark.parametrize("kind", [CompiledDecoder, ModelDecoder])
def test_bfloat16_stays_as_near_the_forward_pass_as_the_modules(kind, monkeypatch) -> None:
    """Both round activations at the same places; what is left is the order of sums. (In one process with fp32: compiled
    code of both kinds was once taken for the same.)"""
    monkeypatch.setattr("docklands.rollout.native.decoder_for", kind)
    model = cases.model(shape("qwen3", num_layers=4)).bfloat16()
    engine = NativeEngine(model.config, RolloutSection(max_batch=8, kv_block_tokens=8), dtype=torch.bfloat16)
    engine.load_weights(model.named_parameters(), 0)
    requests = cases.groups(3, 4, Sampling(20))
    pairs = [(torch.tensor(g.logprobs), cases.full_logprobs(model, r, list(g.token_ids))) for r, g in
             zip(requests, engine.generate(requests))]  # fmt: skip
    difference = torch.cat([a - b for a, b in pairs])
    assert difference.abs().mean() < 0.01 and difference.abs().max() < 0.06
    assert difference.mean().abs() < 0.003


def test_models_and_pages_that_do_not_fit_take_the_other_path() -> None:
    assert type(decoder_for(cases.model(shape("qwen2")))) is CompiledDecoder
    assert type(decoder_for(cases.model(shape("qwen2", head_dim=8)))) is DenseDecoder
    assert type(decoder_for(cases.model(shape("qwen2", intermediate_size=90)))) is DenseDecoder
    model, requests = cases.model(shape("llama")), cases.groups(2, 2, Sampling(9))
    found = [cases.engine(model, kv_block_tokens=size).generate(requests) for size in (6, 8)]
    for a, b in zip(*found):
        assert a.token_ids == b.token_ids
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [50, 1000, 1024])
def test_compiled_draws_agree_with_torch(dtype, vocabulary, monkeypatch) -> None:
    """The same uniform numbers give the same tokens; those on an edge between two tokens may differ. Some may not be
    drawn at all; a NaN anywhere is an error, in the last numbers of a row too."""
    torch.manual_seed(0)
    rows = 400
    logits = (torch.randn(rows, vocabulary) * 3).to(dtype)
    logits[::3, -2] = -torch.inf
    temperature = np.where(np.arange(rows) % 5 == 0, 0.0, 0.7)
    draws = uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64))
    choice = Choice(temperature, np.zeros(rows, np.int64), np.ones(rows), draws)
    tokens, logprobs = Sampler()(logits, choice)
    monkeypatch.setattr(compiled_step, "available", lambda *_: False)
    other, expected = Sampler()(logits, choice)
    same = tokens == other
    assert same.sum() >= rows - 2 and same[::5].all()
    assert np.abs(logprobs - expected)[same].max() < 3e-6
    monkeypatch.undo()
    for bad, column in ((torch.nan, vocabulary - 1), (torch.nan, 3), (torch.inf, 7)):
        broken = logits.clone()
        broken[5, column] = bad
        with pytest.raises(NonFinite, match="of 1 of 400"):
            Sampler()(broken, choice)
