"""The parts of training by hand: losses, advantages, the table's optimiser, batches."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from memoryathena import AthenaError
from memoryathena.backbone.scoring import LinearHead
from memoryathena.config import SOURCES
from memoryathena.memory.policies import SUBSET_USES, SUBSETS, Anchored, Candidates
from memoryathena.memory.router import Admission
from memoryathena.tolerances import tolerance
from memoryathena.training.advantage import distillation_loss, horizon_advantage, subset_loss
from memoryathena.training.config import StageConfig, TrainingConfig, rate
from memoryathena.training.data import Rows, TokenArray
from memoryathena.training.distributed import World
from memoryathena.training.learner import Learner
from memoryathena.training.loop import train_stage
from memoryathena.training.loss import mean_loss
from memoryathena.training.optim import Muon, RowAdam
from memoryathena.training.passes import run
from memoryathena.training.policies import StraightThrough
from memoryathena.training.replay import CAUSAL, causal
from memoryathena.training.stages import make_stage
from memoryathena.training.target import target_log_probabilities
from tests.training import fresh, held_out, rows


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_log_probabilities_are_plain_cross_entropy(chunk: int) -> None:
    """Through the one frozen matrix (with scale and soft cap) and through any other function."""
    hidden = torch.randn(3, 11, 8, dtype=torch.float64, requires_grad=True)
    linear = torch.nn.Linear(8, 50).double().requires_grad_(False)
    targets = torch.randint(50, (3, 11))
    weight = torch.randn(3, 11, dtype=torch.float64)
    for scale, cap in ((1.0, None), (0.7, 3.0)):
        head = LinearHead(linear.weight, linear.bias, scale, cap)
        logits = linear(hidden) * scale
        logits = torch.tanh(logits / cap) * cap if cap is not None else logits
        plain = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 11)
        (expected,) = torch.autograd.grad((plain * weight).sum(), hidden)
        for way in (head, lambda x, head=head: head(x)):
            found = target_log_probabilities(hidden, targets, way, chunk)
            torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)
            (ours,) = torch.autograd.grad((found * weight).sum(), hidden)
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_horizon_advantage_equals_its_definition() -> None:
    """Against the formula as plain loops, with invalid targets and a document boundary."""
    horizons, T = (1, 4, 8), 13
    gain = torch.randn(2, 3, T)
    valid = torch.rand(3, T) > 0.2
    document = torch.zeros(3, T, dtype=torch.long)
    document[1, 6:] = 1
    found, some = horizon_advantage(gain, valid, document, horizons)
    for s in range(2):
        for b in range(3):
            for t in range(T):
                means = []
                for k in horizons:
                    reach = [
                        t + j
                        for j in range(k)
                        if t + j < T and valid[b, t + j] and document[b, t + j] == document[b, t]
                    ]
                    if reach:
                        means.append(sum(float(gain[s, b, i]) for i in reach) / len(reach))
                assert bool(some[b, t]) == bool(means)
                expected = sum(means) / len(means) if means else 0.0
                assert float(found[s, b, t]) == pytest.approx(expected, abs=1e-5)


def test_distillation_loss_by_hand() -> None:
    advantage = torch.tensor([[[0.5, -3.0, 0.001]], [[0.0, 0.0, 0.0]]])
    predicted, confidence = torch.zeros(2, 1, 3), torch.full((2, 1, 3), 0.5)
    valid = torch.tensor([[True, True, False]])
    weights = torch.tensor([0.5, 2.0])
    regression = torch.tensor([0.125, 1.5])  # Smooth L1 of 0.5 and of 2 (clipped from 3)
    sign = torch.full((2,), math.log(2))
    first = ((regression + 0.25 * sign) * weights).sum() / weights.sum()
    second = 0.25 * math.log(2)
    totals, sums = distillation_loss(predicted, confidence, advantage, valid)
    torch.testing.assert_close((totals / sums).mean(), (first + second) / 2)


def test_row_adam_touches_only_the_rows_that_were_read() -> None:
    table = torch.nn.Parameter(torch.randn(10, 4))
    before = table.detach().clone()
    optimiser = RowAdam([table], lr=0.1, beta=0.9)
    F.embedding(torch.tensor([2, 7, 7]), table, sparse=True).square().sum().backward()
    gradient = table.grad.to_dense().clone()  # type: ignore[union-attr]
    optimiser.step()
    untouched = [row for row in range(10) if row not in (2, 7)]
    assert torch.equal(table[untouched], before[untouched])
    for row in (2, 7):  # the first reading moves a row by lr in root mean square, along its gradient
        step = before[row] - table[row]
        assert step.square().mean().sqrt().item() == pytest.approx(0.1, rel=1e-5)
        assert F.cosine_similarity(step, gradient[row], dim=0).item() == pytest.approx(1, abs=1e-6)
    state = optimiser.state[table]
    assert state["count"].tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert state["square"].numel() == 10
    table.grad = None
    F.embedding(torch.tensor([2]), table, sparse=True).sum().mul(2).backward()
    second = gradient[2].square().mean() * 0.1 * 0.9 + 4 * 0.1
    expected = table[2] - 0.1 * 2 / (second / (1 - 0.9**2)).sqrt()
    optimiser.step()
    torch.testing.assert_close(table[2], expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_row_settles_by_its_own_readings() -> None:
    table = torch.nn.Parameter(torch.zeros(4, 2))
    optimiser = RowAdam([table], lr=0.1, beta=0.9, settling=0.5)
    lengths = []
    for _ in range(4):  # the same gradient each time: only the count changes the step
        before = table.detach().clone()
        table.grad = None
        F.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
        optimiser.step()
        lengths.append((before - table)[1, 0].item())
    assert lengths == pytest.approx([0.1 / n**0.5 for n in (1, 2, 3, 4)], rel=1e-5)


def test_rows_are_a_function_of_seed_and_number() -> None:
    source = TokenArray(np.arange(103, dtype=np.uint16))
    rows = Rows(source, length=10, seed=3)
    assert rows.count == 10
    epochs = [torch.cat([rows.batch(epoch * 10 + i, 1).ids_BT for i in range(10)]) for epoch in range(2)]
    for epoch in epochs:
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 100, 10))
    assert not torch.equal(*epochs)
    assert torch.equal(rows.batch(7, 5).ids_BT, Rows(source, 10, 3).batch(7, 5).ids_BT)
    assert [batch.ids_BT[0, 0].item() for batch in rows.all(4, 1000)] == [0, 40, 80]
    with pytest.raises(AthenaError, match="no full row of 200 tokens"):
        Rows(source, 200, 0).batch(0, 1)


def test_schedules() -> None:
    drop = StageConfig()
    assert [rate(drop, step, 10) for step in (0, 7, 8, 9)] == [1, 1, 0.3, 0.3]
    cosine = StageConfig(lr_scheduler_type="cosine", warmup_steps=3)
    assert rate(cosine, 0, 100) == 0.25
    assert rate(cosine, 50, 100) == pytest.approx(0.5)
    with pytest.raises(AthenaError, match=r"unknown config key 'memory.max_token'"):
        TrainingConfig.build({"memory": {"max_token": 3}})


def test_straight_through_is_the_rule_forwards_and_a_mixture_backwards() -> None:
    e, ge, gh = torch.randn(3, 1, 6, 4).requires_grad_().unbind()
    raw = torch.randn(1, 6, 3, requires_grad=True)

    def advantage() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([torch.zeros(1, 6, 1), raw[..., 1:]], dim=-1), torch.sigmoid(raw)

    rule = Admission(0.0, 0.5, 0.15, 1.0)
    index = torch.zeros(1, 6, dtype=torch.long)
    active = torch.ones(1, 6, 3, dtype=torch.bool)
    candidates = Candidates(
        {"E": e, "GE": ge, "GH": gh}, active, advantage, lambda: raw, lambda: raw, index, index, site=0
    )
    hard, soft = Anchored(rule)(candidates), StraightThrough(rule)(candidates)
    torch.testing.assert_close(soft.residual, hard.residual)
    assert torch.equal(soft.alpha, hard.alpha)
    weight = torch.randn(1, 6, 4)
    head, *values = torch.autograd.grad((soft.residual * weight).sum(), (raw, e, ge, gh))
    advantages, confidences = advantage()
    p = torch.softmax(advantages / 0.15, dim=-1) * confidences
    mixture = e + p[..., 1:2] * (ge - e) + p[..., 2:3] * (gh - e)
    (expected,) = torch.autograd.grad((mixture * weight).sum(), raw)
    torch.testing.assert_close(head, expected)
    for s, value in enumerate(values):
        torch.testing.assert_close(value, hard.weights_3[..., s, None] * weight)


def test_the_subset_head_learns_what_was_best_for_each_token() -> None:
    """Two positions: subset 4 is best at the first, subset 0 at the second, a third has no target."""
    log_p = torch.full((7, 1, 3), -2.0)
    log_p[4, 0, 0], log_p[0, 0, 1], log_p[6, 0, 2] = -1.0, -0.5, -0.1
    logits = torch.zeros(1, 3, 7)
    logits[0, 0, 4] = math.log(3)
    found = subset_loss(log_p, logits, torch.tensor([[True, True, False]]))
    assert found.item() == pytest.approx(-math.log(3 / 9) - math.log(1 / 7))


def test_published_auxiliary_heads() -> None:
    """Eight paths, half the cross entropy to the best subset, a rate of their own, chosen by subset-soft."""
    paths = ("E", "GE", "GH", "E+GE", "E+GH", "GE+GH", "soft", "subset-soft")
    for use, subset in zip(SUBSET_USES, SUBSETS, strict=True):
        assert use == {"E+GE+GH": "soft"}.get(name := "+".join(SOURCES[s] for s in subset), name)
    stage = StageConfig(
        max_steps=4, paths=paths, subset_distillation=0.5, auxiliary_learning_rate=1e-2, select_by=("subset-soft",)
    )
    model = fresh()
    learner = Learner.make(model, make_stage("pathways", stage), stage, World())
    rates = {id(p): group["lr"] for group in learner.optimisers[0].param_groups for p in group["params"]}
    for name, parameter in learner.parameters.items():
        assert rates[id(parameter)] == (1e-2 if name.split(".")[2] in ("ordinary", "subset") else 1e-3), name
    batch = rows().batch(0, 2)
    with torch.no_grad():
        full = learner.stage.loss(model, batch, 0.0)
        paths_alone = make_stage("pathways", StageConfig(paths=paths)).loss(model, batch, 0.0)
        policies = {use: model.policy(use) for use in paths}
        found, decisions = run(model, policies, batch)
        best = torch.stack([found[use] for use in SUBSET_USES]).argmax(0)
        expected = 0.0
        for site in (1, 3):
            log_q = decisions["subset-soft", site].subset_logits_7[:, :-1].log_softmax(-1)
            expected -= log_q.gather(-1, best[..., None])[..., 0][batch.valid_BT].sum() / 2
    torch.testing.assert_close(full, paths_alone + 0.5 * expected)
    out = train_stage(
        model, "pathways", TrainingConfig(max_length=24, pathways=stage, eval_steps=2), rows(), held_out()
    )
    assert out["history"][-1]["valid"].keys() == {"subset-soft"}
    with pytest.raises(AthenaError, match=r"compares all subsets: E\+GE is not among the paths"):
        TrainingConfig.build({"pathways": {"subset_distillation": 0.5}})
    with pytest.raises(AthenaError, match=r"router: subset_distillation and learn_table are for stage pathways alone"):
        TrainingConfig.build({"router": {"learn_table": True}})
    with pytest.raises(AthenaError, match=r"router\.select_by: 'best' is none of"):
        TrainingConfig.build({"router": {"select_by": ["best"]}})


def test_muon_is_torchs_own() -> None:
    """Matrices of one shape together, as torch takes them one by one; its bfloat16 rounds products of a batch alike."""
    torch.manual_seed(0)
    first = [torch.randn(6, 10), torch.randn(10, 6), torch.randn(6, 10), torch.randn(4, 4)]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in first] for _ in range(2))
    optimisers = (
        Muon(ours, lr=0.01, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        gradients = [torch.randn_like(x) for x in first]
        for parameters, optimiser in zip((ours, theirs), optimisers, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimiser.step()
    for a, b, x in zip(ours, theirs, first, strict=True):
        assert (a - b).abs().max() / (b - x).abs().max() < tolerance(torch.bfloat16, 1.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pathways", {"paths": ("E", "GE", "GH", "router")}),
        ("pathways", {"paths": ("soft", "subset-hard", "E+GH")}),
        ("router", {"distillation": 1.0}),
        ("router", {"distillation": 0.0}),
    ],
)
def test_a_pass_of_training_asks_no_value_of_a_device(name: str, options: dict[str, Any]) -> None:
    """Else it could not be captured as one graph, and would wait for the device in every step."""
    model = fresh()
    AttentionInterface.register(CAUSAL, causal)
    model.host.set_attn_implementation(CAUSAL)
    stage, batch = make_stage(name, StageConfig(**options)), rows().batch(0, 2)
    targets = batch.valid_BT.sum()
    mean_loss(stage.loss(model, batch, 0.0), targets)
    with NoValueLeaves():
        mean_loss(stage.loss(model, batch, 0.0), targets).backward()


@pytest.mark.parametrize("distillation", [0.0, 1.0])
def test_a_step_by_replay_is_a_step(distillation: float) -> None:
    """Where nothing can be captured it is the same arithmetic, bit for bit."""
    options, batch = StageConfig(distillation=distillation), rows().batch(0, 2)
    found = [
        Learner.make(fresh(), make_stage("router", options), options, World(), cuda_graphs).step([batch], 0, 2, None)
        for cuda_graphs in (False, True)
    ]
    assert found[0] == found[1]


class NoValueLeaves(TorchDispatchMode):
    """Raises where an operation needs a value on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select")), func
        return func(*args, **(kwargs or {}))
