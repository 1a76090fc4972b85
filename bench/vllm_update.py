"""New weights into a running vLLM engine: our update in place against vLLM's own reload of a directory.

    DOCKLANDS_VLLM_PYTHON=... python bench/vllm_update.py [--quick] [--model tiny|135m|both] [--rounds N]

Work: a model with random weights, fp32 in the trainer; vLLM holds it in the model's dtype, on CPU, in this one process.
Ours takes the trainer's named parameters (fp32: cast on the way), or those in vLLM's dtype, as a publish by plan leaves
them. vLLM (`reload_weights` by collective_rpc, its own way) reloads a safetensors directory in its dtype,

    warm     already written, and in the page cache
    cold     already written and on the disk alone: its pages are dropped before (posix_fadvise), outside of the time.
             Where the pages are is asked of the kernel (mincore) before each reload; it ends where they are not
    written  written and synced to the disk in the time, then reloaded from the disk: what a run has to do that hands
             its weights over this way, every step. The trainer's export is ours (models.export)

Both reset the prefix cache. Metrics are wall seconds, and CPU seconds of the process (user + system, all threads): the
latter say more on a machine with other work. After the rounds our engine's log-probabilities are the trainer's, or
nothing is printed; vLLM's own are not asked for: where the head is tied to the embedding, its reload on CPU leaves the
head's packed copy as it was.

DOCKLANDS_VLLM_PYTHON is the interpreter of an environment with requirements/vllm.txt; without it this says so and
ends. Rounds are interleaved, figures are medians, the spread is the middle half of the ratios of single rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))


def shape(name: str) -> tuple[Any, str]:
    """The config of a model, and the dtype that vLLM holds it in."""
    from docklands.models import ModelConfig

    if name == "tiny":
        return ModelConfig("Qwen2ForCausalLM", 64, 128, 3, 4, 2, 32, 512, qkv_bias=True, max_positions=512), "float32"
    sizes = (49152, 576, 30, 9, 3, 64, 1536)
    return ModelConfig("LlamaForCausalLM", *sizes, tie_embeddings=True, max_positions=512), "bfloat16"


Cost = tuple[float, float]
"""Seconds: wall, CPU of this process."""


def timed(call: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def to_disk(folder: Path) -> None:
    """A directory is on the disk, and there alone."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_memory(folder: Path) -> float:
    """Share of a directory's pages that are in the page cache."""
    ask = ctypes.CDLL(None, use_errno=True).mincore
    ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    there, all_ = 0, 0
    for path in folder.iterdir():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
            pages = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
            first = ctypes.c_char.from_buffer(mapped)  # it asks for a writable map
            if ask(ctypes.addressof(first), len(mapped), pages):
                raise OSError(ctypes.get_errno(), "mincore")
            del first
            there, all_ = there + sum(byte & 1 for byte in pages.raw), all_ + len(pages)
    return there / all_


def expect(folder: Path, inside: bool) -> None:
    """SystemExit unless a directory is in the page cache (which it is brought to here), or, not inside, out of it."""
    for path in folder.iterdir() if inside else ():
        path.read_bytes()
    found = in_memory(folder)
    if (found < 0.99) if inside else (found > 0.01):
        wanted = "it should be there" if inside else "none of it should be: on tmpfs? (TMPDIR)"
        raise SystemExit(f"{found:.1%} of {folder} is in the page cache, {wanted}")


def own_reload(path: Path, dtype: str) -> Callable[[Path], None]:
    """vLLM as it is used without us: started on a directory; -> its reload of another one."""
    from vllm import LLM  # type: ignore[import-not-found]

    engine = LLM(
        str(path), dtype=dtype, skip_tokenizer_init=True, max_num_seqs=8, max_model_len=128, enforce_eager=True,
        kv_cache_memory_bytes=1 << 28, use_tqdm_on_load=False,
    )  # fmt: skip

    def reload(found: Path) -> None:
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(found)})
        engine.reset_prefix_cache()

    return reload


def measure(name: str, rounds: int) -> None:
    """In the environment with vLLM: print the JSON lines of one model."""
    import torch

    from docklands import device, models
    from docklands.config.schema import RolloutSection
    from docklands.rollout.vllm_engine import VllmEngine

    device.keep_freed_memory()  # as a run does; for both sides
    config, dtype = shape(name)
    trainers = [models.build(config, seed=seed) for seed in (1, 2)]
    section = RolloutSection(max_batch=8, max_response_tokens=32)
    engine = VllmEngine(config, section, dtype=getattr(torch, dtype), longest=128)
    rows: list[dict[str, Cost]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(i) for i in range(2)]

        def write(i: int) -> None:
            models.export(trainers[i], paths[i], dtype=getattr(torch, dtype))

        write(0)
        write(1)
        reload = own_reload(paths[0], dtype)
        for step in range(2 + rounds):
            i = step % 2
            planned = [(n, p.detach().to(getattr(torch, dtype))) for n, p in trainers[i].named_parameters()]
            row = {"planned": timed(lambda i=i, planned=planned: engine.load_weights(planned, i))}
            row["ours"] = timed(lambda i=i: engine.load_weights(trainers[i].named_parameters(), i))
            expect(paths[i], inside=True)
            row["warm"] = timed(lambda i=i: reload(paths[i]))
            row["write"] = timed(lambda i=i: (write(i), to_disk(paths[i])))
            expect(paths[i], inside=False)
            row["cold"] = timed(lambda i=i: reload(paths[i]))
            rows.append(row)
    check(engine, trainers[i], 1e-4 if dtype == "float32" else 0.1)
    rows = rows[2:]  # the first two were warm-up
    for ours, what in (("ours", "update from fp32"), ("planned", f"update from {dtype}")):
        for peer, against in PEERS.items():
            report(f"{name} {dtype}: {what} vs {against}", rows, ours, peer)


def check(engine: Any, trainer: Any, tolerance: float) -> None:
    """After all updates, the engine's log-probabilities are the trainer's."""
    import torch

    from docklands.core.protocols import Request, Sampling
    from docklands.models import PackedCausal

    prompt = (5, 9, 17, 4)
    found = engine.generate([Request(prompt, Sampling(16), 0)])[0]
    ids = [*prompt, *found.token_ids]
    with torch.inference_mode():
        hidden = trainer(torch.tensor(ids), torch.arange(len(ids)), PackedCausal([len(ids)]))
        table = torch.log_softmax(trainer.logits(hidden).float(), -1)[len(prompt) - 1 : -1]
    want = table.gather(1, torch.tensor(ids[len(prompt) :])[:, None]).squeeze(1)
    apart = float((want - torch.tensor(found.logprobs)).abs().max())
    if apart > tolerance:
        raise SystemExit(f"after the updates, log-probabilities are {apart:.3g} from the trainer's")


PEERS = {
    ("warm",): "reload, directory in the page cache",
    ("cold",): "reload, directory on the disk",
    ("write", "cold"): "writing to the disk and reloading",
}


def report(metric: str, rows: list[dict[str, Cost]], ours: str, peer: tuple[str, ...]) -> None:
    """Two JSON lines, wall and CPU; times in ms."""
    for index, clock in enumerate(("wall", "CPU")):
        mine = [1000 * row[ours][index] for row in rows]
        theirs = [1000 * sum(row[part][index] for part in peer) for row in rows]
        ratios = [b / a for a, b in zip(mine, theirs)]
        spread = statistics.quantiles(ratios, n=4)[::2] if len(rows) > 1 else ratios * 2
        ours_ms, peer_ms = round(statistics.median(mine), 2), round(statistics.median(theirs), 2)
        line = {
            "bench": "vllm_update", "metric": f"{metric}, {clock} ms", "ours": ours_ms, "peer": peer_ms,
            "ratio": round(peer_ms / ours_ms, 3), "n": len(rows), "spread": [round(x, 3) for x in spread],
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model, three rounds")
    parser.add_argument("--model", choices=["tiny", "135m", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    model, rounds = ("tiny", 3) if args.quick else (args.model, args.rounds)
    if args.inside:
        measure(model, rounds)
        return
    python = os.environ.get("DOCKLANDS_VLLM_PYTHON")
    if not python:
        print("DOCKLANDS_VLLM_PYTHON is not set: vLLM lives in an environment of its own, see docs/howto/vllm.md")
        return
    for name in ("tiny", "135m") if model == "both" else (model,):
        command = [python, __file__, "--inside", "--model", name, "--rounds", str(rounds)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, timeout=1200, env=environment)


if __name__ == "__main__":
    main()
