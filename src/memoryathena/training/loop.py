"""The one training loop. Read it top to bottom: prepare, resume, then per step load, learn, validate, log, save."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from memoryathena.backbone.model import AthenaModel
from memoryathena.errors import AthenaError
from memoryathena.memory.policies import Policy
from memoryathena.training.checkpoint import (
    clear_leftovers,
    last_complete,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from memoryathena.training.compile import compiled
from memoryathena.training.config import TrainingConfig, rate
from memoryathena.training.data import Batch, Rows
from memoryathena.training.distributed import World, broadcast
from memoryathena.training.learner import Learner
from memoryathena.training.passes import run
from memoryathena.training.recompute import recomputed
from memoryathena.training.replay import causal_attention
from memoryathena.training.stages import make_stage
from memoryathena.training.state import collect, frozen_digest, restore
from memoryathena.training.tracking import Tracking
from memoryathena.training.trouble import (
    Interrupts,
    Stopped,
    memory_explained,
    to_learn_in_less,
    to_validate_in_less,
)


@dataclasses.dataclass
class Progress:
    """How far a stage is: what a checkpoint remembers beside the tensors."""

    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pending: list[float] = dataclasses.field(default_factory=list)  # losses since the last event
    best_step: int | None = None
    best_score: float | None = None
    no_better: int = 0  # validations since the best one

    def finished(self, steps: int, patience: int | None) -> bool:
        """The budget is spent, or it stopped early."""
        return self.step >= steps or (patience is not None and self.no_better >= patience)


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
    exactly. Under torchrun or accelerate every process calls this with the same arguments.
    """
    # -- prepare
    world, options = World.current(), config.stage(name)
    stage = make_stage(name, options)
    replayed = config.cuda_graphs and not config.gradient_checkpointing
    learner = Learner.make(model, stage, options, world, replayed)
    for source in (rows, valid) if valid is not None else (rows,):
        source.check()
    per_step = options.per_device_train_batch_size * options.gradient_accumulation_steps * world.size
    positions = per_step * config.max_length
    steps = options.steps(positions)
    if steps == 0:
        raise AthenaError(
            f"stage {name}: max_tokens {options.max_tokens} is less than one step of "
            f"{per_step} x {config.max_length} tokens"
        )
    # Which options help is another question for a validation than for a step.
    explained = memory_explained(f"stage {name}", to_learn_in_less(name, config), folder)
    tracking = Tracking(name, config, folder if world.main else None, console if world.main else None)
    torch.manual_seed(config.seed + world.rank)
    broadcast(world, dict(model.memory.named_parameters()))

    # -- resume
    progress, best, identity = Progress(), dict[str, Tensor](), dict[str, Any]()
    if folder is not None:
        identity = _identity(learner, config, rows, valid)
        if world.main:
            clear_leftovers(folder)
    if resume and folder is not None and (found := newest_checkpoint(folder)) is not None:
        progress, best = _resume(found, identity, learner)
    _together(world, progress.step, model.input_device)
    clock = time.monotonic() - progress.seconds

    with (
        learner.learning(),
        causal_attention(model, replayed and stage.phase(1.0) is not None),
        compiled(model, config.torch_compile),
        recomputed(model, config.gradient_checkpointing),
        Interrupts(enabled=folder is not None) as interrupts,
        tracking,
        explained,
    ):
        tracking.begin(progress.step, steps, positions, progress.history)
        done = progress.finished(steps, config.early_stopping_patience)
        while not done:
            # -- load
            step = progress.step
            batches = _load(rows, learner, step)

            # -- learn
            loss, norm = learner.step(batches, step, steps, folder)
            progress.step, progress.seconds = step + 1, time.monotonic() - clock
            progress.pending.append(loss)
            tracking.step(progress.step, loss)

            # -- validate
            scores = None
            if valid is not None and (progress.step == steps or _due(progress.step, config.eval_steps)):
                with memory_explained(f"stage {name}, validating", to_validate_in_less(config), folder):
                    size = config.per_device_eval_batch_size
                    scores = evaluate(model, stage.validated, valid, config.eval_tokens, size)
                best = _select(progress, scores, learner, best, config)
            done = progress.finished(steps, config.early_stopping_patience)

            # -- log
            if scores is not None or done or _due(progress.step, config.logging_steps):
                event = {"stage": name, "step": progress.step, "tokens": progress.step * positions}
                event |= {"loss": sum(progress.pending) / len(progress.pending), "grad_norm": norm}
                event |= {"learning_rate": options.learning_rate * rate(options, step, steps)}
                event |= {"valid": scores} if scores is not None else {}
                progress.pending.clear()
                progress.history.append(event)
                tracking.event(event)

            # -- save
            stop = _asked_to_stop(learner, interrupts)
            if folder is not None and (stop or (not done and _due(progress.step, config.save_steps))):
                _save(folder, progress, identity, learner, best, config.save_total_limit)
            if stop:
                kept = last_complete(folder)
                raise Stopped(f"stage {name} stopped after step {progress.step} of {steps}; {kept}", stop)

    with torch.no_grad():
        for key, value in best.items():
            learner.parameters[key].copy_(value)
    model.stage = name
    tokens, seconds = progress.step * positions, progress.seconds
    speed = tokens / max(seconds, 1e-9)
    out: dict[str, Any] = {"history": progress.history, "steps": progress.step, "best_step": progress.best_step}
    return out | {"seconds": seconds, "tokens": tokens, "tokens_per_s": speed}


def evaluate(model: AthenaModel, uses: tuple[str, ...], rows: Rows, limit: int, size: int = 4) -> dict[str, float]:
    """Mean loss per target of each pathway on held-out text, all in one pass per batch; processes share the batches."""
    world, policies = World.current(), dict[str, Policy | None]()
    for use in uses:
        policies[use] = model.policy(use)
    batches = rows.ordered(size, limit)
    sums = torch.zeros(len(uses) + 1, dtype=torch.float64, device=model.input_device)
    # Validations are short and of other shapes: compiling for them would cost more than it saves.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for first in range(0, len(batches), world.size):
            # A sharded backbone needs every process in every pass: one without a batch of its own counts nothing.
            mine = first + world.rank < len(batches)
            batch = rows.in_order(*batches[first + world.rank if mine else first])
            found, _ = run(model, policies, batch)
            if mine:
                losses = [-(log_p * batch.valid_BT.to(log_p.device)).sum().to(sums) for log_p in found.values()]
                sums += torch.stack([*losses, batch.valid_BT.sum().to(sums)])
    *totals, count = world.sum(sums).tolist()
    if not count:
        raise AthenaError("the held-out text has no target: every token is a document of its own")
    return {use: total / count for use, total in zip(uses, totals, strict=True)}


def _load(rows: Rows, learner: Learner, step: int) -> list[Batch]:
    """This process's parts of a step. However a step is dealt out, it has the same rows."""
    size, parts = learner.options.per_device_train_batch_size, learner.options.gradient_accumulation_steps
    first = (step * learner.world.size + learner.world.rank) * parts
    return [rows.batch((first + part) * size, size) for part in range(parts)]


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _select(
    progress: Progress, scores: dict[str, float], learner: Learner, best: dict[str, Tensor], config: TrainingConfig
) -> dict[str, Tensor]:
    """Compare with the best validation so far; the parameters to come back to at the end."""
    score = sum(scores.values()) / len(scores)
    if config.eval_steps is None:
        return best
    # A score that is not a number is never the best, also where it is the first.
    if not score < (math.inf if progress.best_score is None else progress.best_score):
        progress.no_better += 1
        return best
    progress.best_step, progress.best_score, progress.no_better = progress.step, score, 0
    if not config.load_best_model_at_end:
        return best
    return {key: parameter.detach().to("cpu", copy=True) for key, parameter in learner.parameters.items()}


def _asked_to_stop(learner: Learner, interrupts: Interrupts) -> int:
    """A signal that any process has caught, known to all of them."""
    if learner.world.size == 1:
        return interrupts.caught
    caught = torch.tensor([interrupts.caught], device=learner.model.input_device)
    return int(learner.world.gather_all(caught).max())


def _save(
    folder: Path, progress: Progress, identity: dict[str, Any], learner: Learner, best: dict[str, Tensor], keep: int
) -> None:
    """A checkpoint, written by the main process."""
    tensors = collect(learner.world, learner.parameters, learner.rows, learner.optimisers)
    error = None
    if learner.world.main:
        other = best if progress.best_step != progress.step else {}  # else the parameters themselves are the best
        facts = {**identity, **dataclasses.asdict(progress), "keeps_best": bool(best)}
        try:
            save_checkpoint(folder, progress.step, tensors, other, facts, keep)
        except AthenaError as met:
            error = met
    learner.world.share(error)


def _identity(learner: Learner, config: TrainingConfig, rows: Rows, valid: Rows | None) -> dict[str, Any]:
    """All that a stage's result depends on; a run that is resumed must share it."""
    name = learner.stage.name
    data = rows.identity()
    if valid is not None:
        data |= {f"held-out {key}": value for key, value in valid.identity().items()}
    options = config.learning(name, learner.world.size)
    return {"stage": name, "options": options, "data": data, "frozen": frozen_digest(learner.model, learner.parameters)}


def _together(world: World, step: int, device: torch.device) -> None:
    """All processes begin at one step; where they see different folders they would not."""
    if world.size > 1 and len(set(steps := world.gather_all(torch.tensor([step], device=device)).tolist())) > 1:
        raise AthenaError(f"the processes find checkpoints of different steps, {steps}: all must see one folder")


def _resume(path: Path, identity: dict[str, Any], learner: Learner) -> tuple[Progress, dict[str, Tensor]]:
    """Everything as it was; refused where another run would come of it."""
    tensors, best, facts = load_checkpoint(path)
    there, here = _flat(facts), _flat(identity)
    for key in sorted(here):
        if there.get(key) != here[key]:
            raise AthenaError(
                f"{path} was made with {key} {there.get(key)}, this run has {here[key]}: resume with the same, "
                "or choose another folder"
            )
    restore(tensors, str(path), learner.world, learner.parameters, learner.rows, learner.optimisers)
    if facts["keeps_best"] and not best:
        best = {key: tensors[f"parameter/{key}"] for key in learner.parameters}
    return Progress(**{field.name: facts[field.name] for field in dataclasses.fields(Progress)}), best


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Identity as single entries."""
    out = {key: value for key, value in facts.items() if not isinstance(value, dict)}
    return out | facts.get("options", {}) | facts.get("data", {})
