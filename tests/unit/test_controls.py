"""Controls of section 9 do what their names say."""

from pathlib import Path

import pytest
import torch

from memoryathena import AthenaError, AthenaModel, get_athena_model
from memoryathena.config import MemoryConfig
from memoryathena.memory.controls import TABLES, permuted_rows, random_rows
from memoryathena.memory.system import sizes
from memoryathena.training.config import TrainingConfig
from memoryathena.training.loop import train_stage
from memoryathena.training.stages import make_stage
from tests.models import athena, backbone, byte_level_tokenizer, config, sample_ids
from tests.training import fresh, held_out, options, rows

IDS = sample_ids()[None]


def test_permuted_rows_move_within_their_head_by_seed() -> None:
    memory = MemoryConfig(rows=50, width=3)
    weight = torch.randn(8 * 50, 3)
    moved = permuted_rows(weight, memory, seed=1)
    assert torch.equal(moved, permuted_rows(weight, memory, seed=1))
    assert not torch.equal(moved, permuted_rows(weight, memory, seed=2))
    for head in range(8):
        ours, theirs = weight[head * 50 : head * 50 + 50], moved[head * 50 : head * 50 + 50]
        assert not torch.equal(ours, theirs)
        assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_random_rows_keep_mean_and_spread_only() -> None:
    weight = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0)) * 3 + 1  # as a table of seed 0 begins
    noise = random_rows(weight, seed=0)
    assert abs(noise.mean() - weight.mean()) < 0.1
    assert abs(noise.std() / weight.std() - 1) < 0.02
    assert abs(torch.corrcoef(torch.stack([noise.flatten(), weight.flatten()]))[0, 1]) < 0.02


def test_no_gate_means_all_gates_are_one() -> None:
    model = athena(control="no-gate")
    with torch.no_grad(), model.trace() as trace:
        model(IDS)
    assert (trace[1]["gates"] == 1).all()


def test_affine_stitch_is_one_affine_map_of_the_rows() -> None:
    model = athena(control="affine")
    seen = {}
    model.memory.site(1).direct.register_forward_hook(lambda m, args, out: seen.update(m=args[1], e=out[0]))
    with torch.no_grad(), model.use("E"):
        model(IDS)
    value = model.memory.site(1).direct.value
    torch.testing.assert_close(seen["e"], seen["m"] @ value.weight.T + value.bias)


def test_the_ffn_control_begins_as_the_bare_model_and_has_no_memory() -> None:
    bare = backbone()
    with torch.no_grad():
        logits = bare(IDS).logits
        model = get_athena_model(bare, config(control="ffn"), byte_level_tokenizer())
        for use in ("E", "router"):
            with model.use(use):
                assert torch.equal(model(IDS).logits, logits)
        model.memory.site(1).down.bias.add_(0.5)
        changed = model(IDS).logits
        model.memory.table.weight.zero_()
        assert not torch.equal(changed, logits)
        assert torch.equal(model(IDS).logits, changed)


def test_a_control_of_the_table_is_laid_over_a_learned_one_once(tmp_path: Path) -> None:
    model = athena()
    learned = model.memory.table.weight.detach().clone()
    model.save_memory(tmp_path / "memory")
    bare = model.detach()
    for control, change in TABLES.items():
        changed = get_athena_model(bare, config(control=control), byte_level_tokenizer(), memory=tmp_path / "memory")
        weight = changed.memory.table.weight.detach().clone()
        assert torch.equal(weight, change(learned, config().memory, 0))
        assert not torch.equal(weight, learned)
        changed.save_pretrained(tmp_path / control)
        changed.detach()
        again = AthenaModel.from_pretrained(tmp_path / control, backbone=bare, tokenizer=byte_level_tokenizer())
        assert torch.equal(again.memory.table.weight, weight)
        again.detach()
        with pytest.raises(AthenaError, match=f"control '{control}' changes a learned table: give memory"):
            get_athena_model(bare, config(control=control), byte_level_tokenizer())


def test_every_control_learns_and_says_its_size() -> None:
    for control in ("no-gate", "affine", "ffn"):
        model = athena(control=control)
        before = {name: value.detach().clone() for name, value in model.memory.named_parameters()}
        out = train_stage(model, "memory", options(), rows(), held_out())
        moved = {
            name.split(".")[2]
            for name, value in model.memory.named_parameters()
            if "sites" in name and not torch.equal(value, before[name])
        }
        assert out["steps"] == 8
        assert moved == ({"up", "down", "norm"} if control == "ffn" else {"direct"})  # nothing gates with the norm
        assert torch.equal(model.memory.table.weight, before["table.weight"]) == (control == "ffn")
    counted = {control: sizes(athena(control=control).config_athena) for control in ("none", "ffn", "affine")}
    sites = counted["none"]["memory_side"] - counted["none"]["table"]
    assert counted["ffn"]["table"] == 0
    assert 0 <= sites - counted["ffn"]["memory_side"] < 2 * (2 * 32 + 1)
    assert counted["affine"]["memory_side"] < counted["none"]["memory_side"]


def test_from_scratch_the_table_learns_with_its_readers() -> None:
    model = fresh()
    before = model.memory.table.weight.detach().clone()
    train_stage(model, "pathways", options(), rows(), held_out())
    assert torch.equal(model.memory.table.weight, before)
    both = TrainingConfig(max_length=24, pathways={"max_steps": 4, "learn_table": True})
    train_stage(model, "pathways", both, rows(), held_out())
    moved = (model.memory.table.weight != before).any(1)
    assert not make_stage("pathways", both.pathways).phase(0.0)  # its table's gradient is of other rows each step
    assert 0 < moved.float().mean() < 1
