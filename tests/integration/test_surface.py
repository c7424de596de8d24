"""What a user of transformers and peft expects of the model object."""

import math

import pytest
import torch
from transformers import DynamicCache

from memoryathena import AthenaError, get_athena_model
from memoryathena.memory.policies import USES
from tests.models import athena, backbone, byte_level_tokenizer, config, sample_ids

IDS = sample_ids()[None]


def test_forward_with_labels_gives_the_loss_and_gradients_to_the_memory_alone() -> None:
    model = athena()
    with model.use("soft"):
        out = model(input_ids=IDS, labels=IDS)
    reference = torch.nn.functional.cross_entropy(out.logits[0, :-1], IDS[0, 1:])
    torch.testing.assert_close(out.loss, reference)
    out.loss.backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    trained = {name for name, p in model.memory.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert "table.weight" in trained
    for part in ("direct.value", "generator.cue_context", "generated.adapter_up", "semantic", "ordinary"):
        assert any(name.startswith(f"sites.1.{part}") for name in trained), part


def test_only_the_memory_is_trainable_and_train_leaves_the_backbone_in_eval(capsys: pytest.CaptureFixture[str]) -> None:
    model = athena()
    model.train()
    assert model.memory.training
    assert not model.backbone.training
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {f"memory.{name}" for name, _ in model.memory.named_parameters()}
    model.print_trainable_parameters()
    count = sum(p.numel() for p in model.memory.parameters())
    assert f"trainable params: {count:,d} || all params:" in capsys.readouterr().out


def test_use_is_a_setter_and_a_context_manager() -> None:
    model = athena()
    assert model.in_use == "router"
    model.use("E")
    assert model.in_use == "E"
    with model.use("GH"), model.use("off"):
        assert model.in_use == "off"
    assert model.in_use == "E"
    with pytest.raises(AthenaError, match="unknown pathway 'e'; known: off, E, GE, GH, router, hard"):
        model.use("e")
    assert model.in_use == "E"


def test_an_exception_inside_use_or_generate_leaves_everything_usable() -> None:
    model = athena()
    with torch.no_grad():
        before = model(IDS).logits
        with pytest.raises(RuntimeError, match="on purpose"), model.use("GH"):
            raise RuntimeError("on purpose")
        assert model.in_use == "router"

        def explode(*_: object) -> None:
            raise RuntimeError("on purpose")

        for block in (0, 2, 4):  # below, between and above the sites
            handle = model._injection.blocks[block].register_forward_pre_hook(explode)
            with pytest.raises(RuntimeError, match="on purpose"):
                model.generate(IDS, max_new_tokens=2, pad_token_id=0)
            handle.remove()
            assert model._injection.current is None
            assert torch.equal(model(IDS).logits, before)
        bare = backbone()
        assert torch.equal(model.detach()(IDS).logits, bare(IDS).logits)


def test_endpoints_of_one_pass_are_those_of_separate_passes() -> None:
    model = athena()
    uses = ("off", "E", "GE", "GH", "router", "subset-soft")
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    batch = {"input_ids": IDS[:, :24].reshape(2, 12), "attention_mask": mask}
    with torch.no_grad():
        together = model.endpoints(uses, **batch)
        for use in uses:
            with model.use(use):
                alone = model(**batch).logits
            torch.testing.assert_close(together[use][mask.bool()], alone[mask.bool()], rtol=0, atol=1e-4)
    with pytest.raises(AthenaError, match="compute their losses"):
        model.endpoints(uses, labels=IDS, **batch)
    assert model.in_use == "router"


def test_trace_tells_what_the_router_did_and_costs_nothing_when_closed() -> None:
    model = athena()
    with torch.no_grad():
        plain = model(IDS).logits
        with model.trace() as trace:
            assert torch.equal(model(IDS).logits, plain)
        model(IDS)
    assert model._injection.observer is None
    for site in (1, 3):
        record = trace[site]
        assert record["source"].shape == IDS.shape
        torch.testing.assert_close(record["weights"].sum(-1), torch.ones(IDS.shape))
        admitted = record["alpha"] > 0
        assert torch.equal(record["weights"][..., 0] == 1, ~admitted)
        assert (record["advantages"][..., 0] == 0).all()
        chosen = record["advantages"].gather(-1, record["source"][..., None])[..., 0]
        best = record["advantages"].where(record["confidences"] >= 0.5, -math.inf)[..., 1:].amax(-1)
        assert torch.equal(chosen[admitted], best[admitted])
        assert ((record["gates"] > 0) & (record["gates"] < 1)).all()
    summary = trace.summary()
    assert sum(summary[1]["mass"].values()) == pytest.approx(1, abs=1e-5)
    with model.use("E"), model.trace() as trace, torch.no_grad():
        model.generate(IDS[:, :5], max_new_tokens=3, pad_token_id=0, do_sample=False)
    assert trace[1]["source"].shape[1] == 7  # the last token is never fed back
    assert trace[1]["gates"][..., 1:].isnan().all()
    with pytest.raises(KeyError, match="nothing recorded at site 9"):
        trace[9]


def test_set_router_changes_the_rule_and_only_it() -> None:
    model = athena()
    with torch.no_grad(), model.trace() as loose:
        model(IDS)
    model.set_router(tau=0.2, rho=0.6)
    with torch.no_grad(), model.trace() as tight:
        model(IDS)
    torch.testing.assert_close(loose[1]["advantages"], tight[1]["advantages"])
    assert (tight[1]["alpha"] > 0).sum() < (loose[1]["alpha"] > 0).sum()
    assert model.config_athena.router.temperature == 0.15
    with pytest.raises(AthenaError, match=r"router.rho: Input should be less than or equal to 1"):
        model.set_router(rho=1.5)


def test_hidden_states_are_the_live_ones_without_extra_copies() -> None:
    model = athena()
    with torch.no_grad(), model.use("GH"):
        out = model(IDS, output_hidden_states=True, use_cache=False)
    assert {len(state) for state in out.hidden_states} == {1}


def test_random_draws_every_source_and_follows_its_seed() -> None:
    ids = IDS.repeat(1, 4)
    draws = []
    for seed in (0, 0, 1):
        model = athena("llama", seed=5)
        model.config_athena = model.config_athena.override(seed=seed)
        with torch.no_grad(), model.use("random"), model.trace() as trace:
            model(ids)
        draws.append(trace[1]["source"])
        assert (trace[1]["source"] != trace[3]["source"]).any()
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.bincount(draws[0].flatten(), minlength=3).min() > ids.numel() / 6


def test_assistants_of_both_kinds_speculate_for_it() -> None:
    model, helper = athena(seed=0), athena("llama", seed=1)
    options = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    with torch.no_grad():
        greedy = model.generate(IDS[:, :9], **options)
        for assistant in (helper, backbone(seed=0)):
            out = model.generate(IDS[:, :9], assistant_model=assistant, **options)
            assert torch.equal(out, greedy)


def test_a_prefix_cache_is_reused_after_cropping() -> None:
    """A prompt computed once serves several continuations."""
    model = athena()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS[:, :10], past_key_values=cache)
        for tail in (IDS[:, 10:14], IDS[:, 14:20]):
            logits = model(input_ids=tail, past_key_values=cache).logits
            whole = model(input_ids=torch.cat([IDS[:, :10], tail], dim=1), use_cache=False).logits[:, 10:]
            torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)
            cache.crop(-tail.shape[1])
        cache.crop(-10)
        fresh = model(input_ids=IDS, past_key_values=cache).logits
        torch.testing.assert_close(fresh, model(input_ids=IDS, use_cache=False).logits, rtol=0, atol=1e-4)


def test_a_cache_that_the_memory_has_not_followed_is_refused() -> None:
    model = athena()
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        with model.use("off"):
            model(input_ids=IDS[:, :5], past_key_values=cache)
        with pytest.raises(AthenaError, match="the cache holds 5 positions that the memory has not seen"):
            model(input_ids=IDS[:, 5:6], past_key_values=cache)
        cache = DynamicCache(config=model.config)
        with model.use("E"):
            model(input_ids=IDS[:, :5], past_key_values=cache)
        with pytest.raises(AthenaError, match="filled under use E; it cannot go on under GH"), model.use("GH"):
            model(input_ids=IDS[:, 5:6], past_key_values=cache)
        cache = DynamicCache(config=model.config)
        model(input_ids=IDS[:, :5], past_key_values=cache)
        for layer in cache.layers:
            layer.crop(-2)
        with pytest.raises(AthenaError, match="the cache holds 3 positions and the memory's state 5"):
            model(input_ids=IDS[:, 5:6], past_key_values=cache)


def test_off_goes_on_from_a_cache_with_copies_as_the_bare_backbone_would() -> None:
    model = athena()
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        with model.use("GH"):
            model(input_ids=IDS[:, :5], past_key_values=cache)
        keys = [layer.keys[:1].clone() for layer in cache.layers]
        with model.use("off"):
            model(input_ids=IDS[:, 5:6], past_key_values=cache)
        assert all(torch.equal(layer.keys[:, :, :5], key) for layer, key in zip(cache.layers, keys, strict=True))


def test_bad_input_gets_one_clear_line() -> None:
    model = athena()
    with pytest.raises(AthenaError, match=r"the prompt is empty \(shape \[1, 0\]\)"):
        model.generate(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(AthenaError, match=r"the input is empty"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(AthenaError, match="the sequence has 140 positions; llama was built for at most 128"):
        model(IDS.repeat(1, 5))
    with pytest.raises(AthenaError, match="give input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(AthenaError, match="attention_mask has 3 positions for 28 tokens"):
        model(IDS, attention_mask=torch.ones(1, 3))
    with pytest.raises(AthenaError, match="already has a memory attached"):
        get_athena_model(model.backbone, config(), byte_level_tokenizer())
    model.detach()
    bare = model.backbone
    for bad, message in (
        (config(width=48), r"the config has width 48; this backbone \(llama\) has width 32"),
        (config((1, 7)), r"site 7 is out of range: this backbone \(llama\) has blocks 0 to 4"),
    ):
        with pytest.raises(AthenaError, match=message):
            get_athena_model(bare, bad, byte_level_tokenizer())
    with pytest.raises(AthenaError, match="give the backbone's tokenizer"):
        get_athena_model(bare, config(), None)
    plain = get_athena_model(bare, config(auxiliary=False), byte_level_tokenizer())
    with pytest.raises(AthenaError, match="pathway 'hard' needs the auxiliary heads"):
        plain.use("hard")
    plain.detach()
    ffn = get_athena_model(bare, config(control="ffn"), byte_level_tokenizer())
    with pytest.raises(AthenaError, match="control 'ffn' has no pathway 'GE'"):
        ffn.use("GE")


def test_every_rule_has_a_name_and_every_name_a_rule() -> None:
    model = athena()
    for use in USES:
        with torch.no_grad(), model.use(use):
            assert model(IDS).logits.isfinite().all()


def test_packed_documents_by_number_are_packed_documents_by_position() -> None:
    model = athena(memory={"canonical": "word"})
    positions = torch.cat([torch.arange(11), torch.arange(17)])[None]
    documents = torch.tensor([[4] * 11 + [9] * 17])
    mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    with torch.no_grad():
        by_number = model(IDS, document_ids=documents, attention_mask=mask, position_ids=positions).logits
        by_position = model(IDS, position_ids=positions, use_cache=False).logits
        crossing = model(IDS, document_ids=torch.zeros_like(documents)).logits
    torch.testing.assert_close(by_number, by_position, rtol=0, atol=1e-5)
    assert (crossing - by_position).abs().max() > 0.1
