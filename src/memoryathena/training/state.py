"""What a checkpoint holds of a running stage, as plain tensors by name, the same for any number of processes.

parameter/NAME                  a trained parameter
state/NAME/KEY                  what its optimiser keeps
rows/table.weight/KEY           for the table: the rows that have any state,
values/table.weight/KEY         and theirs
random/cpu, random/cuda         [processes, bytes]
"""

import hashlib

import torch
from torch import Tensor, nn

from memoryathena.backbone.fingerprint import backbone_fingerprint, digest_json, tokenizer_fingerprint
from memoryathena.backbone.model import AthenaModel
from memoryathena.errors import AthenaError
from memoryathena.training.distributed import OwnRows, World

TABLE = "table.weight"


def frozen_digest(model: AthenaModel, parameters: dict[str, nn.Parameter]) -> str:
    """What a stage builds on and leaves as it is: config, addressing, backbone, and the memory's other parameters."""
    facts = {
        "config": model.config_athena.model_dump(mode="json"),
        "hash": model.constants.to_json(),
        "backbone": backbone_fingerprint(model.host, model._injection.blocks),
        "tokenizer": tokenizer_fingerprint(model.tokenizer)["sha256"],
    }
    digest = hashlib.sha256(digest_json(facts).encode())
    for name, value in model.memory.named_parameters():
        if name not in parameters:
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def collect(
    world: World,
    parameters: dict[str, nn.Parameter],
    rows: OwnRows | None,
    optimisers: list[torch.optim.Optimizer],
) -> dict[str, Tensor]:
    """Everything by name. All processes call it; the main one gets it whole."""
    tensors = {f"parameter/{name}": parameter.detach() for name, parameter in parameters.items()}
    names = {id(parameter): name for name, parameter in parameters.items() if name != TABLE}
    for optimiser in optimisers:
        for parameter, state in optimiser.state.items():
            for key, value in sorted(state.items()):
                value = torch.as_tensor(value)
                if rows is None or parameter is not rows.parameter or value.shape[:1] != parameter.shape[:1]:
                    name = names.get(id(parameter), TABLE)
                    tensors[f"state/{name}/{key}"] = value
                    continue
                # A negative zero is a state too: what is brought back must be bit for bit.
                some = (value != 0) | value.signbit()
                index_N = some.view(len(value), -1).any(1).nonzero()[:, 0]
                for label, part in (("rows", index_N + rows.start), ("values", value[index_N])):
                    if (whole := world.gather(part)) is not None:
                        tensors[f"{label}/{TABLE}/{key}"] = whole
    for device, drawn in _random(parameters).items():
        if (all_random := world.gather(drawn[None])) is not None:
            tensors[f"random/{device}"] = all_random
    return tensors


def restore(
    tensors: dict[str, Tensor],
    where: str,
    world: World,
    parameters: dict[str, nn.Parameter],
    rows: OwnRows | None,
    optimisers: list[torch.optim.Optimizer],
) -> None:
    """Put everything back; each process takes its own rows."""
    saved = {name.removeprefix("parameter/") for name in tensors if name.startswith("parameter/")}
    if odd := sorted(saved ^ set(parameters)):
        raise AthenaError(f"{where} is of another run: {odd[0]!r} is trained in one of them only")
    with torch.no_grad():
        for name, parameter in parameters.items():
            found = tensors[f"parameter/{name}"]
            if found.shape != parameter.shape:
                raise AthenaError(
                    f"{where} is of another run: {name} has shape {list(found.shape)} there, "
                    f"{list(parameter.shape)} here"
                )
            parameter.copy_(found)
    own = {id(parameter): name for name, parameter in parameters.items() if name != TABLE}
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                name = own.get(id(parameter), TABLE)
                state = _under(tensors, f"state/{name}/")
                if rows is not None and parameter is rows.parameter:
                    for key, index_N in _under(tensors, f"rows/{TABLE}/").items():
                        state[key] = _own_rows(rows, index_N, tensors[f"values/{TABLE}/{key}"])
                if state:
                    # AdamW keeps its step count on the CPU, everything else beside the parameter. Copies: what was
                    # loaded may be the file itself, which will be deleted.
                    optimiser.state[parameter] = {
                        key: value.to("cpu" if key == "step" else parameter.device, copy=True)
                        for key, value in state.items()
                    }
    _set_random(tensors, world)


def _own_rows(rows: OwnRows, index_N: Tensor, values: Tensor) -> Tensor:
    """This process's range, zero where nothing was written."""
    mine_N = (index_N >= rows.start) & (index_N < rows.stop)
    out = values.new_zeros(rows.stop - rows.start, *values.shape[1:])
    out[index_N[mine_N] - rows.start] = values[mine_N]
    return out


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _random(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Random states: the CPU's and, where the memory is on a GPU, that GPU's."""
    device = next(iter(parameters.values())).device
    states = {"cpu": torch.get_rng_state().to(device)}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).to(device)
    return states


def _set_random(tensors: dict[str, Tensor], world: World) -> None:
    """Each process its own; with another number of processes than before there is nothing to go on from."""
    for device, states in _under(tensors, "random/").items():
        if len(states) != world.size:
            continue
        own = states[world.rank].cpu().clone()  # torch reads it as a struct: a view may lie where that crashes
        if device == "cpu":
            torch.set_rng_state(own)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(own)
