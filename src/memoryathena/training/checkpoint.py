"""Checkpoints: a folder is complete or absent. safetensors and JSON, never pickle.

checkpoint-N/
  state.safetensors   the trained parameters, their optimisers' states, the random states
  best.safetensors    the parameters that did best on held-out text, unless these are they; a link to the file of the
                      checkpoint before where nothing was better since
  facts.json          step, options, history, the other files' digests and its own; written last

The table's optimiser state is written for the rows that have any: most rows of a large table were never read.
"""

import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from memoryathena.backbone.artifacts import sha256
from memoryathena.backbone.fingerprint import digest_json
from memoryathena.errors import AthenaError

PREFIX = "checkpoint-"
STATE, BEST, FACTS = "state.safetensors", "best.safetensors", "facts.json"
# Equal facts under these names are of one run and one best.
OF_THE_BEST = ("stage", "options", "data", "frozen", "best_step", "best_score")


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, Tensor], best: dict[str, Tensor], facts: dict[str, Any], keep: int
) -> Path:
    """Write a checkpoint beside its place, bring it to the disk, rename it; drop old ones.

    `best` is empty where there is none or where it is this step; facts["best_step"] says which.
    """
    final = folder / f"{PREFIX}{step}"
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{PREFIX}"))
        files = {STATE: _write(temporary / STATE, tensors)}
        if best:
            files[BEST] = _link_best(folder, temporary / BEST, facts) or _write(temporary / BEST, best)
        whole = {**facts, "step": step, "files": files}
        (temporary / FACTS).write_text(json.dumps({**whole, "digest": digest_json(whole)}, indent=1) + "\n")
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        temporary.chmod(0o755)
        # What has this step or a later one is of another run in this folder, which is begun anew.
        for other in (final, *(path for path in checkpoints(folder) if _step(path) > step)):
            _remove(other)
        temporary.replace(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        raise AthenaError(f"cannot write {final}: {reason(error)}; {last_complete(folder)}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    for old in checkpoints(folder)[:-keep]:
        _remove(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    named = (path for path in folder.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name))
    return sorted((path for path in named if (path / FACTS).is_file()), key=_step)


def newest_checkpoint(folder: Path) -> Path | None:
    """The one to resume from."""
    found = checkpoints(folder)
    return found[-1] if found else None


def last_complete(folder: Path | None) -> str:
    """The end of an error line."""
    found = newest_checkpoint(folder) if folder is not None else None
    return f"the last complete checkpoint is {found or 'none'}" + (", to go on from with --resume" if found else "")


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Tensors, the best parameters (empty where these are the best) and facts; every file as it was written."""
    try:
        facts, loaded = _facts(path), {}
        for name, digest in facts["files"].items():
            if sha256(path / name) != digest:
                raise OSError(f"{name} is not what was written")
            loaded[name] = load_file(path / name)
    except (SafetensorError, OSError, ValueError) as error:
        raise AthenaError(f"{path} is damaged ({reason(error)}): delete it to resume from the one before") from None
    return loaded[STATE], loaded.get(BEST, {}), facts


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in folder.glob(f".{PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def reason(error: BaseException) -> str:
    """An error's first line, without its numbers where the system has words."""
    text = getattr(error, "strerror", None) or str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def _step(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _remove(path: Path) -> None:
    """Out of sight first: what a kill leaves half-deleted must not pass for complete."""
    hidden = path.with_name(f".{path.name}")
    with suppress(OSError):
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _write(path: Path, tensors: dict[str, Tensor]) -> str:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    return sha256(path)


def _facts(path: Path) -> dict[str, Any]:
    """A checkpoint's facts; they must be as they were written."""
    facts = json.loads((path / FACTS).read_text())
    if not isinstance(facts, dict) or facts.pop("digest", None) != digest_json(facts):
        raise ValueError(f"{FACTS} is not what was written")
    return facts


def _link_best(folder: Path, path: Path, facts: dict[str, Any]) -> str | None:
    """The best of the checkpoint before, if it is of this run and still the best; its digest."""
    before = newest_checkpoint(folder)
    # Whatever cannot be read or linked (not every file system can) is written anew.
    with suppress(OSError, ValueError):
        if before is not None and (known := _facts(before))["files"].get(BEST) is not None:
            same = all(known.get(key) == facts.get(key) for key in OF_THE_BEST)
            if same:
                os.link(before / BEST, path)
                return str(known["files"][BEST])
    return None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
