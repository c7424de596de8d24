"""Captured CUDA graphs of the whole step write what ordinary decoding writes, also with the memory fused."""

import pytest
import torch
from torch import Tensor

from memoryathena import AthenaModel
from memoryathena.backbone.decoder import Decoder
from memoryathena.backbone.graph import cuda_graph
from tests.models import athena, sample_ids

pytestmark = pytest.mark.gpu
NEW = 12
MAIN = ("off", "E", "GE", "GH", "router")
LENGTHS = (11, 4, 15)


def prompts() -> tuple[Tensor, Tensor]:
    ids, width = sample_ids(), max(LENGTHS)
    rows = [torch.cat([torch.zeros(width - n, dtype=torch.long), ids[i : i + n]]) for i, n in enumerate(LENGTHS)]
    return torch.stack(rows).cuda(), torch.tensor([[0] * (width - n) + [1] * n for n in LENGTHS]).cuda()


def on_device(name: str, sites: tuple[int, ...]) -> AthenaModel:
    model = athena(name, sites, memory={"canonical": "word" if len(sites) == 2 else "token"})
    model.backbone.cuda()
    model.memory.cuda()
    model.addressing.cuda()
    return model


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("sites", [(1, 3), (2,)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_a_captured_step_writes_what_ordinary_decoding_writes(name: str, sites: tuple[int, ...], fuse: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, (ids, mask) = on_device(name, sites), prompts()
    decode = Decoder(model, cuda_graph, fuse)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for use in MAIN:
        with model.use(use):
            for a, b in ((ids, mask), (ids.flip(0), mask.flip(0)), *((ids[-1:].roll(n, 1), None) for n in range(3))):
                given = torch.ones_like(a) if b is None else b
                expected = model.backbone.generate(a, attention_mask=given, **options)
                assert torch.equal(decode(a, b, max_new_tokens=NEW), expected), use
