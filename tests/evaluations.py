"""Made evaluation folders: the files of `athena eval --trace` without a model."""

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np

from memoryathena.evaluation.records import record_name, write_cell
from memoryathena.evaluation.routing import Arrays, pack, summary, unpack

USES = ("off", "E", "GE", "GH", "router")
ANSWER = "</script><script>document.title='owned'</script><b>Paris</b> & \u2028 \\u003c"
WORDS = (
    "Answer",
    " these",
    " questions",
    ":\n",
    "Question",
    ":",
    " who",
    " wrote",
    " <b>",
    "it",
    "?",
    "\n",
    "Answer",
    ":",
)


def manifest(**more: Any) -> dict[str, Any]:
    return {
        "backbone": "smollm2-135m",
        "recipe": "made",
        "adapter": "a" * 64,
        "stage": "router",
        "seed": 0,
        "dtype": "float32",
        "config": {"control": "none", "router": {"temperature": 0.15, "alpha_max": 1.0}},
        "thresholds": {"tau": "0.0", "rho": 0.5, "from": "the adapter"},
        "commit": "0123456789abcdef",
        "dirty": False,
        "command": "athena eval",
        "hardware": {"gpu": None, "cpu": "a cpu", "cores": 2},
        "versions": {"torch": "2.13.0"},
        **more,
    }


def row(
    number: int, scores: dict[str, Any], output: Any = "Paris", gold: Any = ("Paris",), **more: Any
) -> dict[str, Any]:
    prompt = f"Answer these questions:\nQuestion: who wrote number {number}?\nAnswer:"
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return {
        "row": number + 1,
        "id": number,
        "prompt": digest,
        "text": prompt,
        "output": output,
        "gold": gold,
        "scores": scores,
        **more,
    }


def trace(rng: random.Random, positions: int, sites: tuple[str, ...], share: float) -> dict[str, dict[str, str]]:
    """Advantages and confidences, and what the rule tau 0, rho 0.5 makes of them."""
    out = {}
    for site in sites:
        advantages = np.array([[rng.gauss(share - 0.1, 0.1) for _ in range(2)] for _ in range(positions)], np.float32)
        confidences = np.array([[rng.uniform(0.3, 1) for _ in range(2)] for _ in range(positions)], np.float32)
        wanted = np.where((advantages > 0) & (confidences >= 0.5), advantages, -np.inf)
        source = np.where(np.isfinite(wanted.max(-1)), wanted.argmax(-1) + 1, 0)
        best = np.maximum(source - 1, 0)[:, None]
        gain, sure = (np.take_along_axis(one, best, -1)[:, 0] for one in (advantages, confidences))
        alpha = np.where(source > 0, np.clip(gain / 0.15, 0, 1) * sure, 0).astype(np.float32)
        mass = np.zeros((positions, 3), np.float32)
        mass[:, 0] = 1 - alpha
        mass[np.arange(positions), source] += alpha
        arrays: Arrays = {"source": source.astype(np.int8), "alpha": alpha, "mass": mass}
        out[site] = pack({**arrays, "advantages": advantages, "confidences": confidences})
    return out


def write_task(
    folder: Path, task: str, rows: dict[str, list[dict[str, Any]]], n: int | None = None, **more: Any
) -> None:
    """The cells of a task: rows by use; metrics are the means of the rows' scores."""
    for use, of_use in rows.items():
        metrics = {name: float(np.mean([one["scores"][name] for one in of_use])) for name in of_use[0]["scores"]}
        record: dict[str, Any] = {"task": task, "use": use, "n": n or len(of_use), "metrics": metrics}
        record |= {"malformed": {"n": 0, "rows": []}, "flags": {}, "lone_space_labels": {}}
        sites: dict[str, list[Arrays]] = {}
        for one in of_use:
            for site, packed in one.get("trace", {}).items():
                sites.setdefault(site, []).append(unpack(packed))
        record |= {"routing": summary(sites)} if sites else {}
        about = manifest(**{"data": {"source": f"{task}.jsonl", "sha256": "0" * 64, "rows": len(of_use)}, **more})
        name = record_name(about["backbone"], about["recipe"], task, use)
        write_cell(folder, name, {**record, "manifest": {**about, "use": use}}, of_use, None)


def write_grid(
    folder: Path, n: int = 12, seed: int = 0, traced: bool = True, sites: tuple[str, ...] = ("3", "8")
) -> Path:
    """Questions with traces and a hostile answer, and multiple choice without."""
    rng = random.Random(seed)
    hit = {"off": 0.2, "E": 0.35, "GE": 0.3, "GH": 0.28, "router": 0.4}
    for task in ("athena_nq", "athena_webqa", "athena_hotpotqa"):
        rows: dict[str, list[dict[str, Any]]] = {use: [] for use in USES}
        for number in range(n):
            luck = rng.random()
            for use in USES:
                right = luck + rng.gauss(0, 0.1) < hit[use]
                scores = {"em": float(right), "f1": 1.0 if right else rng.choice((0.0, 0.0, 0.5))}
                one = row(number, scores, ANSWER if number == 0 else "Paris" if right else "I do not know")
                if traced and use == "router":
                    one |= {"trace": trace(rng, len(WORDS), sites, 0.1), "pieces": list(WORDS)}
                rows[use].append(one)
        write_task(folder, task, rows)
    choice: dict[str, list[dict[str, Any]]] = {use: [] for use in USES}
    for number in range(n):
        for use in USES:
            values = {name: rng.betavariate(2, 4) for name in ("mc1", "mc2", "mc3")}
            choice[use].append(row(number, {**values, "mean": sum(values.values()) / 3}, "It is Paris."))
    write_task(folder, "athena_truthfulqa", choice)
    return folder
