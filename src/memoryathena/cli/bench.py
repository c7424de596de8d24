"""Commands that time: bench latency, throughput, table and train."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memoryathena.cli.application import AsJson, Backbone, ConfigFile, Device, Overrides, app, console
from memoryathena.config import parse_overrides, read_config
from memoryathena.errors import AthenaError

DTYPES = ("bfloat16", "float16", "float32")

bench = typer.Typer(no_args_is_help=True, help="Times, behind a parity gate: on a red one nothing is timed.")
app.add_typer(bench, name="bench")


Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, mistral-7b, tiny.")
]
Adapter = Annotated[Path | None, typer.Option(help="A saved memory; without it a random one is timed.")]
Uses = Annotated[list[str] | None, typer.Option("--use", help="off, E, GE, GH, router; all of them by default.")]
Engines = Annotated[list[str] | None, typer.Option("--engine", help="eager, static, recorded, graph.")]
Batches = Annotated[list[int] | None, typer.Option("--batch", min=1, help="Rows at once; may be repeated.")]
DType = Annotated[str, typer.Option(help="The backbone's precision.")]
MemoryDType = Annotated[str, typer.Option(help="The memory's precision.")]
Record = Annotated[Path | None, typer.Option(help="A file for the record.")]


@bench.command()
def latency(
    shape: Shapes = None,
    backbone: Backbone = None,
    adapter: Adapter = None,
    prompt: Annotated[int, typer.Option(min=1, help="Positions of the prompt.")] = 338,
    new: Annotated[int, typer.Option(min=2, help="New tokens.")] = 16,
    batch: Batches = None,
    use: Uses = None,
    engine: Engines = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats after two to warm up.")] = 20,
    dtype: DType = "bfloat16",
    memory_dtype: MemoryDType = "bfloat16",
    record: Record = None,
    device: Device = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """The published microbenchmark: 338 + 16 greedy tokens, by pathway and engine."""
    engines = tuple(engine or ("eager", "graph"))
    options = {"new": new, "batches": tuple(batch or (1,)), "uses": use, "engines": engines, "repeats": repeats}
    models = _models(shape, backbone, adapter, dtype, memory_dtype, device, config, overrides)
    rows = _decoding(models, [prompt], options)
    _finish(rows, record, as_json, {"dtype": dtype, "memory_dtype": memory_dtype})


@bench.command()
def throughput(
    shape: Shapes = None,
    backbone: Backbone = None,
    adapter: Adapter = None,
    prompt: Annotated[list[int] | None, typer.Option(min=1, help="Positions of a prompt; may be repeated.")] = None,
    new: Annotated[int, typer.Option(min=2, help="New tokens.")] = 64,
    batch: Batches = None,
    use: Uses = None,
    engine: Engines = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats after two to warm up.")] = 5,
    dtype: DType = "bfloat16",
    memory_dtype: MemoryDType = "bfloat16",
    record: Record = None,
    device: Device = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second over batch sizes (1, 4, 16, 64) and prompt lengths (128, 1024)."""
    batches, engines = tuple(batch or (1, 4, 16, 64)), tuple(engine or ("graph",))
    options = {"new": new, "batches": batches, "uses": use, "engines": engines, "repeats": repeats}
    models = _models(shape, backbone, adapter, dtype, memory_dtype, device, config, overrides)
    rows = _decoding(models, prompt or [128, 1024], options)
    _finish(rows, record, as_json, {"dtype": dtype, "memory_dtype": memory_dtype})


@bench.command()
def table(
    shape: Annotated[str, typer.Option(help="A shape with random weights.")] = "gpt2",
    gib: Annotated[float, typer.Option(min=0, help="Size of the table as float32; 0 is the preset's.")] = 0.0,
    store: Annotated[list[str] | None, typer.Option(help="device, host, mmap; may be repeated.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Positions of a prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="New tokens.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 16,
    use: Annotated[str, typer.Option(help="The pathway.")] = "E",
    repeats: Annotated[int, typer.Option(min=1, help="Repeats after two to warm up.")] = 5,
    dtype: DType = "bfloat16",
    record: Record = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Where the table's rows live (device, host, mapped file) and in how many bits: time of a step, error of rows."""
    import torch

    from memoryathena.bench.shapes import SHAPES, shaped_model
    from memoryathena.bench.tables import measure_stores, rows_for
    from memoryathena.config import AthenaConfig
    from memoryathena.memory.table import STORES

    precision, place = _dtype(dtype), device or ("cuda" if torch.cuda.is_available() else "cpu")
    if shape not in SHAPES:
        raise AthenaError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    larger = {"rows": rows_for(AthenaConfig.preset(SHAPES[shape][1]), gib)} if gib else {}

    def make() -> Any:
        return shaped_model(shape, place, precision, torch.float32, memory=larger)

    engine = "recorded" if place.startswith("cuda") else "static"
    wanted: dict[str, Any] = {
        "prompt": prompt,
        "new": new,
        "batch": batch,
        "use": use,
        "repeats": repeats,
        "engine": engine,
    }
    rows = measure_stores(make, stores=tuple(store or STORES), **wanted)
    if not _recorded(rows, record, as_json, {"shape": shape, "dtype": dtype, "engine": engine}):
        return
    shown = Table("store", "numbers", title=f"{shape} · batch {batch} · {use}", title_justify="left")
    for name in ("table GiB", "step ms", "of the first", "error of rows", "same tokens"):
        shown.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['table_gib']:.2f}", f"{row['step_ms']:.2f}", f"{row['ratio_to_first']:.3f}"]
        shown.add_row(row["store"], row["kind"], *cells, f"{row['rows_error']:.1e}", str(row["same_tokens"]))
    console.print(shown)


def _models(
    shapes: list[str] | None,
    backbone: str | None,
    adapter: Path | None,
    dtype: str,
    memory_dtype: str,
    device: str | None,
    config: Path | None,
    overrides: list[str] | None,
) -> Iterator[tuple[str, Any]]:
    """One model after the other, by name."""
    import torch

    from memoryathena.backbone.load import load_backbone, load_model
    from memoryathena.bench.shapes import random_memory, shaped_model

    precision, memory_precision = _dtype(dtype), _dtype(memory_dtype, "--memory-dtype")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if backbone is None and adapter is None:
        for shape in shapes or ["gpt2"]:
            yield shape, shaped_model(shape, place, precision, memory_precision, **parse_overrides(overrides or []))
        return
    if shapes:
        raise AthenaError("give --shape, or --backbone and an adapter, not both")
    wanted = read_config(config, overrides or [])
    if adapter is None:
        host, tokenizer = load_backbone(str(backbone), dtype, place)
        yield str(backbone), random_memory(host, wanted, tokenizer, memory_precision)
        return
    model = load_model(backbone, adapter, wanted, dtype, place)
    model.memory.to(memory_precision)
    yield backbone or str(adapter), model


def _dtype(name: str, option: str = "--dtype") -> Any:
    import torch

    if name not in DTYPES:
        raise AthenaError(f"{option} is one of {', '.join(DTYPES)}, got {name!r}")
    return getattr(torch, name)


def _decoding(
    models: Iterator[tuple[str, Any]], prompts: Sequence[int], options: dict[str, Any]
) -> list[dict[str, Any]]:
    from memoryathena.bench.latency import USES, measure_latency

    rows = []
    for name, model in models:
        for prompt in prompts:
            with console.status("") as status:
                wanted = {**options, "uses": options["uses"] or USES, "note": status.update}
                rows += measure_latency(model, name, prompt, **wanted)
        del model
    return rows


def _recorded(rows: list[dict[str, Any]], record: Path | None, as_json: bool, setting: dict[str, Any]) -> bool:
    """Write the record, or print it as JSON; whether a table is still wanted."""
    from memoryathena.backbone.artifacts import write_atomically
    from memoryathena.provenance import provenance

    found = {"status": "done", **setting, **provenance(), "rows": rows}
    if record is not None:
        write_atomically(record, lambda temporary: temporary.write_text(json.dumps(found, indent=1) + "\n"))
    if as_json:
        print(json.dumps(found, indent=2))
    return not as_json


def _finish(rows: list[dict[str, Any]], record: Path | None, as_json: bool, setting: dict[str, Any]) -> None:
    """Record, JSON or one table per engine, batch and prompt."""
    if not _recorded(rows, record, as_json, setting):
        return
    for (shape, engine, batch, prompt), group in itertools.groupby(rows, key=lambda row: tuple(map(row.get, _GROUP))):
        title = f"{shape} · {engine} · batch {batch} · {prompt} + {rows[0]['new']} tokens"
        table = Table("use", title=title, title_justify="left")
        for name in ("ms", "of off", "of E", "prompt ms", "step ms", "of off", "floor ms", "tokens/s", "peak GiB"):
            table.add_column(name, justify="right")
        for row in group:
            peak, to_e = row["peak_gib"], row["ratio_to_E"]
            whole = [f"{row['median_ms']:.2f}", f"{row['ratio_to_off']:.3f}", f"{to_e:.3f}" if to_e else ""]
            step = [f"{row[key]:.3f}" for key in ("prefill_ms", "step_ms", "step_ratio_to_off", "step_floor_ms")]
            rest = [f"{row['tokens_per_s']:,.0f}", f"{peak:.2f}" if peak is not None else ""]
            table.add_row(row["use"], *whole, *step, *rest)
        console.print(table)


_GROUP = ("shape", "engine", "batch", "prompt")


@bench.command()
def train(
    backbone: Backbone = None,
    adapter: Annotated[Path | None, typer.Option(help="A saved memory; without it a fresh one is timed.")] = None,
    rows: Annotated[int, typer.Option(min=2, help="Rows of a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Positions of a row.")] = 1024,
    torch_compile: Annotated[bool, typer.Option("--torch-compile", help="Ours with fused blocks.")] = False,
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs", help="Ours as one CUDA graph.")] = False,
    dtype: Annotated[str, typer.Option(help="The backbone's precision while it is timed.")] = "bfloat16",
    out: Annotated[Path | None, typer.Option(help="A file for the record.")] = None,
    device: Device = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """A step of stages pathways and router in one pass against one pass per pathway with all its logits."""
    import torch

    from memoryathena.backbone.artifacts import write_atomically
    from memoryathena.backbone.load import load_model
    from memoryathena.bench.training import measure_training, random_batch
    from memoryathena.provenance import provenance

    _dtype(dtype)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(backbone, adapter, read_config(config, overrides or []), "float32", place)
    batch, precision = random_batch(model, rows, length), getattr(torch, dtype)
    found = measure_training(model, batch, precision, torch_compile, cuda_graphs)
    record: dict[str, Any] = {
        "status": "done",
        "backbone": backbone or str(adapter),
        **{"rows_per_step": rows, "length": length, "dtype": dtype},
        **provenance(),
        "rows": found,
    }
    if out is not None:
        write_atomically(out, lambda temporary: temporary.write_text(json.dumps(record, indent=1) + "\n"))
    if as_json:
        print(json.dumps(record, indent=2))
        return
    table = Table("stage", title=f"{rows} x {length} tokens, {dtype}", title_justify="left")
    for name in ("tokens/s", "the plain way", "ratio", "peak GiB", "plain GiB"):
        table.add_column(name, justify="right")
    for row in found:
        memory = [f"{row[key]:.1f}" if row[key] is not None else "" for key in ("peak_gib", "plain_peak_gib")]
        speeds = [f"{row['tokens_per_s']:,.0f}", f"{row['plain_tokens_per_s']:,.0f}", f"{row['ratio']:.2f}x"]
        table.add_row(row["stage"], *speeds, *memory)
    console.print(table)
