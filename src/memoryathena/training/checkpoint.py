"""Checkpoints: a folder is complete or absent. safetensors and JSON, never pickle."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memoryathena.errors import AthenaError

PREFIX = "checkpoint-"
KEPT = 2


def save_checkpoint(
    folder: Path,
    step: int,
    parameters: dict[str, nn.Parameter],
    optimisers: list[torch.optim.Optimizer],
    best: dict[str, Tensor],
    facts: dict[str, Any],
) -> Path:
    """Write parameters, optimiser states, the best so far, the random state and `facts`; rename; drop old ones."""
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    tensors |= {f"best/{name}": value.cpu().contiguous() for name, value in best.items()}
    names = {id(parameter): name for name, parameter in parameters.items()}
    tensors |= {f"parameter/{name}": p.detach().cpu().contiguous() for name, p in parameters.items()}
    for optimiser in optimisers:
        for parameter, state in optimiser.state.items():
            for key, value in state.items():
                tensors[f"state/{names[id(parameter)]}/{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    final = folder / f"{PREFIX}{step}"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{PREFIX}"))
    try:
        save_file(tensors, temporary / "state.safetensors")
        (temporary / "facts.json").write_text(json.dumps({**facts, "step": step}, indent=2) + "\n")
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
    except OSError as error:
        kept = newest_checkpoint(folder)
        raise AthenaError(
            f"cannot write {final}: {error.strerror or error}; the last complete checkpoint is {kept or 'none'}"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if (path / "facts.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def newest_checkpoint(folder: Path) -> Path | None:
    """The one to resume from."""
    found = checkpoints(folder)
    return found[-1] if found else None


def load_checkpoint(
    path: Path, parameters: dict[str, nn.Parameter], optimisers: list[torch.optim.Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Put everything back; returns the best parameters so far and the facts."""
    try:
        tensors = load_file(path / "state.safetensors")
        facts: dict[str, Any] = json.loads((path / "facts.json").read_text())
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise AthenaError(f"{path} is damaged ({error}): delete it to resume from the one before") from None
    saved = {name.removeprefix("parameter/") for name in tensors if name.startswith("parameter/")}
    if saved != set(parameters):
        odd = sorted(saved ^ set(parameters))[0]
        raise AthenaError(f"{path} is of another run: {odd!r} is trained in one of them only")
    torch.set_rng_state(tensors["rng"])
    names = {id(parameter): name for name, parameter in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"parameter/{name}"])
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                prefix = f"state/{names[id(parameter)]}/"
                state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                if state:
                    # AdamW keeps its step count on the CPU, everything else beside the parameter
                    optimiser.state[parameter] = {
                        key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
                    }
    best = {name.removeprefix("best/"): value for name, value in tensors.items() if name.startswith("best/")}
    return best, facts
