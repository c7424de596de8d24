"""Decoding on a GPU, measured: parity of captured graphs, then `bench latency` for several shapes, within a time.

    run="env PYTHONPATH=src:. PYTHONUNBUFFERED=1 python3 scripts/decode_gpu.py"
    $run gpt2 gpt2-medium gpt2-large gpt2-xl --out $OUT --seconds 480
    $run mistral-7b --out $OUT --seconds 480 --batch 1 16 --prompt 338 2048 --engines recorded graph --skip-parity
    $run gpt2 --out $OUT --tables 40 --engines --skip-parity

Every part that fails is written down with its error and the next one goes on; the record is complete after each part.
"""

import argparse
import functools
import gc
import itertools
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memoryathena.bench.floor import ceilings
from memoryathena.bench.latency import USES, decoder, measure_latency, random_ids
from memoryathena.bench.shapes import shaped_model
from memoryathena.bench.tables import measure_stores, rows_for
from memoryathena.config import AthenaConfig
from memoryathena.provenance import provenance

START = time.monotonic()


def main() -> None:
    """Parts in turn, as long as there is time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=["gpt2"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--prompt", type=int, nargs="*", default=[338])
    parser.add_argument("--engines", nargs="*", default=["recorded", "graph", "eager"])
    parser.add_argument("--memory-dtype", default="bfloat16")
    parser.add_argument("--skip-parity", action="store_true")
    parser.add_argument("--tables", type=float, help="GiB of a table on the device and in pinned host memory")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    name_of_record = f"{'tables' if given.tables else 'latency'}--{given.shapes[0]}.json"
    record: dict[str, Any] = {
        "status": "running",
        **{"dtype": "bfloat16", "memory_dtype": given.memory_dtype},
        **provenance("scripts/decode_gpu.py"),
        **{"rows": [], "kernels": [], "failures": []},
    }
    limits = ceilings("cuda", torch.bfloat16)
    record["ceilings"] = {"bytes_per_s": limits.bandwidth, "operations_per_s": limits.rate}
    print(f"copy {limits.bandwidth / 1e12:.2f} TB/s, bf16 product {limits.rate / 1e12:.0f} TFLOP/s", flush=True)

    def attempt(name: str, part: Callable[[], None]) -> None:
        if time.monotonic() - START > given.seconds:
            record["failures"].append({"part": name, "error": "no time left"})
            return
        begun = time.monotonic()
        try:
            part()
        except Exception as error:
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            record["failures"].append({"part": name, "error": traceback.format_exc()[-4000:]})
        print(f"[{time.monotonic() - START:.0f} s] {name} took {time.monotonic() - begun:.0f} s", flush=True)
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / name_of_record).write_text(json.dumps(record, indent=1) + "\n")

    if not given.skip_parity:
        attempt("parity of small models", parity)

    def measure(model: Any, shape: str, prompt: int, batch: int, engine: str) -> None:
        repeats = 4 if engine == "eager" else 25
        rows = measure_latency(model, shape, prompt, 16, [batch], USES, [engine], repeats)
        record["rows"] += rows
        show(rows)
        if engine != "eager" and prompt == given.prompt[0]:
            record["kernels"] += [kernels(model, shape, engine, batch, use) for use in USES]

    def stores() -> None:
        larger = {"rows": rows_for(AthenaConfig.preset("gpt2"), given.tables)}
        make = functools.partial(shaped_model, "gpt2", "cuda", torch.bfloat16, torch.float32, memory=larger)
        kinds = (None,) if given.tables > 8 else (None, "int8", "fp8")
        rows = measure_stores(make, batch=16, stores=("device", "host"), kinds=kinds, engine="recorded")
        record["tables"] = rows
        for row in rows:
            print(row, flush=True)

    if given.tables:
        attempt(f"tables of {given.tables} GiB", stores)
    for shape in given.shapes if given.engines else ():
        model = shaped_model(shape, "cuda", torch.bfloat16, getattr(torch, given.memory_dtype))
        for prompt, batch, engine in itertools.product(given.prompt, given.batch, given.engines):
            name = f"{shape} {engine} batch {batch} prompt {prompt}"
            attempt(name, functools.partial(measure, model, shape, prompt, batch, engine))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    record["status"] = "done"
    (given.out / name_of_record).write_text(json.dumps(record, indent=1) + "\n")
    for failure in record["failures"]:
        print(failure["part"], failure["error"][-600:])


def parity() -> None:
    """Small models in float32: a red one is a failure in the record."""
    from tests.graphs import check_captured

    for name, sites, fuse in (("gpt2", (2,), False), ("llama", (1, 3), False), ("llama", (1, 3), True)):
        check_captured(name, sites, fuse)
        print("parity", name, sites, "fused" if fuse else "", "holds", flush=True)


def kernels(model: Any, shape: str, engine: str, batch: int, use: str) -> dict[str, Any]:
    """How many kernels a replayed step launches, the GPU's time in them, and the most expensive ones."""
    ids = random_ids(model, batch, 128)
    with torch.no_grad(), model.use(use):
        decode = decoder(model, engine)
        decode(ids, max_new_tokens=4)
        (step,) = decode.steps.values()
        with decode._fused(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step.run(4)
            torch.cuda.synchronize()
    found = [event for event in profile.key_averages() if event.device_time_total > 0]
    found.sort(key=lambda event: -event.device_time_total)
    top = [[event.key[:80], event.count / 4, event.device_time_total / 4] for event in found[:25]]
    count, busy = sum(event.count for event in found) / 4, sum(event.device_time_total for event in found) / 4
    print(f"{shape:12} {engine:9} {use:7} {count:6.0f} kernels, {busy:8.1f} us busy a step", flush=True)
    return {
        **{"shape": shape, "engine": engine, "batch": batch, "use": use},
        **{"kernels_per_step": count, "busy_us": busy, "top": top},
    }


def show(rows: list[dict[str, Any]]) -> None:
    """One line a row."""
    for row in rows:
        head = f"{row['shape']:12} {row['engine']:9} b{row['batch']:<3} p{row['prompt']:<5} {row['use']:7}"
        whole = f"{row['median_ms']:9.2f} ms ({row['spread']:.2f}) of off {row['ratio_to_off']:.3f}"
        whole += f" of E {row['ratio_to_E'] or 0:.3f}"
        prefill = f"prefill {row['prefill_ms']:.2f} ({row['prefill_ratio_to_off']:.3f}, "
        prefill += f"floor {row['prefill_floor_ms']:.2f})"
        step = f"step {row['step_ms']:.3f} ({row['step_ratio_to_off']:.3f}, floor {row['step_floor_ms']:.3f})"
        print(f"{head} {whole} | {prefill} | {step} | {row['peak_gib'] or 0:.3f} GiB", flush=True)


if __name__ == "__main__":
    main()
