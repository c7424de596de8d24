"""Stages on a tiny backbone: they learn, they train what they say, they resume bit for bit."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from memoryathena import AthenaError, AthenaModel, get_athena_model
from memoryathena.memory.policies import Fixed
from memoryathena.training.config import STAGES, TrainingConfig
from memoryathena.training.data import Rows, TokenArray, Windows
from memoryathena.training.loop import evaluate, train_stage
from memoryathena.training.passes import run
from memoryathena.training.stages import make_stage
from tests.models import athena, backbone, byte_level_tokenizer, config, excite, stdlib_texts

LENGTH = 24


def tokens(count: int) -> np.ndarray:
    text = next(iter(stdlib_texts(1)))
    return np.array(byte_level_tokenizer()(text).input_ids[:count], dtype=np.uint16)


def options(**stage: Any) -> TrainingConfig:
    base = {"max_tokens": 8 * 2 * LENGTH, "learning_rate": 3e-3, "table_learning_rate": 0.3, **stage}
    return TrainingConfig(max_length=LENGTH, memory=base, pathways=base, router=base)


def rows(seed: int = 0, skip: int = 0) -> Rows:
    return Rows(TokenArray(tokens((40 + skip) * LENGTH)[skip * LENGTH :]), LENGTH, seed)


def fresh() -> AthenaModel:
    model = get_athena_model(backbone(), config(), byte_level_tokenizer())
    excite(model)
    return model


def state(model: AthenaModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.memory.named_parameters()}


@pytest.mark.parametrize("name", STAGES)
def test_law_6_only_what_a_stage_trains_changes(name: str) -> None:
    model = fresh()
    before, bare = state(model), {k: v.clone() for k, v in model.backbone.state_dict().items()}
    flags = [p.requires_grad for p in model.memory.parameters()]
    trained = set(make_stage(name, options().stage(name)).trained(model))
    train_stage(model, name, options(), rows())
    changed = {key for key, value in state(model).items() if not torch.equal(value, before[key])}
    assert changed <= trained
    assert all(torch.equal(value, bare[key]) for key, value in model.backbone.state_dict().items())
    assert model.stage == name
    assert [p.requires_grad for p in model.memory.parameters()] == flags
    assert not model.memory.table.sparse
    expected = {
        "memory": {"table.weight", "sites.1.direct.value.weight"},
        "pathways": {"sites.1.direct.value.weight", "sites.3.generated.adapter_up", "sites.1.generator.queries"},
        "router": {"sites.1.advantage.down.weight", "sites.3.ordinary.down.weight"},
    }[name]
    assert expected <= changed


def test_rows_that_no_text_reads_keep_their_bytes() -> None:
    model = fresh()
    before = state(model)["table.weight"]
    train_stage(model, "memory", options(max_tokens=2 * LENGTH), rows())
    changed = (model.memory.table.weight != before).any(1).sum().item()
    assert 0 < changed <= 2 * LENGTH * 8


def test_every_stage_learns() -> None:
    """On its own text: memory below off, pathways below their beginning; the router, on text that the table does not
    know (on known text it rightly admits nothing), below E."""
    model = get_athena_model(backbone(), config(), byte_level_tokenizer())
    many = options(max_tokens=60 * 2 * LENGTH)
    off = evaluate(model, ("off",), rows(), 10**6)["off"]
    train_stage(model, "memory", many, rows())
    e = evaluate(model, ("E",), rows(), 10**6)["E"]
    assert e < off - 0.5
    before = evaluate(model, ("GE", "GH"), rows(), 10**6)
    train_stage(model, "pathways", many, rows())
    after = evaluate(model, ("E", "GE", "GH"), rows(), 10**6)
    assert all(after[use] < before[use] - 0.1 for use in ("GE", "GH"))
    unseen = rows(skip=40)
    train_stage(model, "router", many, unseen)
    found = evaluate(model, ("E", "router", "soft"), unseen, 10**6)
    assert found["router"] < found["E"]
    assert found["soft"] < found["E"]


@dataclasses.dataclass
class Documents:
    """Another source cut into documents, differently in every row."""

    source: Windows

    def windows(self, length: int) -> int:
        return self.source.windows(length)

    def window(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        ids, document = self.source.window(index, length)
        document[5 + index % 7 :: 6] = 1
        return ids, document


def test_accumulation_gives_the_gradient_of_the_big_batch() -> None:
    """Also when the parts have different numbers of targets (documents end inside)."""
    results = []
    for size, parts in ((4, 1), (2, 2), (1, 4)):
        model = fresh()
        opt = options(
            max_tokens=4 * LENGTH,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            max_grad_norm=1e9,
        )
        history = train_stage(model, "pathways", opt, Rows(Documents(rows().source), LENGTH, 0))["history"]
        results.append((history[0]["loss"], state(model)))
    for loss, parameters in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        for key, value in parameters.items():
            torch.testing.assert_close(value, results[0][1][key], rtol=1e-3, atol=1e-4)


def test_a_loss_that_is_not_a_number_stops_with_one_line() -> None:
    model = fresh()
    with torch.no_grad():
        model.memory.table.weight.fill_(float("nan"))
    with pytest.raises(AthenaError, match="stage memory: the loss is nan at step 0; lower the learning rate"):
        train_stage(model, "memory", options(), rows())
    with pytest.raises(AthenaError, match="max_tokens 10 is less than one step of 2 x 24 tokens"):
        train_stage(model, "memory", options(max_tokens=10), rows())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "opt", "gpt_neox", "phi"])
def test_one_batched_pass_is_three_separate_passes(name: str) -> None:
    """Values and gradients of the three endpoints, through the chunked head of every kind of backbone."""
    model = athena(name)
    batch = rows().batch(0, 2)
    parameters = [p for key, p in model.memory.named_parameters() if "advantage" not in key]
    together, _ = run(model, {use: Fixed(use) for use in ("E", "GE", "GH")}, batch)
    ours = torch.autograd.grad(sum(x.sum() for x in together.values()), parameters, allow_unused=True)
    total = torch.zeros(())
    for use, found in together.items():
        with model.use(use):
            logits = model(input_ids=batch.ids_BT, document_ids=batch.document_BT, use_cache=False).logits
        plain = logits[:, :-1].log_softmax(-1).gather(-1, batch.targets_BT[..., None])[..., 0]
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
        total = total + plain.sum()
    theirs = torch.autograd.grad(total, parameters, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()) + 1e-6)
