"""Laws 1 to 4 on every tested architecture, with one site and with two (GH on a real clean stream)."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memoryathena import AthenaModel
from memoryathena.backbone import injection, state
from memoryathena.backbone.laws import check_laws, law_1_off_and_rejection, law_2_causal, law_3_decoding, law_4_batches
from memoryathena.memory.policies import USES
from tests.models import ARCHITECTURES, athena, excite, sample_ids

ENDPOINTS = ("E", "GE", "GH", "router")
RULES = tuple(use for use in USES if use not in (*ENDPOINTS, "off"))


def broken(model: AthenaModel, uses: tuple[str, ...]) -> list[Any]:
    """The findings that do not hold."""
    findings = list(check_laws(model, sample_ids(), uses))
    assert len(findings) >= 4 + 13 * len(uses)
    return [finding for finding in findings if not finding.passed]


@pytest.mark.parametrize("sites", [(1, 3), (2,)], ids=["two-sites", "one-site"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_laws_1_to_4_hold(name: str, sites: tuple[int, ...]) -> None:
    canonical = "word" if len(sites) == 2 else "token"
    assert broken(athena(name, sites, memory={"canonical": canonical}), ENDPOINTS) == []


@pytest.mark.parametrize("use", RULES)
def test_laws_hold_under_every_routing_rule(use: str) -> None:
    assert broken(athena("llama"), (use,)) == []


@pytest.mark.parametrize("overrides", [{"control": "no-gate"}, {"control": "affine"}, {"branches": 1}, {"branches": 4}])
def test_laws_hold_for_controls_and_branches(overrides: dict[str, Any]) -> None:
    assert broken(athena("gpt2", **overrides), ("router",)) == []


def test_laws_hold_for_the_ffn_control_and_three_sites() -> None:
    assert broken(athena("llama", control="ffn"), ("E",)) == []
    assert broken(athena("llama", (0, 2, 4)), ("router", "GH")) == []


def test_law_1_holds_at_two_sites_also_for_a_finite_tau_that_rejects_everything() -> None:
    model, ids = athena("llama"), sample_ids()[None]
    with torch.no_grad(), model.use("E"):
        e = model(ids).logits
    model.set_router(tau=1e9)
    with torch.no_grad(), model.use("router"):
        torch.testing.assert_close(model(ids).logits, e, rtol=0, atol=1e-5)


# -- the checks can fail: each is shown a model broken in the way it is there to find -------------------------------


@contextlib.contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


def fails(findings: Any) -> set[str]:
    """What was found wrong, without the pathway's name."""
    findings = [findings] if not hasattr(findings, "__iter__") else list(findings)
    return {finding.what for finding in findings if not finding.passed}


@torch.no_grad()
def test_law_1_notices_a_residual_that_leaks_into_off() -> None:
    model, ids = athena("llama"), sample_ids()[None]
    handle = model._injection.blocks[2].register_forward_hook(
        lambda module, args, out: out + 1e-6 * (model._injection.plan is None and bool(model._injection.handles))
    )
    assert "the bare backbone" in fails(law_1_off_and_rejection(model, ids))
    handle.remove()


@torch.no_grad()
def test_law_2_notices_a_window_that_looks_ahead() -> None:
    model, ids = athena("llama"), sample_ids()[None]

    def ahead(valid: torch.Tensor, starts: torch.Tensor, size: int) -> torch.Tensor:
        index = torch.arange(valid.shape[1]).expand_as(valid)
        return torch.stack([(index + k).clamp(max=valid.shape[1] - 1) for k in range(size)], dim=-1)

    with model.use("GH"), patched(injection, "lookback", ahead):
        assert fails(law_2_causal(model, ids)) == {"causal"}


@torch.no_grad()
def test_law_3_notices_each_part_of_the_state_that_is_lost() -> None:
    model, ids = athena("llama"), sample_ids()[None]
    advance = state.DecodingState.advance

    def forgetting(field: str) -> Any:
        def lossy(self: state.DecodingState, *args: Any, **kwargs: Any) -> None:
            advance(self, *args, **kwargs)
            if field == "cues":
                self.cues = {key: torch.zeros_like(cue) for key, cue in self.cues.items()}
            else:
                setattr(self, field, torch.zeros_like(getattr(self, field)))

        return lossy

    for use, field in (("E", "address_BS"), ("GE", "cues"), ("GH", "cues"), ("GH", "seen_BK"), ("random", "count_B")):
        with model.use(use), patched(state.DecodingState, "advance", forgetting(field)):
            assert "greedy = forward" in fails(law_3_decoding(model, ids)), (use, field)


@torch.no_grad()
def test_law_3_notices_a_state_that_does_not_follow_the_cache() -> None:
    model, ids = athena("llama"), sample_ids()[None]
    with model.use("router"), patched(state.DecodingState, "map", lambda self, change: None):
        assert "4 beams score as forward" in fails(law_3_decoding(model, ids))

    def uncropped(self: state.DecodingState, length: int) -> None:
        self.length = length

    with model.use("router"), patched(state.DecodingState, "crop", uncropped):
        assert any("assisted" in what for what in fails(law_3_decoding(model, ids)))


@torch.no_grad()
def test_law_3_notices_a_clean_stream_without_its_own_cache() -> None:
    model, ids = athena("llama"), sample_ids()[None]
    inject = injection.Injection._inject

    def polluted(self: Any, index: int, module: Any, args: Any, output: Any) -> Any:
        if self.current is not None and index == self.sites[-1] and output.shape[1] == 1:
            half = output.chunk(2)[0]
            output = torch.cat([half, half])
        return inject(self, index, module, args, output)

    model.detach()
    with patched(injection.Injection, "_inject", polluted):
        model._injection.attach()
        with model.use("GH"):
            model._refresh()
            assert "greedy = forward" in fails(law_3_decoding(model, ids))


@torch.no_grad()
def test_law_4_notices_padding_and_packing_that_leak() -> None:
    model, ids = athena("llama"), sample_ids()[None]
    everything = patched(injection, "valid_positions", lambda mask, ids, past: torch.ones_like(ids, dtype=torch.bool))
    nowhere = patched(injection, "document_starts", lambda positions, valid: torch.zeros_like(valid))
    with model.use("E"), everything, nowhere:  # position ids that begin at 0 would hide the padding by themselves
        assert "left-padded batch = members" in fails(law_4_batches(model, ids))
    nowhere = patched(injection, "document_starts", lambda positions, valid: torch.zeros_like(valid))
    with model.use("E"), nowhere:
        assert fails(law_4_batches(model, ids)) == {"packed documents = separate"}


def test_excited_models_really_use_their_memory() -> None:
    """Laws about a memory that does nothing would hold by themselves."""
    model, ids = athena("llama"), sample_ids()[None]
    with torch.no_grad():
        logits = model.endpoints(("off", "E", "GE", "GH", "router"), input_ids=ids)
    for a, b in (("off", "E"), ("E", "GE"), ("GE", "GH"), ("E", "router")):
        assert (logits[a] - logits[b]).abs().max() > 0.1, (a, b)
    with torch.no_grad(), model.use("router"), model.trace() as trace:
        model(ids)
    sources = torch.cat([trace[site]["source"].flatten() for site in trace.sites])
    assert set(sources.tolist()) == {0, 1, 2}
    excite(model)
