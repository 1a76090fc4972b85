"""vLLM in worker processes (`make test-vllm`): replicas and tensor lanes, weights by plan, experts too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests import rollout_cases as cases
from tests.distributed.pool import Pool

from docklands.config.layouts import SyncSection
from docklands.models.config import ModelConfig, MoeConfig
from docklands.parallel.layout import Layout as L

if find_spec("vllm"):
    from tests.engines.vllm_cases import publish_and_generate

    DENSE = cases.config("qwen3", hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=128)
    MOE = ModelConfig("Qwen3MoeForCausalLM", 128, 64, 2, 2, 2, 32, 96, qk_norm=True, moe=MoeConfig(4, 2, 48))

    @pytest.fixture
    def pool() -> Iterator[Pool]:
        """Processes of its own for each case: vLLM's groups are made once in a process."""
        made = Pool()
        yield made
        made.close()

    CASES = {
        "experts, tensor lane": (2, MOE, L(dp=2, ep=2), L(tp=2, etp=2), False, SyncSection(probe_every=1, swap="disk")),
        "two replicas apart": (3, DENSE, L(), L(dp=2), True, SyncSection(probe_every=1)),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_replicas_follow_the_trainer(case: str, pool: Pool) -> None:
        """Two versions: log-probs are the trainer's, by samples and by the probe; the buffers have gone meanwhile."""
        world, config, training, generation, *rest = CASES[case]
        said = pool.run(world, publish_and_generate, config, training, generation, *rest, deadline=240)
        leaders = [one for one in said if one["gaps"]]
        assert len(leaders) == generation.dp
        for one in leaders:
            assert len(one["gaps"]) == 2 and max(one["gaps"]) < 1e-4 and max(one["probe"]) < 1e-4
            assert one["held"] == [0, 0]
            assert one["tokens"] == leaders[0]["tokens"] and one["tokens"][0] != one["tokens"][1]
        assert not list(Path("/dev/shm").glob("*-tp:0-*cpushm*"))  # also where a process is killed

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_experts_after_updates(dtype: torch.dtype) -> None:
        """Also where the kernel pads each expert's width; bfloat16 has another kernel. By one thread and by several."""
        from docklands.config.schema import RolloutSection
        from docklands.core.protocols import Sampling
        from docklands.rollout.vllm_engine import VllmEngine

        config = replace(MOE, vocab_size=64)
        engine = VllmEngine(config, RolloutSection(max_batch=8, max_response_tokens=16), dtype=dtype, longest=128)
        kept.append(engine)  # vLLM's groups end with an engine, those of the other engines too
        threads = torch.get_num_threads()
        for version, seed in enumerate((1, 2, 1)):
            model = cases.model(config, seed=seed)
            torch.set_num_threads(1 if version == 1 else 3)
            engine.load_weights(model.named_parameters(), version)
            torch.set_num_threads(threads)
            requests = cases.groups(2, 2, Sampling(8))
            for request, found in zip(requests, engine.generate(requests)):
                want = cases.full_logprobs(model, request, list(found.token_ids))
                apart = float((want - torch.tensor(list(found.logprobs))).abs().max())
                assert apart < (1e-4 if dtype == torch.float32 else 0.05)

    kept: list[object] = []
