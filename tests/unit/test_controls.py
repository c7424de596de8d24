"""Controls of section 9 do what their names say."""

import torch

from memoryathena import get_athena_model
from memoryathena.config import MemoryConfig
from memoryathena.memory.controls import permuted_rows, random_rows
from tests.models import athena, backbone, byte_level_tokenizer, config, sample_ids

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
