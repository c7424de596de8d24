"""Several pathways from one pass: greedy texts and log-probabilities are those of each pathway alone."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from memoryathena import AthenaModel
from memoryathena.backbone.decoding import Announce, decode_greedily
from memoryathena.backbone.scoring import final_hidden, output_head, token_scores
from memoryathena.memory.policies import USES
from tests.models import athena, sample_ids

LENGTHS = (11, 4, 19, 1)
NEW = 9
END = 2
MAIN = ("off", "E", "GE", "GH", "router")


def prompts() -> tuple[Tensor, Tensor]:
    """Of mixed length, left-padded."""
    ids, width = sample_ids(), max(LENGTHS)
    rows = [torch.cat([torch.zeros(width - n, dtype=torch.long), ids[i : i + n]]) for i, n in enumerate(LENGTHS)]
    ids_BT = torch.stack(rows)
    return ids_BT, torch.tensor([[0] * (width - n) + [1] * n for n in LENGTHS])


def generated(model: AthenaModel, use: str) -> list[list[int]]:
    """By transformers, up to and with the end of sequence."""
    ids_BT, mask_BT = prompts()
    with torch.no_grad(), model.use(use):
        out = model.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    rows = out[:, ids_BT.shape[1] :].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def together(
    model: AthenaModel, uses: Sequence[str], ends: Sequence[int] = (END,), announce: Announce | None = None
) -> dict[str, list[list[int]]]:
    policies = {use: model.policy(use) for use in uses}
    return decode_greedily(model, policies, *prompts(), NEW, lambda tokens: tokens[-1] in ends, announce)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral", "opt"])
def test_side_by_side_is_generate_under_each_pathway(name: str) -> None:
    model = athena(name)
    uses = tuple(USES) if name == "llama" else MAIN
    found = together(model, uses)
    assert model.in_use == "router"
    for use in uses:
        assert found[use] == generated(model, use), use
    assert len({str(texts) for texts in found.values()}) > len(uses) // 2  # the pathways do differ


@pytest.mark.parametrize("uses", [("off",), ("GH",), ("E", "off"), ("GE", "GH"), ("GH", "E"), ("router", "random")])
@pytest.mark.parametrize("sites", [(1, 3), (2,)])
def test_with_any_pathways_beside_it_a_pathway_writes_the_same(uses: tuple[str, ...], sites: tuple[int, ...]) -> None:
    """Texts, and, as a wrong cache may leave the best token alone, the logits that each was chosen from."""
    model = athena(sites=sites)
    owners: list[tuple[str, int]] = []
    chosen_from: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def announce(lanes: list[list[tuple[str, int]]], valid_BT: Tensor) -> None:
        owners[:] = [owner for lane in lanes for owner in lane]

    def collect(head: torch.nn.Module, args: tuple, logits_NTV: Tensor) -> None:
        for owner, logits_V in zip(owners, logits_NTV[:, -1], strict=True):
            chosen_from[owner].append(logits_V)

    handle = model.host.get_output_embeddings().register_forward_hook(collect)
    found = together(model, uses, announce=announce)
    handle.remove()
    assert found == {use: generated(model, use) for use in uses}
    ids = sample_ids()
    for use, texts in found.items():
        for row, (length, tokens) in enumerate(zip(LENGTHS, texts, strict=True)):
            whole = torch.cat([ids[row : row + length], torch.tensor(tokens[:-1], dtype=torch.long)])[None]
            with torch.no_grad(), model.use(use):
                expected_PV = model(whole, use_cache=False).logits[0, length - 1 :]
            logits_PV = torch.stack(chosen_from[use, row][: len(tokens)])
            torch.testing.assert_close(logits_PV, expected_PV, rtol=0, atol=2e-4)


def test_rows_that_are_done_leave_and_the_others_go_on() -> None:
    model = athena()
    free = together(model, MAIN, ())
    assert all(len(tokens) == NEW for texts in free.values() for tokens in texts)
    # Every fourth token that anyone writes ends a text: rows end at many different steps.
    ends = sorted({token for texts in free.values() for tokens in texts for token in tokens})[::4]

    def cut(tokens: list[int]) -> list[int]:
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)

    expected = {use: [cut(tokens) for tokens in texts] for use, texts in free.items()}
    assert len({len(tokens) for texts in expected.values() for tokens in texts}) > 3
    seen: Counter[tuple[str, int]] = Counter()
    sizes, idle = [], 0

    def announce(owners: list[list[tuple[str, int]]], valid_BT: Tensor) -> None:
        nonlocal idle
        sizes.append(sum(map(len, owners)))
        for lane in owners:
            counts = valid_BT.sum(1).tolist()
            seen.update(dict(zip(lane, counts, strict=True)))
            idle += counts.count(0)

    assert together(model, MAIN, ends, announce) == expected
    for use, texts in expected.items():  # every position is announced once as real; the last token is never read
        assert [seen[use, row] for row in range(4)] == [n + len(t) - 1 for n, t in zip(LENGTHS, texts, strict=True)]
    assert idle > 0  # some were done and had not left
    assert sizes[-1] < sizes[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_log_probabilities_from_the_final_states_are_those_of_the_logits(name: str) -> None:
    model, ids = athena(name), sample_ids()[None]
    hidden = final_hidden(model, {use: model.policy(use) for use in MAIN}, input_ids=ids)
    for use in MAIN:
        with torch.no_grad(), model.use(use):
            log_p_TV = model(ids).logits[0, :-1].log_softmax(-1)
        scores, greedy = token_scores(hidden[use][0, :-1], ids[0, 1:], output_head(model.host), chunk=5)
        torch.testing.assert_close(scores, log_p_TV.gather(-1, ids[0, 1:, None])[:, 0], rtol=0, atol=1e-4)
        assert torch.equal(greedy, log_p_TV.argmax(-1) == ids[0, 1:])
