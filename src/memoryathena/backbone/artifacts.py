"""Files: a memory folder and an adapter folder. safetensors and JSON only, checked on the way in.

    memory/   memory_config.json  table.safetensors       the table and all that addresses it
    adapter/  athena_config.json  adapter.safetensors     readers, generators, routers of one backbone

Every config carries the digests of its files and its own fingerprint: a file that was cut, edited or swapped is an
error that names both sides. Files are written beside their place and renamed.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memoryathena.backbone.fingerprint import digest_json
from memoryathena.config import AthenaConfig, MemoryConfig
from memoryathena.errors import AthenaError
from memoryathena.memory.hashing import HashConstants
from memoryathena.memory.table import Table
from memoryathena.memory.text import CANONICAL_VERSION

FORMAT = 1
MEMORY_CONFIG, TABLE = "memory_config.json", "table.safetensors"
ADAPTER_CONFIG, ADAPTER = "athena_config.json", "adapter.safetensors"
MEMORY_FOLDER = "memory"


def sha256(path: Path) -> str:
    """Digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, write: Any) -> None:
    """`write(temporary path)`, then sync and rename: the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:  # safetensors says in its own words that a disk is full
        reason = getattr(error, "strerror", None) or error
        raise AthenaError(f"cannot write {path}: {reason}; nothing was changed there") from None
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors; returns the file's digest."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(plain, temporary, metadata={"format": "pt"}))
    return sha256(path)


def save_config(path: Path, data: dict[str, Any]) -> str:
    """Write a config with its own fingerprint; returns the fingerprint."""
    fingerprint = digest_json(data)
    text = json.dumps({**data, "fingerprint": fingerprint}, indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))
    return fingerprint


def load_config(path: Path, keys: set[str]) -> dict[str, Any]:
    """Read a config; it must have exactly these keys and its own fingerprint."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise AthenaError(f"{path} does not exist: {path.parent} is not a complete artifact") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AthenaError(f"{path} is not valid JSON ({error})") from None
    found = set(data) if isinstance(data, dict) else set()
    if missing := (keys | {"fingerprint"}) - found:
        raise AthenaError(f"{path}: missing {', '.join(sorted(missing))}")
    if unknown := found - keys - {"fingerprint"}:
        raise AthenaError(f"{path}: unknown config key {', '.join(sorted(unknown))}; known: {', '.join(sorted(keys))}")
    fingerprint = data.pop("fingerprint")
    if data["format"] != FORMAT:
        raise AthenaError(f"{path}: format {data['format']}; this version reads format {FORMAT}")
    if (actual := digest_json(data)) != fingerprint:
        raise AthenaError(
            f"{path} was edited: it says fingerprint {fingerprint[:12]}, its content has {actual[:12]}; "
            "restore the file or make the artifact anew"
        )
    return data


def load_tensors(path: Path, digest: str, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors that must be these and no others, bit for bit as they were written."""
    if not path.is_file():
        raise AthenaError(f"{path} does not exist: {path.parent} is not a complete artifact")
    if (actual := sha256(path)) != digest:
        raise AthenaError(
            f"{path} is damaged or was replaced: its config expects sha256 {digest[:12]}, the file has {actual[:12]}"
        )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise AthenaError(f"{path} is not a readable safetensors file ({error})") from None
    check_names(path, tensors, expected)
    return tensors


def check_names(path: Path, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Exactly the expected names and shapes."""
    if missing := sorted(set(expected) - set(found)):
        raise AthenaError(f"{path}: missing {len(missing)} tensors, the first is {missing[0]}")
    if extra := sorted(set(found) - set(expected)):
        raise AthenaError(f"{path}: {len(extra)} tensors that do not belong, the first is {extra[0]}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise AthenaError(
                f"{path}: {name} has shape {list(tensor.shape)}, its config says {list(expected[name].shape)}"
            )


def save_memory(folder: Path, config: MemoryConfig, constants: HashConstants, table: nn.Module) -> str:
    """Write a table and its addressing; returns the memory's fingerprint."""
    digest = save_tensors(folder / TABLE, dict(table.state_dict()))
    data = {
        "format": FORMAT,
        **config.model_dump(mode="json"),
        "canonical_version": CANONICAL_VERSION,
        "hash": constants.to_json(),
        "files": {TABLE: digest},
    }
    return save_config(folder / MEMORY_CONFIG, data)


def load_memory_config(folder: Path) -> tuple[MemoryConfig, HashConstants, str, str]:
    """Config, hash constants, the table's digest and the memory's fingerprint."""
    path = folder / MEMORY_CONFIG
    data = load_config(path, {"format", "canonical_version", "hash", "files", *MemoryConfig.model_fields})
    fingerprint = digest_json(data)
    if data["canonical_version"] != CANONICAL_VERSION:
        raise AthenaError(
            f"{path}: canonical text version {data['canonical_version']}; this version makes {CANONICAL_VERSION}"
        )
    config = MemoryConfig.build({k: data[k] for k in MemoryConfig.model_fields}, str(path))
    constants = HashConstants.from_json(data["hash"], str(path))
    constants.check(config.orders, config.heads, str(path))
    return config, constants, _file_digest(path, data, TABLE), fingerprint


def load_table(folder: Path, digest: str, table: nn.Module) -> None:
    """Fill a table from its file."""
    table.load_state_dict(load_tensors(folder / TABLE, digest, dict(table.state_dict())))


def map_table(folder: Path, digest: str, table: Table) -> None:
    """Read a table's rows from its file whenever they are asked for (after one look at all of them, for the digest)."""
    table.map_rows(load_tensors(folder / TABLE, digest, dict(table.state_dict()))["weight"])


ADAPTER_KEYS = {"format", "version", "stage", "config", "backbone", "tokenizer", "memory", "files"}


def save_adapter(folder: Path, data: dict[str, Any], sites: nn.Module) -> None:
    """Write the readers, generators and routers, and all that they were made with."""
    digest = save_tensors(folder / ADAPTER, dict(sites.state_dict()))
    save_config(folder / ADAPTER_CONFIG, {"format": FORMAT, **data, "files": {ADAPTER: digest}})


def load_adapter_config(folder: Path) -> tuple[AthenaConfig, dict[str, Any]]:
    """The adapter's configuration and everything else its config says."""
    path = folder / ADAPTER_CONFIG
    data = load_config(path, ADAPTER_KEYS)
    config = AthenaConfig.build(_finite(data["config"]), str(path))
    return config, data


def load_sites(folder: Path, data: dict[str, Any], sites: nn.Module) -> None:
    """Fill the sites from their file."""
    digest = _file_digest(folder / ADAPTER_CONFIG, data, ADAPTER)
    sites.load_state_dict(load_tensors(folder / ADAPTER, digest, dict(sites.state_dict())))


def json_config(config: AthenaConfig) -> dict[str, Any]:
    """A config as strict JSON: infinity, which JSON lacks, as a string."""
    data = config.model_dump(mode="json")
    data["router"]["tau"] = config.router.tau if abs(config.router.tau) != float("inf") else str(config.router.tau)
    return data


def _finite(config: Any) -> Any:
    if isinstance(config, dict) and isinstance(config.get("router"), dict):
        tau = config["router"].get("tau")
        return {**config, "router": {**config["router"], "tau": float(tau) if isinstance(tau, str) else tau}}
    return config


def _file_digest(path: Path, data: dict[str, Any], name: str) -> str:
    files = data["files"]
    if not isinstance(files, dict) or set(files) != {name}:
        raise AthenaError(f"{path}: files must name exactly {name}")
    return files[name]


def find_artifact(path_or_repo: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """A local folder, or a snapshot of a hub repository."""
    folder = Path(path_or_repo)
    if folder.is_dir():
        return folder
    name = str(path_or_repo)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise AthenaError(f"no folder {name!r} here, and it is not a hub repository id such as 'name/repo'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, revision=revision, token=token))
    except (HfHubHTTPError, OSError) as error:
        raise AthenaError(f"no folder {name!r} here, and the hub did not give it ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
