"""A step as one CUDA graph against the same step as it is, on a real device."""

import pytest
import torch

from memoryathena.tolerances import tolerance
from memoryathena.training.config import StageConfig
from memoryathena.training.distributed import World
from memoryathena.training.learner import Learner
from memoryathena.training.replay import causal_attention
from memoryathena.training.stages import make_stage
from tests.models import backbone
from tests.training import attached, rows

pytestmark = pytest.mark.gpu
STEPS = 8


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["pathways", "router"])
def test_replayed_steps_are_the_steps(name: str, optim: str) -> None:
    """Losses of eight steps, of which five are replayed, each on another batch and after an update."""
    options = StageConfig(
        paths=("E", "GE", "GH", "router") if name == "pathways" else None, distillation=0.0, optim=optim
    )
    found = []
    for cuda_graphs in (False, True):
        model = attached(backbone().to("cuda"))
        learner = Learner.make(model, make_stage(name, options), options, World(), cuda_graphs)
        with learner.learning(), causal_attention(model, cuda_graphs):
            found.append([learner.step([rows().batch(2 * k, 2)], k, STEPS, None) for k in range(STEPS)])
        assert learner.replay is None or len(learner.replay.captured) == 1
    plain, replayed = (torch.tensor(values) for values in found)
    assert (plain - replayed).abs().max() < tolerance(torch.float32, 10.0)
