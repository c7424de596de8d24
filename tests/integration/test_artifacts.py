"""What is saved loads elsewhere bit for bit; anything cut, edited or mismatched is one line that names both sides."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from memoryathena import AthenaError, AthenaModel, get_athena_model
from memoryathena.backbone import artifacts
from memoryathena.backbone.fingerprint import digest_json
from tests.models import athena, backbone, byte_level_tokenizer, config, sample_ids, sentencepiece_tokenizer

IDS = sample_ids()[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "adapter"
    model = athena(memory={"canonical": "word"}, router={"tau": 0.05})
    model.stage = "router"
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for path in saved.rglob("*"):
        if path.is_file():
            target = tmp_path / "copy" / path.relative_to(saved)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "copy"


def load(folder: Path, bare: Any = None, tokenizer: Any = None, **kwargs: Any) -> AthenaModel:
    return AthenaModel.from_pretrained(folder, bare or backbone(), tokenizer or byte_level_tokenizer(), **kwargs)


def test_a_saved_memory_is_the_same_in_another_process(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "logits.pt"
    code = (
        "import torch; from memoryathena import AthenaModel\n"
        "from tests.models import backbone, byte_level_tokenizer, sample_ids\n"
        "torch.set_num_threads(1); torch.set_grad_enabled(False)\n"
        f"model = AthenaModel.from_pretrained({str(saved)!r}, backbone(), byte_level_tokenizer())\n"
        f"torch.save(model(sample_ids()[None]).logits.detach(), {str(out)!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    model = athena(memory={"canonical": "word"}, router={"tau": 0.05})
    with torch.no_grad():
        assert torch.equal(torch.load(out), model(IDS).logits)


def test_everything_of_it_survives(saved: Path) -> None:
    model = load(saved)
    assert model.stage == "router"
    assert model.config_athena == athena(memory={"canonical": "word"}, router={"tau": 0.05}).config_athena
    names = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert names == {
        "athena_config.json",
        "adapter.safetensors",
        "README.md",
        "memory/memory_config.json",
        "memory/table.safetensors",
    }
    card = (saved / "README.md").read_text()
    assert "library_name: memoryathena" in card
    assert "stage reached | router" in card


def test_infinite_tau_survives_as_strict_json(tmp_path: Path) -> None:
    model = athena()
    model.set_router(tau=float("inf"))
    model.save_pretrained(tmp_path)
    json.loads((tmp_path / "athena_config.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert load(tmp_path).config_athena.router.tau == float("inf")


def test_a_memory_alone_serves_an_adapter_saved_without_it(saved: Path, copy: Path) -> None:
    (copy / "memory").rename(copy.parent / "elsewhere")
    with pytest.raises(AthenaError, match=r"memory_config.json does not exist"):
        load(copy)
    model = load(copy, memory=copy.parent / "elsewhere")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, load(saved)(IDS).logits)


def test_saving_again_and_without_the_table(copy: Path) -> None:
    model = load(copy)
    before = artifacts.sha256(copy / "memory" / "table.safetensors")
    model.set_router(tau=0.5)
    model.save_pretrained(copy, table=False)
    assert artifacts.sha256(copy / "memory" / "table.safetensors") == before
    assert load(copy).config_athena.router.tau == 0.5
    with pytest.raises(AthenaError, match="has no memory folder yet"):
        model.save_pretrained(copy.parent / "new", table=False)
    assert not (copy.parent / "new").exists()


def edit(path: Path, change: Callable[[dict[str, Any]], Any], sign: bool = False) -> None:
    """Change a config; `sign` gives it a fingerprint that fits, as a careful forger would."""
    data = json.loads(path.read_text())
    change(data)
    if sign:
        data.pop("fingerprint", None)
        data["fingerprint"] = digest_json(data)
    path.write_text(json.dumps(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated adapter": (lambda p: cut(p / "adapter.safetensors"), "adapter.safetensors is damaged or was replaced"),
    "flipped bit in the table": (lambda p: flip(p / "memory/table.safetensors"), "table.safetensors is damaged"),
    "missing weights": (lambda p: (p / "adapter.safetensors").unlink(), "adapter.safetensors does not exist"),
    "missing table": (lambda p: (p / "memory/table.safetensors").unlink(), "table.safetensors does not exist"),
    "missing config": (lambda p: (p / "athena_config.json").unlink(), "athena_config.json does not exist"),
    "not JSON": (lambda p: (p / "athena_config.json").write_text("{"), "is not valid JSON"),
    "edited seed": (
        lambda p: edit(p / "memory/memory_config.json", lambda d: d.update(seed=7)),
        "memory_config.json was edited: it says fingerprint",
    ),
    "missing hash constants": (
        lambda p: edit(p / "memory/memory_config.json", lambda d: d.pop("hash")),
        "memory_config.json: missing hash",
    ),
    "missing multipliers, signed": (
        lambda p: edit(p / "memory/memory_config.json", lambda d: d["hash"].pop("multipliers"), sign=True),
        "hash constants need exactly ['begin', 'empty', 'multipliers', 'salts'], found",
    ),
    "other salts, signed": (
        lambda p: edit(p / "memory/memory_config.json", lambda d: d["hash"]["salts"].reverse(), sign=True),
        "was made with memory",
    ),
    "unknown key": (
        lambda p: edit(p / "athena_config.json", lambda d: d.update(colour="blue"), sign=True),
        "athena_config.json: unknown config key colour",
    ),
    "unknown nested key": (
        lambda p: edit(p / "athena_config.json", lambda d: d["config"]["router"].update(tao=1), sign=True),
        "unknown config key 'router.tao'",
    ),
    "later format": (
        lambda p: edit(p / "athena_config.json", lambda d: d.update(format=2), sign=True),
        "format 2; this version reads format 1",
    ),
    "other canonical version": (
        lambda p: edit(p / "memory/memory_config.json", lambda d: d.update(canonical_version=9), sign=True),
        "canonical text version 9; this version makes 1",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_in_one_line_and_the_backbone_stays_clean(name: str, copy: Path) -> None:
    damage, message = DAMAGE[name]
    damage(copy)
    bare = backbone()
    with pytest.raises(AthenaError) as error:
        load(copy, bare)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not bare._forward_pre_hooks
    assert all(parameter.requires_grad for parameter in bare.parameters())


def test_missing_and_extra_tensors_are_named(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = copy / "adapter.safetensors"
    tensors = load_file(path)
    removed = tensors.pop("1.norm")
    for changed, message in (
        (tensors, "missing 1 tensors, the first is 1.norm"),
        (
            {**tensors, "1.norm": removed, "9.norm": removed.clone()},
            "1 tensors that do not belong, the first is 9.norm",
        ),
        ({**tensors, "1.norm": removed[:-1]}, r"1.norm has shape \[31\], its config says \[32\]"),
    ):
        save_file(changed, path)
        digest = artifacts.sha256(path)
        edit(copy / "athena_config.json", lambda d, digest=digest: d.update(files={path.name: digest}), sign=True)
        with pytest.raises(AthenaError, match=message):
            load(copy)


def test_another_backbone_or_tokenizer_is_refused_by_name(saved: Path) -> None:
    with pytest.raises(AthenaError, match=r"with model_type llama; this backbone is .* with model_type qwen2"):
        load(saved, backbone("qwen2"))
    with pytest.raises(AthenaError, match="has the same architecture but other weights"):
        load(saved, backbone(seed=1))
    load(saved, backbone().to(torch.bfloat16)).detach()
    with pytest.raises(AthenaError, match=r"was made with tokenizer .* \(400 tokens, .*this tokenizer is .* tokens,"):
        load(saved, tokenizer=sentencepiece_tokenizer())
    twin = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer().backend_tokenizer, eos_token="</s>")
    with pytest.raises(AthenaError, match="was made with tokenizer"):
        load(saved, tokenizer=twin)


def test_nothing_is_written_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = athena()
    model.save_pretrained(tmp_path / "good")
    before = {path: path.read_bytes() for path in (tmp_path / "good").rglob("*") if path.is_file()}

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts, "save_file", full)
    with pytest.raises(AthenaError, match=r"cannot write .*table.safetensors: No space left on device"):
        model.save_pretrained(tmp_path / "good")
    assert {path: path.read_bytes() for path in (tmp_path / "good").rglob("*") if path.is_file()} == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(AthenaError, match="is a file: give a folder to save to"):
        model.save_pretrained(tmp_path / "file")


def test_a_place_that_is_neither_folder_nor_repository(tmp_path: Path) -> None:
    with pytest.raises(AthenaError, match=r"no folder .* here, and it is not a hub repository id"):
        load(tmp_path / "nowhere")


def test_push_to_hub_uploads_the_saved_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: str | None = None) -> None:
            seen["token"] = token

        def create_repo(self, repo: str, private: bool, exist_ok: bool) -> str:
            seen.update(repo=repo, private=private, exist_ok=exist_ok)
            return "address"

        def upload_folder(self, repo_id: str, folder_path: str, **kwargs: Any) -> None:
            seen.update(files=sorted(p.name for p in Path(folder_path).rglob("*") if p.is_file()), **kwargs)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert athena().push_to_hub("me/memory", private=True, token="t", commit_message="m") == "address"
    assert seen["repo"] == "me/memory"
    assert seen["private"]
    assert "adapter.safetensors" in seen["files"]
    assert seen["commit_message"] == "m"


def test_a_fresh_memory_is_a_function_of_its_seeds() -> None:
    states = []
    for seed in (0, 0, 1):
        model = get_athena_model(backbone(), config(seed=seed), byte_level_tokenizer())
        states.append({name: p.detach().clone() for name, p in model.memory.named_parameters()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["sites.1.direct.value.weight"], states[2]["sites.1.direct.value.weight"])
    assert torch.equal(states[0]["table.weight"], states[2]["table.weight"])  # the memory has a seed of its own
