"""What an artifact is, and how a text would fill its table."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from memoryathena.backbone import artifacts
from memoryathena.backbone.tokens import token_bytes
from memoryathena.config import MemoryConfig
from memoryathena.errors import AthenaError
from memoryathena.memory.addressing import Addressing
from memoryathena.memory.hashing import HashConstants
from memoryathena.memory.occupancy import Census, HeadOccupancy


def describe(folder: Path) -> dict[str, Any]:
    """Everything an artifact's configs say, with every digest checked against its file."""
    if (folder / artifacts.ADAPTER_CONFIG).is_file():
        config, data = artifacts.load_adapter_config(folder)
        _check_files(folder, data["files"])
        out: dict[str, Any] = {"kind": "adapter", **data, "config": artifacts.json_config(config)}
        if (folder / artifacts.MEMORY_FOLDER / artifacts.MEMORY_CONFIG).is_file():
            out["table"] = describe(folder / artifacts.MEMORY_FOLDER)
        return out
    if (folder / artifacts.MEMORY_CONFIG).is_file():
        memory, constants, digest, fingerprint = artifacts.load_memory_config(folder)
        _check_files(folder, {artifacts.TABLE: digest})
        return {
            "kind": "memory",
            "fingerprint": fingerprint,
            **memory.model_dump(mode="json"),
            "parameters": memory.parameters,
            "hash": constants.to_json(),
            "files": {artifacts.TABLE: digest},
        }
    raise AthenaError(
        f"{folder} is no artifact: it has neither {artifacts.ADAPTER_CONFIG} nor {artifacts.MEMORY_CONFIG}"
    )


def memory_of(folder: Path) -> tuple[MemoryConfig, HashConstants]:
    """Config and constants of a memory folder, or of an adapter's own."""
    inner = folder / artifacts.MEMORY_FOLDER
    config, constants, _, _ = artifacts.load_memory_config(inner if inner.is_dir() else folder)
    return config, constants


def occupancy(folder: Path, corpus: Path, tokenizer: Any) -> list[HeadOccupancy]:
    """Row coverage and collision rate of each head on a text."""
    config, constants = memory_of(folder)
    tokens = token_bytes(tokenizer, len(tokenizer))
    addressing = Addressing(tokens, config.orders, config.rows, config.canonical, config.scheme, constants)
    census = Census(addressing, config.orders, config.heads, config.rows)
    empty = True
    for text in track(documents(corpus), description=f"reading {corpus.name}", transient=True):
        if ids := tokenizer(text, add_special_tokens=False).input_ids:
            census.add(torch.tensor(ids))
            empty = False
    if empty:
        raise AthenaError(f"{corpus} has no text: give a .txt file or a .jsonl with a 'text' field")
    return census.report()


def documents(path: Path) -> Iterator[str]:
    """Texts of a .jsonl(.gz) file's 'text' field; any other file is one text."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            if ".jsonl" not in path.suffixes:
                yield file.read()
                return
            for number, line in enumerate(file, 1):
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise AthenaError(f"{path}, line {number}: needs an object with a string field 'text'")
                yield row["text"]
    except FileNotFoundError:
        raise AthenaError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AthenaError(f"cannot read {path} as text: {error}") from None


def _check_files(folder: Path, files: dict[str, str]) -> None:
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            raise AthenaError(f"{path} does not exist: {folder} is not a complete artifact")
        if (actual := artifacts.sha256(path)) != digest:
            raise AthenaError(
                f"{path} is damaged or was replaced: its config expects sha256 {digest[:12]}, the file has "
                f"{actual[:12]}"
            )
