"""A training step of stages pathways and router against the plain way to do the same: one pass per pathway, all logits.

The plain way is the parity gate too: where losses or gradients differ in float32, nothing is timed. (In bfloat16 they
cannot be compared: advantages are small differences of large numbers.)

Shapes: B rows, T positions.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.backbone.model import AthenaModel
from memoryathena.backbone.scoring import observed
from memoryathena.config import SOURCES
from memoryathena.errors import AthenaError
from memoryathena.tolerances import tolerance
from memoryathena.training.advantage import distillation_loss, horizon_advantage
from memoryathena.training.compile import compiled
from memoryathena.training.config import StageConfig
from memoryathena.training.data import Batch
from memoryathena.training.loss import mean_loss
from memoryathena.training.policies import Probe
from memoryathena.training.replay import WARM_UP, Replay, causal_attention
from memoryathena.training.stages import Stage, make_stage

Way = Callable[[AthenaModel, Batch], Tensor]

REPEATS = 7
PARITY_TOKENS = 128


def measure_training(
    model: AthenaModel,
    batch: Batch,
    dtype: torch.dtype = torch.bfloat16,
    torch_compile: bool = False,
    cuda_graphs: bool = False,
) -> list[dict[str, Any]]:
    """Per stage: tokens/s of both ways, their ratio, peak memory; the float32 backbone is then in `dtype`."""
    rows = []
    ways = (("pathways", plain_pathways), ("router", plain_router))
    # The published objective, which both ways know: three endpoints; advantages by distillation.
    stages = {name: make_stage(name, StageConfig(distillation=1.0)) for name, _ in ways}
    short = Batch(batch.ids_BT[:2, :PARITY_TOKENS], batch.document_BT[:2, :PARITY_TOKENS])
    parity = {name: check_parity(model, stages[name], plain, short) for name, plain in ways}
    model.backbone.to(dtype)
    for name, plain in ways:
        with learning(model, stages[name]) as parameters:
            theirs = _timed(functools.partial(plain, model, batch), parameters)
            with causal_attention(model, cuda_graphs), compiled(model, torch_compile):
                replay = Replay(model, stages[name], parameters)
                targets = batch.valid_BT.sum().to(model.input_device)
                ours = _timed(functools.partial(replay.step, batch, targets, 0.0), parameters)
        tokens = batch.ids_BT.numel()
        rows.append(
            {
                "stage": name,
                "torch_compile": torch_compile,
                "cuda_graphs": bool(replay.captured),
                "tokens_per_step": tokens,
                "tokens_per_s": tokens / ours["seconds"],
                "plain_tokens_per_s": tokens / theirs["seconds"],
                "ratio": theirs["seconds"] / ours["seconds"],
                "spread": ours["spread"],
                "peak_gib": ours["peak_gib"],
                "plain_peak_gib": theirs["peak_gib"],
                "parity": parity[name],
            }
        )
    return rows


def random_batch(model: AthenaModel, rows: int, length: int) -> Batch:
    """Any tokens: what they are changes no time."""
    vocabulary = len(model.tokenizer)
    ids_BT = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    return Batch(ids_BT, torch.zeros_like(ids_BT))


@contextlib.contextmanager
def learning(model: AthenaModel, stage: Stage) -> Iterator[list[nn.Parameter]]:
    """Only what the stage trains has gradients."""
    parameters = list(stage.trained(model).values())
    before = [parameter.requires_grad for parameter in model.memory.parameters()]
    try:
        for parameter in model.memory.parameters():
            parameter.requires_grad_(any(parameter is trained for trained in parameters))
        yield parameters
    finally:
        for parameter, flag in zip(model.memory.parameters(), before, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = None


def check_parity(model: AthenaModel, stage: Stage, plain: Way, batch: Batch) -> dict[str, float]:
    """Relative differences of loss and gradient between the two ways; raises where they are more than rounding."""
    fast, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    found = []
    try:
        for way in (functools.partial(one_pass, model, stage, batch), functools.partial(plain, model, batch)):
            with learning(model, stage) as parameters:
                loss = float(way())
                found.append((loss, torch.cat([_flat_gradient(p) for p in parameters])))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = fast
    (ours, gradient), (theirs, expected) = found
    off = {"loss": abs(ours / theirs - 1), "gradient": float((gradient - expected).norm() / expected.norm())}
    limit = tolerance(next(model.backbone.parameters()).dtype, 1.0) * 10  # a loss is a mean over thousands of logits
    if max(off.values()) > limit:
        raise AthenaError(f"stage {stage.name}: the two ways disagree ({off}): nothing is timed on a red parity check")
    return off


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    return gradient.double().flatten()


def one_pass(model: AthenaModel, stage: Stage, batch: Batch) -> Tensor:
    """Ours: the loss of one step, gone backward."""
    found = stage.loss(model, batch, 0.0)
    loss = mean_loss(found, batch.valid_BT.sum())
    loss.backward()
    return loss.detach()


def plain_pathways(model: AthenaModel, batch: Batch) -> Tensor:
    """Three passes, each with all its logits."""
    total = torch.zeros((), device=model.input_device)
    for source in SOURCES:
        loss = -_plain_log_p(model, source, batch).sum() / batch.valid_BT.sum() / len(SOURCES)
        loss.backward()
        total = total + loss.detach()
    return total


def plain_router(model: AthenaModel, batch: Batch) -> Tensor:
    """As published: three forced passes without gradients, then one on E's trajectory for the features."""
    with torch.no_grad():
        log_p = {source: _plain_log_p(model, source, batch) for source in SOURCES}
        gain_SBT = torch.stack([log_p["GE"] - log_p["E"], log_p["GH"] - log_p["E"]])
        valid_BT, document_BT = batch.valid_BT.to(gain_SBT.device), batch.document_BT[:, :-1].to(gain_SBT.device)
        advantage_SBT, some_BT = horizon_advantage(gain_SBT, valid_BT, document_BT)
    decisions: dict[int, Any] = {}
    with (
        observed(model, lambda site, lane, decision, gates: decisions.__setitem__(site, decision)),
        model.lanes({"E": Probe()}),
    ):
        model(input_ids=batch.ids_BT.to(model.input_device), use_cache=False)
    losses = []
    for decision in decisions.values():
        predicted = decision.advantages_3[:, :-1, 1:].movedim(-1, 0)
        confidence = decision.confidences_3[:, :-1, 1:].movedim(-1, 0)
        total_S, weight_S = distillation_loss(predicted, confidence, advantage_SBT, some_BT)
        losses.append(total_S / weight_S)
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.detach()


def _plain_log_p(model: AthenaModel, use: str, batch: Batch) -> Tensor:
    ids_BT = batch.ids_BT.to(model.input_device)
    with model.use(use):
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return -losses.view(ids_BT.shape[0], -1)


def _timed(step: Callable[[], Tensor], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Median over repeats after warm-up steps, in the last of which a graph may be captured."""
    cuda = parameters[0].is_cuda
    wait = torch.cuda.synchronize if cuda else contextlib.nullcontext
    seconds = []
    for repeat in range(REPEATS + WARM_UP + 1):
        for parameter in parameters:
            parameter.grad = None
        if cuda and repeat == WARM_UP + 1:
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        step()
        wait()
        if repeat > WARM_UP:
            seconds.append(time.perf_counter() - start)
    middle = statistics.median(seconds)
    return {
        "seconds": middle,
        "spread": (max(seconds) - min(seconds)) / middle,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }
