"""The one training loop. Read it top to bottom: prepare, resume, then per step load, learn, log, validate, save."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from memoryathena.backbone.model import AthenaModel
from memoryathena.errors import AthenaError
from memoryathena.memory.policies import Policy
from memoryathena.training.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from memoryathena.training.config import StageConfig, TrainingConfig, rate
from memoryathena.training.data import Rows
from memoryathena.training.optim import RowAdam
from memoryathena.training.passes import run
from memoryathena.training.stages import Stage, make_stage


def train_stage(
    model: AthenaModel,
    name: str,
    config: TrainingConfig,
    rows: Rows,
    valid: Rows | None = None,
    folder: Path | None = None,
    resume: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train one stage of a model in place; returns its history, seconds and speed.

    With `folder`, events.jsonl and complete checkpoints are written there; with `resume`, the newest is gone on from,
    exactly.
    """
    options = config.stage(name)
    stage = make_stage(name, options)
    parameters = stage.trained(model)
    optimisers = _optimisers(parameters, options)
    per_step = options.per_device_train_batch_size * options.gradient_accumulation_steps
    steps = options.max_tokens // (per_step * config.max_length)
    if steps == 0:
        raise AthenaError(
            f"stage {name}: max_tokens {options.max_tokens} is less than one step of "
            f"{per_step} x {config.max_length} tokens"
        )
    history: list[dict[str, Any]] = []
    start, seconds = 0, 0.0
    best: dict[str, torch.Tensor] = {}
    best_score = math.inf
    if resume and folder is not None and (found := newest_checkpoint(folder)) is not None:
        best, facts = load_checkpoint(found, parameters, optimisers)
        if facts["config"] != config.model_dump(mode="json"):
            raise AthenaError(
                f"{found} was made with other options; resume with the same ones or choose another folder"
            )
        start, history, seconds = facts["step"], facts["history"], facts["seconds"]
        best_score = facts["best_score"] if best else math.inf

    with _Learning(model, parameters), _progress(console) as bar:
        task = bar.add_task(f"stage {name}", total=steps, completed=start, speed="", loss="")
        clock = time.monotonic()
        for step in range(start, steps):
            loss = _step(model, stage, options, rows, step, steps, parameters, optimisers)
            if not math.isfinite(loss):
                kept = newest_checkpoint(folder) if folder is not None else None
                raise AthenaError(
                    f"stage {name}: the loss is {loss} at step {step}; lower the learning rate. "
                    f"The last complete checkpoint is {kept or 'none'}"
                )
            done = (step + 1) * per_step * config.max_length
            elapsed = seconds + time.monotonic() - clock
            event: dict[str, Any] = {"stage": name, "step": step + 1, "tokens": done, "loss": loss}
            last = step + 1 == steps
            if valid is not None and (last or (config.eval_steps and (step + 1) % config.eval_steps == 0)):
                event["valid"] = evaluate(model, stage.validated, valid, config.eval_tokens)
                score = sum(event["valid"].values()) / len(event["valid"])
                if config.eval_steps and score < best_score:
                    best_score, best = score, {key: p.detach().clone() for key, p in parameters.items()}
            history.append(event)
            if folder is not None:
                _append(folder / "events.jsonl", event)
                if config.save_steps and (step + 1) % config.save_steps == 0 and not last:
                    facts = {"config": config.model_dump(mode="json"), "history": history, "seconds": elapsed}
                    facts["best_score"] = best_score if best else None
                    save_checkpoint(folder, step + 1, parameters, optimisers, best, facts)
            speed = f"{done / elapsed:,.0f} tokens/s"
            bar.update(task, advance=1, speed=speed, loss=f"loss {loss:.3f}")
        seconds += time.monotonic() - clock
    with torch.no_grad():
        for key, value in best.items():
            parameters[key].copy_(value)
    model.stage = name
    tokens = steps * per_step * config.max_length
    return {"history": history, "seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / max(seconds, 1e-9)}


def _step(
    model: AthenaModel,
    stage: Stage,
    options: StageConfig,
    rows: Rows,
    step: int,
    steps: int,
    parameters: dict[str, nn.Parameter],
    optimisers: list[torch.optim.Optimizer],
) -> float:
    """One optimiser step; the loss per target over all accumulated rows, as one large batch would have it."""
    size, parts = options.per_device_train_batch_size, options.gradient_accumulation_steps
    batches = [rows.batch((step * parts + part) * size, size) for part in range(parts)]
    count = int(sum(batch.valid_BT.sum() for batch in batches))
    total = 0.0
    for batch in batches:
        loss = stage.loss(model, batch, step / steps) / max(count, 1)
        loss.backward()
        total += float(loss.detach())
    readers = [p for key, p in parameters.items() if key != "table.weight" and p.grad is not None]
    torch.nn.utils.clip_grad_norm_(readers, options.max_grad_norm)
    factor = rate(options, step, steps)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["initial_lr"] * factor
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return total


def evaluate(model: AthenaModel, uses: tuple[str, ...], rows: Rows, limit: int, size: int = 4) -> dict[str, float]:
    """Mean loss per target of each pathway on held-out text, all in one pass per batch."""
    policies: dict[str, Policy | None] = {use: model.policy(use) for use in uses}
    totals, count = dict.fromkeys(uses, 0.0), 0
    with torch.no_grad():
        for batch in rows.all(size, limit):
            found, _ = run(model, policies, batch)
            for use, log_p_BT in found.items():
                totals[use] -= float((log_p_BT * batch.valid_BT.to(log_p_BT.device)).sum())
            count += int(batch.valid_BT.sum())
    return {use: total / count for use, total in totals.items()}


def _optimisers(parameters: dict[str, nn.Parameter], options: StageConfig) -> list[torch.optim.Optimizer]:
    """AdamW for the readers, without decay on norms and biases; row-wise Adam for the table."""
    readers = [p for key, p in parameters.items() if key != "table.weight"]
    groups = [
        {"params": [p for p in readers if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in readers if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([group for group in groups if group["params"]], lr=options.learning_rate)
    ]
    if "table.weight" in parameters:
        table = RowAdam(
            [parameters["table.weight"]], lr=options.table_learning_rate, weight_decay=options.table_weight_decay
        )
        optimisers.append(table)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
    return optimisers


class _Learning:
    """While it lasts only the stage's parameters have gradients, and the table's are sparse."""

    def __init__(self, model: AthenaModel, parameters: dict[str, nn.Parameter]):
        self.model, self.learning = model, {id(p) for p in parameters.values()}

    def __enter__(self) -> None:
        self.before = [(p, p.requires_grad) for p in self.model.memory.parameters()]
        for parameter, _ in self.before:
            parameter.requires_grad_(id(parameter) in self.learning)
        self.model.memory.table.sparse = True
        self.model.train()

    def __exit__(self, *_: object) -> None:
        for parameter, flag in self.before:
            parameter.requires_grad_(flag)
            parameter.grad = None
        self.model.memory.table.sparse = False
        self.model.eval()


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    extra = (TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[loss]}"))
    return Progress(*columns, *extra, console=console or Console(stderr=True), disable=console is None)


def _append(path: Path, event: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
