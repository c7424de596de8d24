"""What a study's records say over seeds. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from memoryathena.evaluation.analysis import over_seeds

Record = Mapping[str, Any]


def summarise(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Per condition: seeds, parameters, and mean, std and 95% t interval of every perplexity and task metric."""
    conditions: dict[str, dict[str, Any]] = {}
    for condition in dict.fromkeys(record["condition"] for record in records):
        mine = [record for record in records if record["condition"] == condition]
        tables: dict[str, Any] = {"perplexity": _places([_perplexity(record) for record in mine])}
        if any(record.get("tasks") for record in mine):
            tables["tasks"] = {
                task: _places([record.get("tasks", {}).get(task, {}) for record in mine])
                for task in dict.fromkeys(task for record in mine for task in record.get("tasks", {}))
            }
        conditions[condition] = {
            "seeds": [record["seed"] for record in mine],
            "backbone": mine[0]["backbone"],
            "parameters": mine[0]["parameters"],
            **tables,
        }
    return {"study": name, "interval": "95%, Student's t over seeds", "conditions": conditions}


def spread(value: Mapping[str, Any], digits: int = 3) -> str:
    """`19.123 ± 0.045`: the mean and half of the interval, or the one value."""
    mean = f"{value['mean']:.{digits}f}"
    if value["interval"] is None:
        return mean
    return f"{mean} ± {(value['interval'][1] - value['interval'][0]) / 2:.{digits}f} (std {value['std']:.{digits}f})"


def parameters_of(parameters: Mapping[str, Any]) -> int:
    """What a condition learns or keeps beside the backbone: the baseline's own, or the whole memory's side."""
    own = [value for name, value in parameters.items() if name in BASELINE_NAMES]
    return int(own[0] if own else parameters.get("memory_side", 0))


BASELINE_NAMES = ("knn-lm", "continued", "mlp-memory", "rag", "lora")


def _perplexity(record: Record) -> dict[str, Mapping[str, float]]:
    found = dict(record["perplexity"])
    if "other_domain" in record:
        found["other_domain"] = record["other_domain"]["perplexity"]
    return found


def _places(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, Any]]:
    """place -> column -> over seeds; what a run lacks is not counted for it."""
    return {
        place: {
            use: over_seeds([run[place][use] for run in runs if use in run.get(place, {})])
            for use in dict.fromkeys(use for run in runs for use in run.get(place, {}))
        }
        for place in dict.fromkeys(place for run in runs for place in run)
    }
