"""What it costs that the table lives elsewhere, and what it loses in a byte a number.

Each store decodes the same prompts with the same memory; the tokens must be those of the table on the device (a byte a
number may choose others: its loss is given as the relative error of the rows and of the logits).
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memoryathena.backbone.decoder import Decoder
from memoryathena.backbone.model import AthenaModel
from memoryathena.bench.latency import decoder, interleaved, random_ids
from memoryathena.config import AthenaConfig
from memoryathena.errors import AthenaError
from memoryathena.memory.table import STORES

ERROR_ROWS = 4096


def rows_for(config: AthenaConfig, gib: float) -> int:
    """Rows per head that make a float32 table of this size."""
    memory = config.memory
    return max(1, int(gib * 2**30 / (4 * memory.total_heads * memory.width)))


@torch.no_grad()
def measure_stores(
    make: Callable[[], AthenaModel],
    prompt: int = 128,
    new: int = 32,
    batch: int = 16,
    stores: tuple[str, ...] = STORES,
    kinds: tuple[str | None, ...] = (None, "int8", "fp8"),
    use: str = "E",
    engine: str = "static",
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """One row per store and kind: milliseconds of a step and its ratio to the first one's. `make` gives the same
    memory every time, its table on the device."""
    if unknown := set(stores) - set(STORES):
        raise AthenaError(f"unknown store {sorted(unknown)[0]!r}; known: {', '.join(STORES)}")
    rows: list[dict[str, Any]] = []
    expected: dict[str, Any] = {}
    for store in stores:
        for kind in kinds if store != "mmap" else (None,):
            model = make()
            table = model.memory.table
            generator = torch.Generator().manual_seed(1)
            index = torch.randint(
                model.config_athena.memory.rows, (1, ERROR_ROWS, len(table.base_H)), generator=generator
            )
            exact = table(index.to(model.input_device)).float()
            gib = table.weight.numel() * table.weight.itemsize / 2**30
            ids = random_ids(model, batch, prompt)
            with tempfile.TemporaryDirectory() as folder:
                _move(model, store, kind, Path(folder))
                error = float((table(index).float() - exact).norm() / exact.norm())
                own = "static" if store == "mmap" else engine  # no graph can ask the host
                decode = decoder(model, own)
                with model.use(use):
                    tokens = decode(ids, max_new_tokens=new)
                    if not expected:
                        expected = {"tokens": tokens}
                    same = bool(torch.equal(tokens, expected["tokens"]))
                    if kind is None and not same:
                        raise AthenaError(f"store {store!r} gives other tokens: nothing is timed on a red parity check")
                times = interleaved(model, functools.partial(_generate, decode), ids, new, [use], repeats)[use]
            step_ms = sorted((a - b) / (new - 1) * 1e3 for a, b in zip(*times, strict=True))[repeats // 2]
            rows.append(
                {
                    **{
                        "store": store,
                        "kind": kind or "float32",
                        "engine": own,
                        "table_gib": gib,
                        "batch": batch,
                        "use": use,
                    },
                    **{"step_ms": step_ms, "ratio_to_first": step_ms / rows[0]["step_ms"] if rows else 1.0},
                    **{"rows_error": error, "same_tokens": same},
                }
            )
            del model, table, decode
    return rows


def _generate(decode: Decoder, ids: Tensor, new: int) -> Tensor:
    return decode(ids, max_new_tokens=new)


def _move(model: AthenaModel, store: str, kind: str | None, folder: Path) -> None:
    """A mapped table is one that was saved."""
    if store != "mmap":
        model.store_table(store, kind)
        return
    from memoryathena.backbone import artifacts

    model.save_memory(folder)
    _, _, digest, _ = artifacts.load_memory_config(folder)
    artifacts.map_table(folder, digest, model.memory.table)
