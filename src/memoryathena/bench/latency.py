"""The published microbenchmark: a prompt and a few greedy tokens, under every pathway, by every engine.

Pathways take turns within a repeat, so that a machine that is busy with something else is so for all of them.

Shapes: B rows, T prompt positions.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memoryathena.backbone.decoder import Decoder, default_capture
from memoryathena.backbone.model import AthenaModel
from memoryathena.bench.floor import ceilings, prefill_work, step_work
from memoryathena.bench.gate import check_decoding, check_fallback
from memoryathena.errors import AthenaError

USES = ("off", "E", "GE", "GH", "router")
ENGINES = ("eager", "static", "recorded", "graph")
"""transformers' generate; our step as it is; recorded where there is CUDA; recorded, with the memory fused."""
Generate = Callable[[Tensor, int], Any]


def engine(model: AthenaModel, name: str) -> Generate:
    """How tokens are made: a function of prompts and a number of new tokens."""
    if name not in ENGINES:
        raise AthenaError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    if name == "eager":
        return lambda ids, new: model.backbone.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
    decode = decoder(model, name)
    return lambda ids, new: decode(ids, max_new_tokens=new)


def decoder(model: AthenaModel, name: str) -> Decoder:
    """The `Decoder` that an engine is."""
    capture = default_capture(model.input_device) if name != "static" else None
    return Decoder(model, capture, fuse=name == "graph")


@torch.no_grad()
def measure_latency(
    model: AthenaModel,
    shape: str,
    prompt: int = 338,
    new: int = 16,
    batches: Sequence[int] = (1,),
    uses: Sequence[str] = USES,
    engines: Sequence[str] = ENGINES,
    repeats: int = 20,
    note: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """One row per engine, batch and pathway. `off` is always among the pathways: everything is a ratio to it."""
    if unknown := set(uses) - set(USES):
        raise AthenaError(f"unknown pathway {sorted(unknown)[0]!r}; known: {', '.join(USES)}")
    if new < 2:
        raise AthenaError(f"--new must be at least 2 to tell a step from the prompt, got {new}")
    uses = ["off", *(use for use in USES if use in uses and use != "off")]
    rows = []
    for batch in batches:
        ids = random_ids(model, batch, prompt)
        parity = gate(model, ids[:2, -64:], min(new, 8), uses, engines)
        for name in engines:
            note(f"{shape} · {name} · batch {batch}")
            peaks = {use: peak_gib(model, name, use, ids, new) for use in uses}
            times = interleaved(model, engine(model, name), ids, new, uses, repeats)
            for use in uses:
                rows.append(_row(model, shape, name, use, ids, new, times, peaks[use], parity))
        _forget()
    return rows


def gate(
    model: AthenaModel, ids: Tensor, new: int, uses: Sequence[str], engines: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Parity by engine and pathway; raises on red."""
    check_fallback(model, ids)
    found = {}
    for name in engines:
        if name != "eager":
            decode = decoder(model, name)
            found[name] = {use: check_decoding(model, decode, ids, new, use) for use in uses}
    return found


def random_ids(model: AthenaModel, batch: int, length: int) -> Tensor:
    """Any tokens: what they are changes no time. Never the same two rows: caches would flatter the table."""
    vocabulary = min(len(model.tokenizer), int(model.host.get_input_embeddings().weight.shape[0]))
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    return ids.to(model.input_device)


def peak_gib(model: AthenaModel, name: str, use: str, ids: Tensor, new: int) -> float | None:
    """Device memory at its highest with nothing else held: weights, caches, graph."""
    if model.input_device.type != "cuda":
        return None
    _forget()
    torch.cuda.reset_peak_memory_stats()
    with model.use(use):
        engine(model, name)(ids, new)
    return torch.cuda.max_memory_allocated() / 2**30


def interleaved(
    model: AthenaModel, generate: Generate, ids: Tensor, new: int, uses: Sequence[str], repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of prompt and all tokens, and of the prompt with its first token alone, by pathway."""
    wait = torch.cuda.synchronize if model.input_device.type == "cuda" else contextlib.nullcontext
    times: dict[str, tuple[list[float], list[float]]] = {use: ([], []) for use in uses}
    for repeat in range(repeats + 2):  # two to warm up
        for use in uses:
            with model.use(use):
                for place, count in enumerate((new, 1)):
                    wait()
                    start = time.perf_counter()
                    generate(ids, count)
                    wait()
                    if repeat >= 2:
                        times[use][place].append(time.perf_counter() - start)
    return times


def _row(
    model: AthenaModel,
    shape: str,
    name: str,
    use: str,
    ids: Tensor,
    new: int,
    times: dict[str, tuple[list[float], list[float]]],
    peak: float | None,
    parity: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    batch, prompt = ids.shape
    total, first = (1e3 * statistics.median(seconds) for seconds in times[use])
    step = (total - first) / (new - 1)
    limits = ceilings(model.input_device.type, model.dtype)
    step_floor = step_work(model, use, batch, prompt + new // 2).floor_ms(limits)
    prefill_floor = prefill_work(model, use, batch, prompt).floor_ms(limits)
    fastest, slowest = min(times[use][0]), max(times[use][0])

    def ratio(to: str, of: Callable[[list[float], list[float]], list[float]]) -> float | None:
        if to not in times:
            return None
        # Pair by pair: what slowed a repeat slowed both.
        return statistics.median(a / b for a, b in zip(of(*times[use]), of(*times[to]), strict=True))

    def steps(all_s: list[float], first_s: list[float]) -> list[float]:
        return [max(a - b, 1e-9) for a, b in zip(all_s, first_s, strict=True)]

    return {
        **{"shape": shape, "sites": list(model._injection.sites), "engine": name, "use": use},
        **{"batch": batch, "prompt": prompt, "new": new},
        **{"median_ms": total, "spread": (slowest - fastest) * 1e3 / total, "peak_gib": peak},
        **{"prefill_ms": first, "step_ms": step, "tokens_per_s": batch * new / total * 1e3},
        "ratio_to_off": ratio("off", lambda all_s, first_s: all_s),
        "ratio_to_E": ratio("E", lambda all_s, first_s: all_s),
        "step_ratio_to_off": ratio("off", steps),
        "step_ratio_to_E": ratio("E", steps),
        "prefill_ratio_to_off": ratio("off", lambda all_s, first_s: first_s),
        **{"step_floor_ms": step_floor, "prefill_floor_ms": prefill_floor},
        "gap_to_floor": total / (prefill_floor + (new - 1) * step_floor),
        "parity": parity.get(name, {}).get(use),
    }


def _forget() -> None:
    """Graphs and caches of the measurement before."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
