"""The maths of the baselines, by hand."""

import math

import numpy as np
import pytest
import torch

from memoryathena.baselines.adapt import scheduled
from memoryathena.baselines.mixture import (
    WEIGHTS,
    imitation_loss,
    mix,
    neighbour_log_probability,
    neighbour_weights,
)
from memoryathena.baselines.mlp_module import MlpMemory, matched_inner
from memoryathena.baselines.text import pieces


def test_the_neighbours_distribution() -> None:
    """Distances 0, 10, 20 at temperature 10: weights 1, 1/e, 1/e² over their sum; two of them are the target."""
    total = 1 + math.exp(-1) + math.exp(-2)
    distance = torch.tensor([[0.0, 10.0, 20.0]])
    value = torch.tensor([[7, 3, 7]])
    found = neighbour_log_probability(distance, value, torch.tensor([7]), 10.0)
    assert found.item() == pytest.approx(math.log((1 + math.exp(-2)) / total))
    assert neighbour_log_probability(distance, value, torch.tensor([5]), 10.0).item() == -math.inf
    weights = neighbour_weights(distance, torch.tensor([[True, False, True]]), 10.0).exp()
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0, math.exp(-2)]]) / (1 + math.exp(-2)))


def test_nobody_near_is_no_mass_and_no_nan() -> None:
    distance, value = torch.full((1, 2), math.inf), torch.full((1, 2), -1)
    assert neighbour_log_probability(distance, value, torch.tensor([0]), 10.0).item() == -math.inf
    assert (neighbour_weights(distance, value >= 0, 1.0).exp() == 0).all()


def test_the_mixture() -> None:
    log_p, log_q = torch.tensor([0.2, 0.5]).log(), torch.tensor([0.6, 0.0]).log()
    torch.testing.assert_close(mix(log_p, log_q, 0.25).exp(), torch.tensor([0.3, 0.375]))
    assert mix(log_p, log_q, 0.0) is log_p
    assert WEIGHTS == (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)


def test_the_best_weight_of_two_tokens() -> None:
    """p = (.2, .5), q = (.6, .1): the product of the mixtures, (.2 + .4 w)(.5 - .4 w), is largest at w = 3/8."""
    log_p, log_q = torch.tensor([0.2, 0.5]).log(), torch.tensor([0.6, 0.1]).log()
    best = max(WEIGHTS, key=lambda weight: mix(log_p, log_q, weight).sum().item())
    assert best in (0.35, 0.4)
    values = {weight: (0.2 + 0.4 * weight) * (0.5 - 0.4 * weight) for weight in WEIGHTS}
    assert values[best] == pytest.approx(max(values.values()))


def test_imitation_by_hand() -> None:
    """Neighbours say token 1 with 3/4 and token 2 with 1/4, the text says 0."""
    log_q = torch.tensor([[0.5, 0.3, 0.2]]).log()
    value, weight = torch.tensor([[1, 2, 1, -1]]), torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    target = torch.tensor([0])
    told, imitated = -math.log(0.5), -(0.75 * math.log(0.3) + 0.25 * math.log(0.2))
    assert imitation_loss(log_q, value, weight, target, 1.0).item() == pytest.approx(imitated)
    assert imitation_loss(log_q, value, weight, target, 0.0).item() == pytest.approx(told)
    assert imitation_loss(log_q, value, weight, target, 0.4).item() == pytest.approx(0.4 * imitated + 0.6 * told)


def test_a_fresh_mlp_memory_is_the_backbone_and_has_the_size_that_was_asked_for() -> None:
    inner = matched_inner(100_000, 32, 3)
    module = MlpMemory(32, inner, 3)
    module.reset(torch.Generator().manual_seed(0))
    x = torch.randn(5, 32)
    assert torch.equal(module(x), x)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert 100_000 - 3 * 64 < count <= 100_000


def test_passages_end_where_documents_do() -> None:
    ids, document = torch.arange(10), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    found = [piece.tolist() for piece in pieces(ids, document, 3)]
    assert found == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    assert np.concatenate(found).tolist() == ids.tolist()


def test_the_schedule() -> None:
    assert scheduled(0, 10, 4) == pytest.approx(0.2)
    assert scheduled(5, 10, 0) == pytest.approx(0.5)
