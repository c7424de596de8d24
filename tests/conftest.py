"""Two workers share two cores: one thread each, and no network for anyone."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
