"""Recipes: those that are shipped can be read; what a recipe says reaches text and optimisers."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from memoryathena import AthenaError
from memoryathena.corpus.config import CorpusFile
from memoryathena.training.config import StageConfig, TrainingConfig
from memoryathena.training.distributed import World
from memoryathena.training.learner import Learner
from memoryathena.training.optim import RowAdam
from memoryathena.training.recipe import Recipe, read_recipe
from memoryathena.training.stages import make_stage
from memoryathena.training.state import collect, restore
from memoryathena.training.texts import open_tokens
from tests.training import fresh, rows

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_shipped_recipe_is_valid(file: Path) -> None:
    if file.name.endswith(".corpus.yaml"):
        assert CorpusFile.build(yaml.safe_load(file.read_text()), str(file)).tokenizer
        return
    recipe = read_recipe(file)
    assert recipe.stages == ("memory", "pathways", "router")
    for command in (line for line in file.read_text().splitlines() if line.startswith("#   athena")):
        named = command.split("--config ")[1].split()[0]
        assert (ROOT / named).is_file(), named


@pytest.mark.parametrize("name", ["paper-nlp", "paper-qa", "paper-code"])
def test_the_published_rates(name: str) -> None:
    """As protocol.md prints them."""
    training = read_recipe(ROOT / "recipes" / f"{name}.yaml").training
    assert len(training.pathways.paths or ()) == (8 if name == "paper-qa" else 3)
    auxiliary = (training.pathways.subset_distillation, training.pathways.auxiliary_learning_rate)
    assert auxiliary == ((0.5, 1e-3) if name == "paper-qa" else (0.0, None))
    for stage in (training.memory, training.pathways):
        assert (stage.learning_rate, stage.warmup_steps, stage.weight_decay) == (3e-5, 1000, 0.01)
    assert (training.memory.table_learning_rate, training.memory.table_optim) == (3e-5, "adamw")
    assert (training.router.learning_rate, training.router.warmup_steps, training.router.distillation) == (3e-4, 200, 1)
    for stage in (training.memory, training.pathways, training.router):
        assert stage.steps(training.max_length * stage.per_device_train_batch_size) * training.max_length == 19_998_720
        assert stage.lr_scheduler_type == "cosine"


def test_a_range_of_a_token_file(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    np.arange(100, dtype="<u2").tofile(file)
    assert open_tokens(Path(f"{file}[10:30]"), 200).windows.window(1, 10)[0].tolist() == list(range(20, 30))
    assert open_tokens(Path(f"{file}[90:]"), 200).tokens == 10
    assert open_tokens(Path(f"{file}[:90]"), 200).tokens == 90
    with pytest.raises(AthenaError, match=r"a.bin has tokens 0 to 100, which do not hold \[90:101\]"):
        open_tokens(Path(f"{file}[90:101]"), 200)
    with pytest.raises(AthenaError, match="cannot read"):
        open_tokens(tmp_path / "b.bin", 200)


def test_readers_that_have_learned_may_learn_more_slowly() -> None:
    model, options = fresh(), StageConfig(learning_rate=3e-3, direct_learning_rate=1e-4)
    learner = Learner.make(model, make_stage("pathways", options), options, World())
    rate = {id(p): group["lr"] for group in learner.optimisers[0].param_groups for p in group["params"]}
    for name, parameter in learner.parameters.items():
        settled = name.split(".")[2] in ("direct", "norm")
        assert rate[id(parameter)] == (1e-4 if settled else 3e-3), name


def test_a_rate_that_nothing_reads_is_refused() -> None:
    with pytest.raises(AthenaError, match=r"memory\.direct_learning_rate: it is for stage pathways alone"):
        TrainingConfig.build({"memory": {"direct_learning_rate": 1e-3}})


def test_the_router_among_the_paths_trains_its_head() -> None:
    model = fresh()
    plain, joint = (make_stage("pathways", StageConfig(paths=paths)) for paths in (None, ("E", "router")))
    heads = {name for name in joint.trained(model) if ".advantage." in name}
    assert heads == set(joint.trained(model)) - set(plain.trained(model))
    assert len(heads) == 4 * len(model.memory.sites)


def test_a_whole_table_comes_back_from_a_checkpoint() -> None:
    options = StageConfig(table_optim="adamw")
    learners = []
    for _ in range(2):
        model = fresh()
        learners.append(Learner.make(model, make_stage("memory", options), options, World()))
    one, other = learners
    with one.learning():
        one.step([rows().batch(0, 2)], 0, 4, None)
    saved = collect(World(), one.parameters, one.rows, one.optimisers)
    restore(saved, "a checkpoint", World(), other.parameters, other.rows, other.optimisers)
    again = collect(World(), other.parameters, other.rows, other.optimisers)
    assert "state/table.weight/exp_avg_sq" in saved
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_a_table_may_learn_as_a_whole() -> None:
    """As published: AdamW with its decay reaches every row, read or not."""
    model, options = fresh(), StageConfig(table_optim="adamw", table_weight_decay=0.5, table_learning_rate=0.1)
    learner = Learner.make(model, make_stage("memory", options), options, World())
    assert not any(isinstance(optimiser, RowAdam) for optimiser in learner.optimisers)
    assert any(parameter is model.memory.table.weight for parameter in learner.readers)
    before = model.memory.table.weight.detach().clone()
    with learner.learning():
        assert not model.memory.table.sparse
        model.memory.table.weight.grad = torch.zeros_like(before)
        learner.optimisers[0].step()
    torch.testing.assert_close(model.memory.table.weight.detach(), before * 0.95)


def test_what_a_recipe_can_begin_with() -> None:
    base = {"backbone": "b", "tokens": {"valid": "v.bin"}}
    with pytest.raises(AthenaError, match="stage pathways needs something learned"):
        Recipe.build({**base, "stages": ["pathways"]})
    scratch = Recipe.build({**base, "stages": ["pathways"], "training": {"pathways": {"learn_table": True}}})
    assert scratch.stages == ("pathways",)
    assert Recipe.build({**base, "stages": ["pathways"], "model": {"control": "ffn"}}).model.control == "ffn"
    for values in ({"model": {"control": "permuted"}}, {"memory": "m", "model": {"control": "permuted"}}):
        with pytest.raises(AthenaError, match="control 'permuted' needs a learned table: give memory, without stage"):
            Recipe.build({**base, **values})
    with pytest.raises(AthenaError, match="control 'ffn' has nothing to route: leave stage router out"):
        Recipe.build({**base, "model": {"control": "ffn"}})
    with pytest.raises(AthenaError, match="unknown pathway 'best'"):
        Recipe.build({**base, "uses": ["off", "best"]})
