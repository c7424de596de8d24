"""Laws 1 to 4, checked on a live model: `athena check` on the user's, the integration tests on many small ones.

Each check returns findings; a check that cannot hold on a broken model is what the tests of this file break.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from memoryathena.backbone.model import AthenaModel
from memoryathena.memory.site import Site
from memoryathena.tolerances import tolerance

NEW_TOKENS = 6
ENDPOINTS = ("E", "GE", "GH", "router")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table: a law, the pathway, on what, and the largest difference seen against its bound."""

    law: int
    use: str
    what: str
    difference: float
    bound: float

    @property
    def passed(self) -> bool:
        """A difference that is not a number is above every bound."""
        return self.difference <= self.bound

    @property
    def detail(self) -> str:
        """The difference, and what was allowed where anything was."""
        if self.bound == 0:
            return "bit for bit" if self.passed else f"differs by {self.difference:.1e}"
        return (
            f"{self.difference:.1e} ≤ {self.bound:.1e}" if self.passed else f"{self.difference:.1e} > {self.bound:.1e}"
        )


def check_laws(model: AthenaModel, ids_T: Tensor, uses: tuple[str, ...] = ENDPOINTS) -> Iterator[Finding]:
    """Check laws 1 to 4 under every pathway in `uses`, on one token sequence of at least 12 tokens."""
    if model.config_athena.control == "ffn":
        uses = tuple(use for use in uses if use in ("E", "router"))
    ids_1T = ids_T.flatten()[None].to(model.input_device)
    noise: dict[str, float] = {}
    with torch.no_grad(), _calm(model), model.use(model.in_use):
        if _is_quantised(model):
            # Some quantised layers choose their precision per batch: then even the bare backbone obeys these laws
            # only so far, and no memory on it can do better.
            with model.use("off"):
                noise = {finding.what: finding.difference for finding in _laws_2_to_4(model, ids_1T)}
        for finding in law_1_off_and_rejection(model, ids_1T):
            yield _allowing(finding, max(noise.values(), default=0.0))
        for use in uses:
            with model.use(use):
                for finding in _laws_2_to_4(model, ids_1T):
                    yield _allowing(finding, noise.get(finding.what, 0.0))


def _laws_2_to_4(model: AthenaModel, ids_1T: Tensor) -> Iterator[Finding]:
    yield law_2_causal(model, ids_1T)
    yield from law_3_decoding(model, ids_1T)
    yield from law_4_batches(model, ids_1T)


def _allowing(finding: Finding, noise: float) -> Finding:
    """Up to three times the bare backbone's own difference, where a tolerance and not equality is asked."""
    return dataclasses.replace(finding, bound=max(finding.bound, 3 * noise)) if finding.bound > 0 else finding


def _is_quantised(model: AthenaModel) -> bool:
    return getattr(model.backbone, "hf_quantizer", None) is not None


def _tolerance(model: AthenaModel, scale: float) -> float:
    """By the precision that the blocks compute in: quantised layers round to bf16 whatever goes in and out."""
    return tolerance(torch.bfloat16 if _is_quantised(model) else model.dtype, scale)


@contextlib.contextmanager
def _calm(model: AthenaModel) -> Iterator[None]:
    """Greedy settings of our own, whatever the backbone's generation config says."""
    config = model.generation_config
    before = {name: getattr(config, name, None) for name in ("temperature", "top_p", "top_k", "do_sample")}
    config.update(temperature=None, top_p=None, top_k=None, do_sample=False)
    try:
        yield
    finally:
        config.update(**before)


def _finding(model: AthenaModel, law: int, what: str, a: Tensor, b: Tensor) -> Finding:
    """Equal to tolerance, and finite."""
    a, b = a.float(), b.float()
    difference = float((a - b).abs().max()) if a.shape == b.shape else float("inf")
    return Finding(law, model.in_use, what, difference, _tolerance(model, float(b.abs().max())))


def _bitwise(use: str, what: str, a: Tensor, b: Tensor) -> Finding:
    if torch.equal(a, b) and bool(a.isfinite().all()):
        return Finding(1, use, what, 0.0, 0.0)
    return Finding(1, use, what, float((a - b).abs().max()) or float("inf"), 0.0)


# -- law 1: off is bare, rejecting everything is E ------------------------------------------------------------------


def law_1_off_and_rejection(model: AthenaModel, ids_1T: Tensor) -> Iterator[Finding]:
    """Off is the bare backbone; tau = infinity is E, also with NaN in the candidates: bit for bit."""
    model._injection.detach()
    bare = model.backbone(ids_1T).logits
    model._injection.attach()
    with model.use("off"):
        yield _bitwise("off", "the bare backbone", model(ids_1T).logits, bare)
    with model.use("E"):
        e = model(ids_1T).logits
    before = model.config_athena.router
    with model.use("router"):
        try:
            model.set_router(tau=float("inf"))
            yield _bitwise("router", "E at tau = infinity", model(ids_1T).logits, e)
            with planted_nan(model):
                yield _bitwise("router", "the same with NaN in GE and GH", model(ids_1T).logits, e)
                model.set_router(tau=-1e9, rho=0.0)
                logits = model(ids_1T).logits
                yield _finding(model, 1, "NaN candidates are never admitted", logits, e)
        finally:
            model.set_router(**before.model_dump(include={"tau", "rho"}))


@contextlib.contextmanager
def planted_nan(model: AthenaModel) -> Iterator[None]:
    """Every generated value is NaN while the block runs."""
    weights = [site.generated.out.weight for site in model.memory.sites.values() if isinstance(site, Site)]
    saved = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                weight.fill_(float("nan"))
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, saved, strict=True):
                weight.copy_(old)


# -- law 2: causal --------------------------------------------------------------------------------------------------


def law_2_causal(model: AthenaModel, ids_1T: Tensor) -> Finding:
    """Changing one later token changes nothing before it, in logits or in anything traced."""
    ids_1T = ids_1T[:, :12]
    whole = _observed(model, ids_1T)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    worst = 0.0
    for t in range(1, ids_1T.shape[1]):
        changed = ids_1T.clone()
        changed[0, t] = (changed[0, t] + vocabulary // 2 + t) % vocabulary
        for a, b in zip(_observed(model, changed), whole, strict=True):
            worst = max(worst, float((a[:, :t] - b[:, :t]).abs().nan_to_num().max()))
    return Finding(2, model.in_use, "causal", worst, _tolerance(model, 1.0))


def _observed(model: AthenaModel, ids_1T: Tensor) -> list[Tensor]:
    with model.trace() as trace:
        logits = model(ids_1T).logits.float().cpu()
    if model.in_use == "off":
        return [logits]
    fields = ("weights", "gates", "advantages", "confidences")
    return [logits, *(trace[site][field] for site in trace.sites for field in fields)]


# -- law 3: decoding is forward -------------------------------------------------------------------------------------


def law_3_decoding(model: AthenaModel, ids_1T: Tensor) -> Iterator[Finding]:
    """Every way of decoding gives the logits of one full forward."""
    prompt = ids_1T[:, :9]
    modes: dict[str, Callable[[], Any]] = {
        "greedy": lambda: _generate(model, prompt),
        "sampled": lambda: _generate(model, prompt, do_sample=True, top_k=0),
        "chunked prefill": lambda: _generate(model, prompt, prefill_chunk_size=4),
        "static cache": lambda: _generate(model, prompt, cache_implementation="static"),
        "continued from a cache": lambda: _continue(model, prompt),
        "no cache": lambda: _generate(model, prompt, use_cache=False),
    }
    for name, mode in modes.items():
        out = mode()
        full = _forward(model, out.sequences)[:, -len(out.logits) - 1 : -1]
        yield _finding(model, 3, f"{name} = forward", torch.stack(out.logits, dim=1), full)
    yield from _assisted(model, prompt)
    yield _beams(model, prompt)
    yield _mixed_lengths(model, ids_1T)


def _generate(model: AthenaModel, ids: Tensor, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    kwargs = {"attention_mask": torch.ones_like(ids), "min_new_tokens": NEW_TOKENS, **kwargs}
    options = {"max_new_tokens": NEW_TOKENS, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, **options, pad_token_id=0, **kwargs)


def _forward(model: AthenaModel, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def _continue(model: AthenaModel, prompt: Tensor) -> Any:
    """Prefill by hand in two calls, then hand the cache to generate."""
    cache = DynamicCache(config=model.config.get_text_config())
    model(input_ids=prompt[:, :5], past_key_values=cache, use_cache=True)
    model(input_ids=prompt[:, 5:7], past_key_values=cache, use_cache=True)
    return _generate(model, prompt, past_key_values=cache)


def _assisted(model: AthenaModel, prompt: Tensor) -> Iterator[Finding]:
    """Speculated tokens are accepted and rolled back: greedy's tokens (where no rounding decides) and logits."""
    repeated = torch.cat([prompt, prompt], dim=1)  # so that the lookup finds something to propose
    plain = _generate(model, repeated)
    out = _generate(model, repeated, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    full = _forward(model, out.sequences)[:, -len(out.logits) - 1 : -1]
    yield _finding(model, 3, "assisted = forward", torch.stack(out.logits, dim=1), full)
    same = torch.equal(plain.sequences, out.sequences)
    if model.dtype == torch.float32 and not _is_quantised(model):
        yield Finding(3, model.in_use, "assisted = greedy, by tokens", float(not same), 0.0)


def _beams(model: AthenaModel, prompt: Tensor) -> Finding:
    """The scores of four beams are the log-probabilities that a forward gives to their tokens."""
    out = _generate(model, prompt, num_beams=4, num_return_sequences=4, output_scores=True, length_penalty=0.0)
    full = _forward(model, out.sequences).float().log_softmax(-1)[:, prompt.shape[1] - 1 : -1]
    scores = full.gather(-1, out.sequences[:, prompt.shape[1] :, None])[..., 0].sum(-1)
    return _finding(model, 3, "4 beams score as forward", out.sequences_scores, scores)


def _mixed_lengths(model: AthenaModel, ids_1T: Tensor) -> Finding:
    """A left-padded batch generates with the logits of its members."""
    members = [ids_1T[0, :9], ids_1T[0, 3:8], ids_1T[0, 2:4]]
    ids, mask = padded(members, "left")
    out = _generate(model, ids, attention_mask=mask)
    singles = []
    for row, member in zip(out.sequences, members, strict=True):
        tokens = torch.cat([member, row[-NEW_TOKENS:]])[None]
        singles.append(_forward(model, tokens)[0, -NEW_TOKENS - 1 : -1])
    return _finding(model, 3, "left-padded batch = members", torch.stack(out.logits, dim=1), torch.stack(singles))


# -- law 4: a batch is its members ----------------------------------------------------------------------------------


def law_4_batches(model: AthenaModel, ids_1T: Tensor) -> Iterator[Finding]:
    """Padding on either side and packing change nothing."""
    members = [ids_1T[0, :11], ids_1T[0, 4:9], ids_1T[0, 1:2]]
    singles = [_forward(model, member[None])[0] for member in members]
    for side in ("right", "left"):
        ids, mask = padded(members, side)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = _forward(model, ids, attention_mask=mask, position_ids=positions)
        rows = torch.cat([row[own.bool()] for row, own in zip(logits, mask, strict=True)])
        yield _finding(model, 4, f"{side}-padded batch = members", rows, torch.cat(singles))
    yield _finding(model, 4, "packed documents = separate", _packed(model, members), torch.cat(singles))


def _packed(model: AthenaModel, members: list[Tensor]) -> Tensor:
    """Logits of the members packed in one row, isolated by the backbone's own means where it has them."""
    ids = torch.cat(members)[None]
    device = ids.device
    positions = torch.cat([torch.arange(len(member), device=device) for member in members])[None]
    with model.use("off"):  # some architectures take position ids for positions only, and need a mask
        alone = _forward(model, members[-1][None])[0]
        packed = _forward(model, ids, position_ids=positions)[0, -len(alone) :]
        bound = _tolerance(model, float(alone.abs().max()))
        isolates = float((packed - alone).abs().max()) <= bound
    mask = None
    if not isolates:
        document = (positions == 0).cumsum(1)
        mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    return _forward(model, ids, position_ids=positions, attention_mask=mask)[0]


def padded(members: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Members of different lengths as one batch with its mask."""
    filler = int(members[0][0])  # an ordinary token: only the mask says that it is padding
    ids = pad_sequence(members, batch_first=True, padding_value=filler, padding_side=side)
    mask = pad_sequence([torch.ones_like(member) for member in members], batch_first=True, padding_side=side)
    return ids, mask
