"""Captured CUDA graphs against ordinary decoding; without pytest, as the machine with the GPU may have none."""

import torch

from memoryathena.backbone.decoder import Decoder
from memoryathena.backbone.graph import cuda_graph
from tests.models import athena, sample_ids

NEW = 12
MAIN = ("off", "E", "GE", "GH", "router")
LENGTHS = (11, 4, 15)


@torch.no_grad()
def check_captured(name: str, sites: tuple[int, ...], fuse: bool) -> None:
    """Batches with padding, the same length thrice, all main pathways: the very tokens."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = athena(name, sites, memory={"canonical": "word" if len(sites) == 2 else "token"})
    for part in (model.backbone, model.memory, model.addressing):
        part.cuda()
    text, width = sample_ids(), max(LENGTHS)
    rows = [torch.cat([torch.zeros(width - n, dtype=torch.long), text[i : i + n]]) for i, n in enumerate(LENGTHS)]
    ids, mask = torch.stack(rows).cuda(), torch.tensor([[0] * (width - n) + [1] * n for n in LENGTHS]).cuda()
    decode = Decoder(model, cuda_graph, fuse)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for use in MAIN:
        with model.use(use):
            for a, b in ((ids, mask), (ids.flip(0), mask.flip(0)), *((ids[-1:].roll(n, 1), None) for n in range(3))):
                given = torch.ones_like(a) if b is None else b
                expected = model.backbone.generate(a, attention_mask=given, **options)
                found = decode(a, b, max_new_tokens=NEW)
                assert torch.equal(found, expected), (use, found.tolist(), expected.tolist())
