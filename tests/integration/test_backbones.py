"""What a memory attaches to: every tested architecture, PEFT-wrapped, quantised and dispatched backbones, any path."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from memoryathena import AthenaConfig, AthenaError, AthenaModel, get_athena_model
from memoryathena.backbone.laws import check_laws
from memoryathena.backbone.sites import BLOCK_PATHS
from tests.models import ARCHITECTURES, athena, backbone, byte_level_tokenizer, config, excite, sample_ids, small_llama


def failures(model: AthenaModel) -> list[Any]:
    return [finding for finding in check_laws(model, sample_ids(), ("E", "router")) if not finding.passed]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_fresh_memory_hardly_moves_the_backbone_and_comes_off_without_a_trace(name: str) -> None:
    bare, ids = backbone(name), sample_ids()[None]
    before = {key: value.clone() for key, value in bare.state_dict().items()}
    attributes, hooks = set(vars(bare)), _hooks(bare)
    flags = [parameter.requires_grad for parameter in bare.parameters()]
    with torch.no_grad():
        logits = bare(ids).logits
        model = get_athena_model(bare, AthenaConfig.preset("tiny"), byte_level_tokenizer())
        assert (model(ids).logits - logits).abs().max() < 0.05 * logits.abs().max()
        model.generate(ids, max_new_tokens=2, pad_token_id=0)
        assert model.detach() is bare
        assert torch.equal(bare(ids).logits, logits)
    assert _hooks(bare) == hooks
    assert set(vars(bare)) == attributes
    assert [parameter.requires_grad for parameter in bare.parameters()] == flags
    assert all(torch.equal(value, before[key]) for key, value in bare.state_dict().items())


def _hooks(module: nn.Module) -> list[int]:
    return [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]


def test_value_std_zero_makes_a_fresh_memory_exactly_neutral() -> None:
    bare, ids = backbone(), sample_ids()[None]
    with torch.no_grad():
        logits = bare(ids).logits
        model = get_athena_model(bare, config(value_std=0.0), byte_level_tokenizer())
        assert torch.equal(model(ids).logits, logits)


def test_a_detached_backbone_can_be_attached_again_with_a_used_static_cache() -> None:
    model, ids = athena("llama"), sample_ids()[None, :8]
    options = {"max_new_tokens": 4, "pad_token_id": 0, "cache_implementation": "static", "do_sample": False}
    with torch.no_grad():
        with model.use("GH"):
            model.generate(ids, **options)
        with model.use("E"):
            e = model.generate(ids, **options)
            assert torch.equal(e, model.generate(ids, **{**options, "cache_implementation": None}))
        bare = model.detach()
        assert torch.equal(bare.generate(ids, **options), bare.generate(ids, max_new_tokens=4, pad_token_id=0))


def test_laws_hold_on_a_peft_wrapped_backbone() -> None:
    wrapped = get_peft_model(
        backbone("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    model = get_athena_model(wrapped, config(), byte_level_tokenizer())
    excite(model)
    assert failures(model) == []
    assert not any(parameter.requires_grad for parameter in wrapped.parameters())


@pytest.mark.parametrize("quantised", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=["4bit", "8bit"])
def test_laws_hold_on_a_quantised_backbone(quantised: dict[str, bool], tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    bare = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**quantised), device_map="cpu"
    )
    model = get_athena_model(bare, config(), byte_level_tokenizer())
    excite(model)
    assert failures(model) == []


def test_laws_hold_on_a_dispatched_backbone(tmp_path: Path) -> None:
    """accelerate moves weights in and out of each block; sites stand where their block computes."""
    small_llama().save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk"}
    places |= {"model.layers.3": "cpu", "model.layers.4": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    places["model.rotary_emb"] = "cpu"
    bare = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=str(tmp_path / "away"))
    model = get_athena_model(bare, config((2, 3)), byte_level_tokenizer())
    excite(model)
    assert {p.device.type for p in model.memory.parameters()} == {"cpu"}, "offloaded blocks stand on meta"
    assert failures(model) == []
    model.save_pretrained(tmp_path / "saved")


def test_bf16_backbone_keeps_fp32_memory() -> None:
    model = get_athena_model(backbone().to(torch.bfloat16), config(), byte_level_tokenizer())
    excite(model)
    assert {p.dtype for p in model.memory.parameters()} == {torch.float32}
    with torch.no_grad():
        assert model(sample_ids()[None]).logits.dtype == torch.bfloat16
    assert failures(model) == []


class Renamed(nn.Module):
    """An architecture nobody has heard of."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config, self.generation_config = inner, inner.config, inner.generation_config

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return self.inner(input_ids, **kwargs)


def test_an_unknown_architecture_is_told_what_is_known_and_works_by_its_block_path() -> None:
    strange = Renamed(backbone("llama"))
    strange.config.model_type = "strange"
    with pytest.raises(AthenaError, match=r"unknown architecture 'strange': set block_path.*gpt2.*llama"):
        get_athena_model(strange, config(), byte_level_tokenizer())
    model = get_athena_model(strange, config(block_path="inner.model.layers"), byte_level_tokenizer())
    excite(model)
    with torch.no_grad():
        logits = model.endpoints(("off", "router"), input_ids=sample_ids()[None])
    assert not torch.equal(logits["off"], logits["router"])
    model.detach()
    with pytest.raises(AthenaError, match=r"no blocks at block_path 'inner.layers'"):
        get_athena_model(strange, config(block_path="inner.layers"), byte_level_tokenizer())


def test_every_tested_architecture_is_in_the_table_of_block_paths() -> None:
    for name in ARCHITECTURES:
        assert backbone(name).config.model_type in BLOCK_PATHS


def test_each_copy_of_the_batch_runs_only_where_it_must() -> None:
    """The clean stream costs the blocks between the sites, and nothing under E or with one site."""
    ids = sample_ids()[None]

    def rows(model: AthenaModel, use: str) -> list[int]:
        seen: list[int] = []
        hooks = [
            block.register_forward_pre_hook(lambda module, args, kwargs: seen.append(len(args[0])), with_kwargs=True)
            for block in model._injection.blocks
        ]
        with torch.no_grad(), model.use(use):
            model(ids)
        for hook in hooks:
            hook.remove()
        return seen

    model = athena("llama", (1, 3))
    assert rows(model, "router") == rows(model, "GH") == [1, 1, 2, 2, 1]
    assert rows(model, "E") == rows(model, "GE") == rows(model, "off") == [1, 1, 1, 1, 1]
    model.set_router(tau=float("inf"))
    assert rows(model, "router") == [1, 1, 1, 1, 1]
    assert rows(athena("llama", (2,)), "router") == [1, 1, 1, 1, 1]
