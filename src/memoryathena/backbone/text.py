"""Text in, text out."""

import torch
from transformers import set_seed

from memoryathena.backbone.model import AthenaModel
from memoryathena.backbone.sites import position_limit
from memoryathena.errors import AthenaError


def complete(model: AthenaModel, text: str, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0) -> str:
    """What the model adds to a text, under the pathway in use."""
    inputs = model.tokenizer(text, return_tensors="pt").to(model.input_device)
    limit = position_limit(model.config)
    length = inputs.input_ids.shape[1]
    if limit is not None and length + max_new_tokens > limit:
        raise AthenaError(
            f"the prompt has {length} tokens; with {max_new_tokens} new ones that is beyond the {limit} positions "
            f"that {model.config.model_type} was built for"
        )
    set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    pad = model.tokenizer.pad_token_id if model.tokenizer.pad_token_id is not None else model.tokenizer.eos_token_id
    with torch.no_grad():
        out = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            **sampling,
        )
    return model.tokenizer.decode(out[0, length:], skip_special_tokens=True)
