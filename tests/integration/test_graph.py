"""Decoding as one recorded step: the very tokens of ordinary decoding, on the same buffers, without asking the device.

A CUDA graph repeats kernels on addresses. `Tape` does the same on a CPU: it records the tensor operations of one step
and runs them again, results into the tensors of the first time; no Python of ours runs at a replay.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memoryathena import AthenaError, AthenaModel
from memoryathena.backbone.decoder import Decoder, greedy_call
from tests.models import athena, sample_ids

NEW = 12
LENGTHS = (11, 4, 15)
MAIN = ("off", "E", "GE", "GH", "router")
SYNCS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2")


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in SYNCS, f"{name} asks the device"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tape(warm_up: Callable[[], None], step: Callable[[], None]) -> Tape:
    warm_up()
    recorded = Tape()
    # As while a CUDA graph is captured: transformers then makes masks that it otherwise finds needless.
    with mock.patch("transformers.utils.import_utils.is_cuda_stream_capturing", return_value=True), recorded:
        step()
    return recorded


def prompts() -> tuple[Tensor, Tensor]:
    ids, width = sample_ids(), max(LENGTHS)
    rows = [torch.cat([torch.zeros(width - n, dtype=torch.long), ids[i : i + n]]) for i, n in enumerate(LENGTHS)]
    return torch.stack(rows), torch.tensor([[0] * (width - n) + [1] * n for n in LENGTHS])


def ordinary(model: AthenaModel, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    with torch.no_grad():
        return model.backbone.generate(ids, attention_mask=mask, **options)


@pytest.mark.parametrize("sites", [(1, 3), (2,)], ids=["two-sites", "one-site"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen3"])
def test_a_replayed_step_writes_what_ordinary_decoding_writes(name: str, sites: tuple[int, ...]) -> None:
    model = athena(name, sites, memory={"canonical": "word" if len(sites) == 2 else "token"})
    decode = Decoder(model, capture=tape, fuse=False)
    ids, mask = prompts()
    for use in MAIN:
        with model.use(use):
            expected = ordinary(model, ids, mask, eos_token_id=2)
            assert torch.equal(decode(ids, mask, max_new_tokens=NEW, ends=(2,)), expected), use
            # Other prompts through the same recording, and a batch of another size through one of its own.
            again = decode(ids.flip(0), mask.flip(0), max_new_tokens=NEW, ends=(2,))
            assert torch.equal(again, ordinary(model, ids.flip(0), mask.flip(0), eos_token_id=2)), use
            # A length that comes again without padding: read as it is, then recorded, then replayed with other tokens.
            for ids_1T in (ids[-1:], ids[-1:].flip(1), ids[-1:].roll(3, 1)):
                expected = ordinary(model, ids_1T, torch.ones_like(ids_1T), min_new_tokens=NEW)
                assert torch.equal(decode(ids_1T, max_new_tokens=NEW), expected), use
            one = ids[-1:, -1:]
            assert torch.equal(
                decode(one, max_new_tokens=NEW), ordinary(model, one, torch.ones_like(one), min_new_tokens=NEW)
            ), use
    assert len(decode.steps) <= decode.keep


@pytest.mark.parametrize("use", ["hard", "soft", "subset-hard", "E+GH", "random"])
def test_every_rule_can_be_recorded(use: str) -> None:
    model = athena()
    ids, mask = prompts()
    with model.use(use):
        found = Decoder(model, tape, fuse=False)(ids, mask, max_new_tokens=NEW, ends=(2,))
        assert torch.equal(found, ordinary(model, ids, mask, eos_token_id=2))


def test_a_step_uses_its_buffers_again() -> None:
    model = athena()
    decode = Decoder(model, None, fuse=False)
    ids, mask = prompts()
    decode(ids, mask, max_new_tokens=4)
    (step,) = decode.steps.values()
    tensors = [step.token_B1, step.bias_B11L, step.logits_BV, *step.held, *(layer.keys for layer in step.cache.layers)]
    places = [x.data_ptr() for x in tensors if x is not None]
    decode(ids.flip(0), mask.flip(0), max_new_tokens=9)
    assert list(decode.steps.values()) == [step]
    tensors = [step.token_B1, step.bias_B11L, step.logits_BV, *step.held, *(layer.keys for layer in step.cache.layers)]
    assert places == [x.data_ptr() for x in tensors if x is not None]


def test_weights_that_move_make_a_new_step() -> None:
    model = athena()
    decode = Decoder(model, tape, fuse=False)
    ids, mask = prompts()
    decode(ids, mask, max_new_tokens=NEW)
    with torch.no_grad():
        for parameter in model.memory.sites.parameters():
            parameter.mul_(-1.5)
    assert torch.equal(decode(ids, mask, max_new_tokens=NEW), ordinary(model, ids, mask, min_new_tokens=NEW))


@pytest.mark.parametrize("part", ["backbone", "table"])
def test_a_model_that_moves_makes_a_new_step(part: str) -> None:
    """A graph would go on reading where its weights were."""
    model = athena()
    decode = Decoder(model, capture=tape, fuse=False)
    ids, mask = prompts()
    with model.use("E"):
        decode(ids, mask, max_new_tokens=4)
        (before,) = decode.steps.values()
        moved = model.memory.table if part == "table" else model.backbone
        for parameter in moved.parameters():
            parameter.data = parameter.data.clone()
        decode(ids, mask, max_new_tokens=4)
    assert before not in decode.steps.values()


def test_what_cannot_be_recorded_is_said_in_one_line() -> None:
    with pytest.raises(AthenaError, match="mistral has layers without a whole past"):
        Decoder(athena("mistral"), None, fuse=False)(sample_ids()[None], max_new_tokens=2)
    model = athena()
    ids, mask = prompts()
    with pytest.raises(AthenaError, match="padded on the left"):
        Decoder(model, None, fuse=False)(ids.flip(1), mask.flip(1), max_new_tokens=2)
    with pytest.raises(AthenaError, match="was built for at most 128"):
        Decoder(model, None, fuse=False)(ids, mask, max_new_tokens=200)


def test_the_fused_memory_is_the_plain_one() -> None:
    """As torch.compile makes it: one graph, nothing left to Python."""
    model = athena()
    ids, mask = prompts()
    for use in ("E", "router"):
        with model.use(use):
            fused = Decoder(model, None, fuse=True)(ids, mask, max_new_tokens=NEW, ends=(2,))
            assert torch.equal(fused, ordinary(model, ids, mask, eos_token_id=2))


def test_generate_with_a_static_cache_is_a_recorded_step_where_it_is_plain_greedy() -> None:
    model = athena()
    ids, mask = prompts()
    expected = ordinary(model, ids, mask, eos_token_id=2)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    decode = model.compile_decode(fuse=False)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)
    assert len(decode.steps) == 1
    # Anything more is transformers' own, with a static cache of its own.
    for more in ({"do_sample": True, "top_k": 1}, {"num_beams": 2}, {"repetition_penalty": 1.3}, {"min_new_tokens": 3}):
        assert greedy_call(model, (ids,), {"cache_implementation": "static", **options, **more}) is None
        model.generate(ids, cache_implementation="static", **{**options, **more})
    assert greedy_call(model, (ids,), options) is None
    assert greedy_call(model, (ids.flip(1),), {**options, "attention_mask": mask.flip(1)}) is None
    mistral = athena("mistral")
    assert greedy_call(mistral, (ids,), {"cache_implementation": "static", **options}) is None
    with pytest.raises(AthenaError, match="without a whole past"):
        mistral.compile_decode()
