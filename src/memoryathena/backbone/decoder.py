"""Greedy generation on recorded steps, and which calls of `generate` are one.

Shapes: B rows, T prompt positions, N new positions.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memoryathena.backbone.graph import Capture, Shape, StepGraph, cuda_graph
from memoryathena.backbone.slots import Column, slot_cache
from memoryathena.errors import AthenaError

LENGTH_STEP = 64
"""Caches have a multiple of so many columns: prompts of similar length share one graph."""
ASK_EVERY = 16
"""Recorded steps run so often before the host asks whether every row has ended."""


class Decoder:
    """Keeps the steps that were made for a model, by pathway, rows and length. `AthenaModel.compile_decode` makes it.

    capture: how a step is recorded; None runs it as it is. fuse: the memory's own operations fused by torch.compile.
    """

    def __init__(self, model: Any, capture: Capture | None, fuse: bool, keep: int = 8):
        self.model, self.capture, self.fuse, self.keep = model, capture, fuse, keep
        self.steps: dict[Shape, StepGraph] = {}
        self.weights: object = None

    @torch.no_grad()
    def __call__(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor | None = None,
        *,
        max_new_tokens: int,
        ends: Sequence[int] = (),
        pad: int = 0,
    ) -> Tensor:
        """Prompts and their greedy continuations, as `generate` returns them: rows that ended are padded."""
        mask_BT = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
        if not bool(mask_BT[:, -1].all()):
            raise AthenaError("prompts of different lengths are padded on the left to be continued")
        B, T = ids_BT.shape
        self.model._injection.check_limit(T + max_new_tokens - 1)  # the last token is not read
        with self._fused():
            step = self._step_for(B, T + max_new_tokens)
            step.prefill(ids_BT, mask_BT)
            done = 1
            while done < max_new_tokens:
                if ends and self._ended(step.written_BL[:, T - 1 : T - 1 + done], ends):
                    break
                more = min(max_new_tokens - done, ASK_EVERY if self.capture is not None or not ends else 1)
                step.run(more)
                done += more
        written_BN = step.written_BL[:, T - 1 : T - 1 + done].clone()
        return torch.cat([ids_BT, _cut(written_BN, ends, pad)], dim=1)

    def forget(self) -> None:
        """Drop the steps made so far: something that they read has moved."""
        self.steps.clear()

    def _step_for(self, batch: int, length: int) -> StepGraph:
        """The step for this shape, made where it is new or weights have moved since."""
        injection, memory = self.model._injection, self.model.memory
        # A graph reads weights at their places, and folded matrices as they were.
        places = tuple(p.data_ptr() for p in (*self.model.backbone.parameters(), *memory.table.parameters()))
        weights = places, tuple((p.data_ptr(), p._version) for p in memory.sites.parameters())
        if weights != self.weights:
            self.steps.clear()
            self.weights = weights
        shape = Shape(injection.plan, batch, -(-length // LENGTH_STEP) * LENGTH_STEP)
        if shape not in self.steps:
            while len(self.steps) >= self.keep:
                self.steps.pop(next(iter(self.steps)))
            self.steps[shape] = StepGraph(self.model, shape, self.capture)
        return self.steps[shape]

    @contextlib.contextmanager
    def _fused(self) -> Iterator[None]:
        injection = self.model._injection
        before, injection.fusing = injection.fusing, self.fuse
        try:
            yield
        finally:
            injection.fusing = before

    @staticmethod
    def _ended(written_BN: Tensor, ends: Sequence[int]) -> bool:
        return bool(_is_end(written_BN, ends).any(1).all())


def _cut(written_BN: Tensor, ends: Sequence[int], pad: int) -> Tensor:
    """Padding behind each row's end, and no column that is padding only."""
    if not ends:
        return written_BN
    end_BN = _is_end(written_BN, ends)
    after_BN = (end_BN.long().cumsum(1) - end_BN.long()) > 0
    return written_BN.masked_fill(after_BN, pad)[:, : int((~after_BN).sum(1).max())]


def _is_end(written_BN: Tensor, ends: Sequence[int]) -> Tensor:
    return torch.isin(written_BN, torch.tensor(ends, device=written_BN.device))


# -- which calls of `generate` are plain greedy decoding ------------------------------------------------------------

_HARMLESS = {
    *("max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "bos_token_id", "cache_implementation"),
    *("_from_model_config", "transformers_version", "disable_compile", "num_beams", "num_return_sequences"),
    *("use_cache", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"),  # sampling's
}
_NEUTRAL_AT_1 = {"repetition_penalty", "encoder_repetition_penalty", "length_penalty", "num_beam_groups"}


def greedy_call(model: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments for a `Decoder`, where a call of `generate` asks for nothing else than it gives; else None."""
    if kwargs.get("cache_implementation") != "static" or len(args) > 1 or not _simple(model.host):
        return None
    host = model.host
    config = copy.deepcopy(kwargs.get("generation_config") or host.generation_config)
    rest = config.update(**{key: value for key, value in kwargs.items() if key != "generation_config"})
    ids_BT = args[0] if args else rest.get("inputs", rest.get("input_ids"))
    if set(rest) - {"inputs", "input_ids", "attention_mask"} or not isinstance(ids_BT, Tensor) or ids_BT.ndim != 2:
        return None
    usual = type(config)().to_dict()
    told = {key: value for key, value in config.to_dict().items() if value and value != usual.get(key)}
    if any(key not in _HARMLESS and not (key in _NEUTRAL_AT_1 and value == 1) for key, value in told.items()):
        return None
    many = (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1
    if config.do_sample or many or config.use_cache is False or not config.max_new_tokens:
        return None
    mask_BT, pad, ends = rest.get("attention_mask"), config.pad_token_id, config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if mask_BT is None:
        if pad is not None and bool((ids_BT == pad).any()):  # transformers guesses what is padding
            return None
        mask_BT = torch.ones_like(ids_BT)
    if mask_BT.shape != ids_BT.shape or not bool(mask_BT[:, -1].all()) or bool((mask_BT.diff(dim=1) < 0).any()):
        return None
    pad = pad if pad is not None else ends[0] if ends else 0
    return {"ids_BT": ids_BT, "mask_BT": mask_BT, "max_new_tokens": config.max_new_tokens, "ends": ends, "pad": pad}


def _simple(host: Any) -> bool:
    """On one device, its weights as they are, every block with a whole past."""
    if len(set(getattr(host, "hf_device_map", {"": 0}).values())) > 1 or getattr(host, "hf_quantizer", None):
        return False
    try:
        slot_cache(host.config, 1, Column(torch.zeros(1)))
    except AthenaError:
        return False
    return True


def default_capture(device: torch.device) -> Capture | None:
    """CUDA graphs where there is CUDA."""
    return cuda_graph if device.type == "cuda" else None
