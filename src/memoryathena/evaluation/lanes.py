"""All pathways of a grid side by side: one pass per sequence answers for every one of them.

The harness asks under one pathway at a time. The first time, all are answered, as lanes of the same pass, and kept in
a book; the other times the book answers. What a single pathway (`AthenaLM`) says and what a lane says agree to the
rounding of a larger batch.

Shapes: B rows, T positions, P positions whose next token is asked for, N answers, d width, V vocabulary.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from memoryathena.backbone.decoding import decode_greedily
from memoryathena.backbone.model import AthenaModel
from memoryathena.backbone.scoring import Head, final_hidden, observed, output_head
from memoryathena.errors import AthenaError
from memoryathena.evaluation.book import Answers, Book, key_of
from memoryathena.evaluation.lm import AthenaLM, TokenRequest
from memoryathena.evaluation.routing import Watch
from memoryathena.memory.policies import Fixed

CUT_PROMPT = "prompt cut to the context"
FULL_ANSWER = "answer reached the limit"
GREEDY = {"do_sample": False, "temperature": 0.0, "num_beams": 1, "use_cache": True}
SAMPLING = {"top_p", "top_k", "min_p", "typical_p"}  # says nothing without sampling

T = TypeVar("T")
Advance = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclasses.dataclass
class Asked:
    """One input and the continuations that are asked of it: (place of the first one's input, tokens)."""

    ids: tuple[int, ...]
    cut: bool = False
    wanted: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    askers: list[int] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> str:
        """In the book."""
        return key_of("tokens", self.ids, self.wanted)


class LanesLM(AthenaLM):
    """`use` is the pathway that answers are given under; the book has them all."""

    def __init__(
        self,
        model: AthenaModel,
        uses: tuple[str, ...],
        book: Book,
        traced: bool = False,
        advance: Advance | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        self.uses, self.book, self.now = uses, book, uses[0]
        self.watched = frozenset(use for use in uses if traced and not _forced(model, use))
        self.advance = advance or (lambda what, done, total: None)
        self.asked: dict[str, list[str]] = defaultdict(list)

    def keys(self, arguments: tuple[Any, ...]) -> list[str]:
        """Where the book has the sequences of a request."""
        return self.asked[key_of(*arguments)]

    # -- log-probabilities ----------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As `hf` does it, with the grid's progress in place of a bar per pathway."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[TokenRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        sequences = grouped(requests, self.max_length)
        for sequence in sequences:
            for asker in sequence.askers:
                self._remember(requests[asker][0], sequence.key)
        self._answer(sequences)
        out: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for sequence in sequences:
            scores = self.book.answers[sequence.key][self.now]["scores"]
            for asker, (log_p, greedy) in zip(sequence.askers, scores, strict=True):
                out[asker] = (log_p, greedy)
        return out

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """As `hf` does it, with the windows of all texts at once and each knowing its text."""
        flat: list[TokenRequest] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            before = len(flat)
            flat += [(request.args, *make_disjoint_window(window)) for window in windows]
            counts.append(len(flat) - before)
        answers = iter(self._loglikelihood_tokens(flat))
        return [sum(next(answers)[0] for _ in range(count)) for count in counts]

    def _answer(self, sequences: list[Asked]) -> None:
        """Whatever the book does not have, longest first."""
        sequences = sorted(sequences, key=lambda one: (-len(one.ids), one.ids))
        todo = self._batches(sequences, [one.key for one in sequences])
        total, done = sum(len(batch) for _, batch in todo), 0
        for uses, batch in todo:
            watch = Watch(self.watched & set(uses))
            scores = self._scores(uses, batch, watch)
            self.book.write(
                [
                    (one.key, {use: _entry(scores[use][row], one.cut) for use in uses}, watch.packed(row))
                    for row, one in enumerate(batch)
                ]
            )
            done += len(batch)
            self.advance("scoring", done, total)

    @torch.no_grad()
    def _scores(self, uses: tuple[str, ...], batch: Sequence[Asked], watch: Watch) -> dict[str, list[Any]]:
        """[log p, whether greedy] of every continuation, by use and row. Right-padded, no mask, as `hf` does it."""
        model: AthenaModel = self.model
        width, device = max(len(one.ids) for one in batch), model.input_device
        ids_BT = torch.tensor([one.ids + (0,) * (width - len(one.ids)) for one in batch], device=device)
        valid_BT = torch.tensor([[place < len(one.ids) for place in range(width)] for one in batch])
        watch.announce([[(use, row) for row in range(len(batch))] for use in uses], valid_BT)
        with observed(model, watch.observe):
            hidden = final_hidden(model, {use: model.policy(use) for use in uses}, input_ids=ids_BT)
        asked = [
            (row * width + start + step, token)
            for row, one in enumerate(batch)
            for start, tokens in one.wanted
            for step, token in enumerate(tokens)
        ]
        head, out = output_head(model.host), {}
        for use, states_BTd in hidden.items():
            found = iter(token_answers(states_BTd.flatten(0, 1), asked, head))
            out[use] = [[_sum([next(found) for _ in tokens]) for _, tokens in one.wanted] for one in batch]
        return out

    # -- generation -----------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy decoding of all pathways side by side; other ways of decoding are the single pathway's."""
        groups: dict[str, list[str]] = defaultdict(list)
        for request in requests:
            context, options = request.args
            self._remember(request.args, key_of("generate", context, options))
            groups[json.dumps(options, sort_keys=True)].append(context)
        for options, contexts in groups.items():
            self._generate(list(dict.fromkeys(contexts)), json.loads(options))
        return [self.book.answers[key_of("generate", *request.args)][self.now]["text"] for request in requests]

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> None:
        plan = normalize_gen_kwargs(options, self.max_gen_toks)
        limit, until = plan.pop("max_gen_toks"), plan.pop("until", None)
        known = {name: value for name, value in GREEDY.items() if plan.get(name, value) == value}
        if beside := {name: value for name, value in plan.items() if name not in known.keys() | SAMPLING}:
            raise AthenaError(f"a grid decodes greedily; {beside} needs a pathway of its own: lm_eval with use=…")
        stops = handle_stop_sequences(until, eos=self.tok_decode(self.eot_token_id, skip_special_tokens=False))
        contexts = sorted(contexts, key=lambda context: (-len(self.tok_encode(context)), context))
        todo = self._batches(contexts, [key_of("generate", context, options) for context in contexts])
        total, done = sum(len(batch) for _, batch in todo), 0
        for uses, batch in todo:
            watch = Watch(self.watched & set(uses))
            answers = self._written(uses, batch, limit, stops, watch)
            keys = [key_of("generate", context, options) for context in batch]
            self.book.write([(key, answers[row], watch.packed(row)) for row, key in enumerate(keys)])
            done += len(batch)
            self.advance("generating", done, total)

    def _written(
        self, uses: tuple[str, ...], batch: Sequence[str], limit: int, stops: list[str], watch: Watch
    ) -> list[Answers]:
        """By row and use: the text up to a stop, its tokens, and what is to be noted."""
        model: AthenaModel = self.model
        room = self.max_length - limit
        if room < 1:
            raise AthenaError(f"a context of {self.max_length} tokens has no room for {limit} new ones and a prompt")
        ids_BT, mask_BT = self.tok_batch_encode(list(batch), left_truncate_len=room, truncation=self.truncation)
        ids_BT, mask_BT = ids_BT.to(model.input_device), mask_BT.to(model.input_device)
        ends = {self.eot_token_id, *_listed(model.generation_config.eos_token_id)}
        tail = 2 + max(len(self.tokenizer.encode(stop, add_special_tokens=False)) for stop in stops)

        def finished(tokens: Sequence[int]) -> bool:
            if tokens[-1] in ends:
                return True
            text = self.tok_decode(list(tokens[-tail:]), skip_special_tokens=False)
            return any(stop in text for stop in stops)

        policies = {use: model.policy(use) for use in uses}
        with observed(model, watch.observe):
            found = decode_greedily(model, policies, ids_BT, mask_BT, limit, finished, watch.announce)
        rows: list[Answers] = [{} for _ in batch]
        for use, written in found.items():
            for row, tokens in enumerate(written):
                text = postprocess_generated_text(self.tok_decode(tokens), stops, None)
                cut = len(self.tok_encode(batch[row])) > room
                flags = [CUT_PROMPT] * cut + [FULL_ANSWER] * (not finished(tokens))
                rows[row][use] = {"text": text, "tokens": tokens} | ({"flags": flags} if flags else {})
        return rows

    # -- inside ---------------------------------------------------------------------------------------------------

    def _batches(self, members: Sequence[T], keys: Sequence[str]) -> list[tuple[tuple[str, ...], Sequence[T]]]:
        """Batches of which the book lacks something, each with the pathways that it lacks.

        Where a batch begins does not depend on the book: an interrupted grid goes on to the same last digit.
        """
        size = self.batch_size
        if not isinstance(size, int):
            raise AthenaError(f"a grid needs a number as batch size, got {size!r}")
        out = []
        for first in range(0, len(members), size):
            lacking = [self.book.missing(key, self.uses, self.watched) for key in keys[first : first + size]]
            if uses := tuple(use for use in self.uses if any(use in one for one in lacking)):
                out.append((uses, members[first : first + size]))
        return out

    def _remember(self, arguments: Any, key: str) -> None:
        if key not in (known := self.asked[key_of(*arguments)]):
            known.append(key)


def _forced(model: AthenaModel, use: str) -> bool:
    """Whether there is no routing to see."""
    policy = model.policy(use)
    return policy is None or isinstance(policy, Fixed)


def _listed(tokens: int | list[int] | None) -> list[int]:
    """A model's ends of sequence: instruct models have one of a turn beside that of a text."""
    return tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]


def _entry(scores: list[Any], cut: bool) -> dict[str, Any]:
    return {"scores": scores} | ({"flags": [CUT_PROMPT]} if cut else {})


def _sum(found: Sequence[tuple[float, bool]]) -> list[Any]:
    return [sum(log_p for log_p, _ in found), all(greedy for _, greedy in found)]


def grouped(requests: Sequence[TokenRequest], limit: int) -> list[Asked]:
    """One sequence per distinct input; an input is without its last token, as nothing is predicted from it."""
    out: dict[tuple[int, ...], Asked] = {}
    for number, (text, context, continuation) in enumerate(requests):
        if not context or not 0 < len(continuation) <= limit:
            raise AthenaError(
                f"an answer has 1 to {limit} tokens after some context, got {len(continuation)} after {len(context)}: "
                f"{str(text[-1])[:60]!r}"
            )
        whole = (*context, *continuation)
        ids = whole[-(limit + 1) :][:-1]
        sequence = out.setdefault(ids, Asked(ids))
        sequence.cut |= len(whole) > limit + 1
        sequence.wanted.append((len(ids) - len(continuation), tuple(continuation)))
        sequence.askers.append(number)
    return list(out.values())


def token_answers(
    states_Sd: Tensor, asked: Sequence[tuple[int, int]], head: Head, chunk: int = 256
) -> list[tuple[float, bool]]:
    """log p and greediness of (state, token) pairs; each state's logits are made once, `chunk` states at a time."""
    places = sorted({place for place, _ in asked})
    at = {place: index for index, place in enumerate(places)}
    by_chunk: Mapping[int, list[int]] = defaultdict(list)
    for number, (place, _) in enumerate(asked):
        by_chunk[at[place] // chunk].append(number)
    out: list[tuple[float, bool]] = [(0.0, False)] * len(asked)
    for part, numbers in by_chunk.items():
        index_P = torch.tensor(places[part * chunk : (part + 1) * chunk], device=states_Sd.device)
        log_p_PV = head(states_Sd[index_P]).float().log_softmax(-1)
        best_P = log_p_PV.argmax(-1)
        row_N = torch.tensor([at[asked[n][0]] - part * chunk for n in numbers], device=log_p_PV.device)
        token_N = torch.tensor([asked[n][1] for n in numbers], device=log_p_PV.device)
        scores, greedy = log_p_PV[row_N, token_N].tolist(), (best_P[row_N] == token_N).tolist()
        for number, score, is_best in zip(numbers, scores, greedy, strict=True):
            out[number] = (score, is_best)
    return out
