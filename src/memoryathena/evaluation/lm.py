"""A model with a memory as a model of lm-evaluation-harness: `--model athena`.

Everything but the loading is the harness's own `hf` model, so every stock task works, right-padded without a mask and
left-padded with one, and `use=off` is `hf` to the bit. Three kinds of request are added for our tasks: the first
tokens of words, the mean log-probability of a continuation, and a text with its number of tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from memoryathena.backbone.load import load_model
from memoryathena.backbone.model import AthenaModel
from memoryathena.config import read_config
from memoryathena.errors import AthenaError
from memoryathena.evaluation.scoring import is_lone_space

# Enough of a context's end to know how the next word is cut into tokens: tokens do not reach over so many characters.
TAIL = 32

Tokens = list[int]
TokenRequest = tuple[Any, Tokens, Tokens]  # what was asked, context, continuation
FirstToken = tuple[int, float, bool]  # the first token with text, its log p, whether a lone space marker came before


@register_model("athena")
class AthenaLM(HFLM):
    """`--model_args pretrained=…,adapter=…,use=router`; the other arguments are those of `hf`."""

    def __init__(
        self,
        pretrained: str | AthenaModel,
        adapter: str | None = None,
        use: str | None = None,
        config: str | None = None,
        dtype: str = "auto",
        device: str | None = "cuda",
        **kwargs: Any,
    ) -> None:
        if isinstance(pretrained, str):
            settings = read_config(Path(config) if config else None)
            # The harness's command line says cuda:0 on every machine; one without it computes on the CPU, as `hf`.
            place = "cpu" if (device or "cuda").startswith("cuda") and not torch.cuda.is_available() else device
            pretrained = load_model(pretrained, Path(adapter) if adapter else None, settings, dtype, place)
        elif adapter or config:
            raise AthenaError("a loaded model has its memory already: give no adapter and no config beside it")
        if use is not None:
            pretrained.use(use)
        self._cut: dict[tuple[str, str], Tokens] = {}
        super().__init__(pretrained=pretrained, tokenizer=pretrained.tokenizer, backend="causal", **kwargs)

    def next_token(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[list[FirstToken]]:
        """For each (context, words): per word the first token that carries text, its log p, and whether a lone space
        marker had to be passed over (it then belongs to the context)."""
        plans = [self.first_tokens(*request.args) for request in requests]
        flat: list[TokenRequest] = [
            (request.args, context, [token])
            for request, plan in zip(requests, plans, strict=True)
            for context, token, _ in plan
        ]
        answers = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        return [[(token, next(answers)[0], marked) for _, token, marked in plan] for plan in plans]

    def first_tokens(self, context: str, words: Sequence[str]) -> list[tuple[Tokens, int, bool]]:
        """Per word: the tokens it is conditioned on, its first token with text, and whether markers came before."""
        given = self.tok_encode(context)
        out = []
        for word in words:
            key = (context[-TAIL:], word)
            if key not in self._cut:
                self._cut[key] = self._encode_pair(context[-TAIL:], " " + word)[1]
            tokens, skip = self._cut[key], 0
            pieces = self.tokenizer.convert_ids_to_tokens(tokens)
            while skip < len(pieces) and is_lone_space(pieces[skip]):
                skip += 1
            if skip == len(pieces):
                raise AthenaError(f"label word {word!r} has no token with text under this tokenizer: {pieces}")
            out.append((given + tokens[:skip], tokens[skip], skip > 0))
        return out

    def mean_loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """For each (context, continuation): log p of the continuation over its number of tokens."""
        sums = self.loglikelihood(list(requests), disable_tqdm=disable_tqdm)
        lengths = [len(self._encode_pair(*request.args)[1]) for request in requests]
        return [log_p / length for (log_p, _), length in zip(sums, lengths, strict=True)]

    def scored_text(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, int]]:
        """For each (text,): its log p and its number of tokens."""
        sums = self.loglikelihood_rolling(list(requests), disable_tqdm=disable_tqdm)
        return [(log_p, len(self.tok_encode(r.args[0]))) for log_p, r in zip(sums, requests, strict=True)]
