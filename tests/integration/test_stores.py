"""Where the table's rows live changes nothing but time; in how many bits, little."""

from pathlib import Path

import pytest
import torch

from memoryathena import AthenaError, AthenaModel
from memoryathena.backbone.decoder import Decoder
from tests.models import athena, backbone, byte_level_tokenizer, sample_ids


def logits(model: AthenaModel) -> torch.Tensor:
    with torch.no_grad():
        return model(sample_ids()[None]).logits


def saved(folder: Path) -> AthenaModel:
    model = athena()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("store", ["device", "host", "mmap"])
def test_a_table_read_from_elsewhere_is_the_same_table(store: str, tmp_path: Path) -> None:
    expected = saved(tmp_path)
    model = AthenaModel.from_pretrained(tmp_path, backbone(), byte_level_tokenizer(), store=store)
    assert torch.equal(logits(model), logits(expected))
    ids = sample_ids()[None, :12]
    assert torch.equal(
        Decoder(model, None, fuse=False)(ids, max_new_tokens=6),
        Decoder(expected, None, fuse=False)(ids, max_new_tokens=6),
    )
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/memory/memory_config.json").read_bytes() == (
        tmp_path / "memory/memory_config.json"
    ).read_bytes()


def test_mapped_rows_are_read_when_asked_for_and_never_moved(tmp_path: Path) -> None:
    saved(tmp_path)
    model = AthenaModel.from_pretrained(tmp_path, backbone(), byte_level_tokenizer(), store="mmap")
    weight = model.memory.table.weight
    model.memory.to(torch.float64)
    assert model.memory.table.weight is weight
    assert weight.dtype == torch.float32
    assert not weight.requires_grad
    model.store_table("device")  # now it is an ordinary one
    model.memory.to(torch.float64)
    assert model.memory.table.weight.dtype == torch.float64


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("fp8", 0.04)])
@pytest.mark.parametrize("store", ["device", "host"])
def test_a_byte_a_number_is_close(kind: str, bound: float, store: str) -> None:
    model = athena()
    rows = torch.randint(512, (2, 50, model.config_athena.memory.total_heads))
    exact, before = model.memory.table(rows), logits(model)
    model.store_table(store, quantise=kind)
    found = model.memory.table(rows)
    assert 0 < (found - exact).norm() / exact.norm() < bound
    assert model.memory.table.weight.numel() == 0
    assert model.memory.table.codes is not None
    assert model.memory.table.codes.dtype == torch.uint8
    assert (logits(model).softmax(-1) - before.softmax(-1)).abs().max() < 0.2
    with pytest.raises(AthenaError, match="its full rows, which a file keeps, are gone"):
        model.save_memory(Path("nowhere"))
    with pytest.raises(AthenaError, match=f"quantised to {kind} already"):
        model.store_table(store, quantise=kind)


def test_a_row_of_zeros_stays_one() -> None:
    model = athena()
    with torch.no_grad():
        model.memory.table.weight.zero_()
    model.store_table("device", quantise="int8")
    assert not model.memory.table(torch.zeros(1, 1, 8, dtype=torch.long)).any()


def test_wrong_stores_are_named(tmp_path: Path) -> None:
    model = saved(tmp_path)
    with pytest.raises(AthenaError, match="unknown store 'disk'; known: device, host, mmap"):
        model.store_table("disk")
    with pytest.raises(AthenaError, match="unknown store 'disk'"):
        AthenaModel.from_pretrained(tmp_path, backbone(), byte_level_tokenizer(), store="disk")
    with pytest.raises(AthenaError, match="unknown quantisation 'int4'; known: int8, fp8"):
        model.store_table("host", quantise="int4")
    with pytest.raises(AthenaError, match="mapped when it is loaded"):
        model.store_table("mmap")
