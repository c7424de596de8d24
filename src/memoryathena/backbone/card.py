"""The model card that `save_pretrained` writes."""

from typing import Any

from memoryathena.backbone.fetch import MODELS
from memoryathena.config import AthenaConfig

TEMPLATE = """\
---
library_name: memoryathena
base_model: {base}
tags:
- memoryathena
- engram
- frozen-backbone
---

# A memory for {base}

A learned n-gram table and its readers. The backbone itself is unchanged and not in this folder.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from memoryathena import AthenaModel

backbone = AutoModelForCausalLM.from_pretrained("{path}")
tokenizer = AutoTokenizer.from_pretrained("{path}")
model = AthenaModel.from_pretrained("THIS FOLDER OR REPOSITORY", backbone=backbone, tokenizer=tokenizer)
```

| | |
|---|---|
| backbone | {base} ({model_type}, width {width}, {blocks} blocks) |
| tokenizer | {tokenizer} |
| sites | {sites} |
| table | {heads} heads x {rows:,} rows x {row_width}, n-grams of {orders}, canonical `{canonical}` |
| parameters | {parameters:,} |
| stage reached | {stage} |
| admission | tau {tau}, rho {rho}, alpha at most {alpha_max} |

Loading checks the backbone, the tokenizer and every file against the fingerprints in `athena_config.json`.
"""


def model_card(config: AthenaConfig, stage: str, backbone: dict[str, Any], tokenizer: str, parameters: int) -> str:
    """The card's text."""
    memory = config.memory
    return TEMPLATE.format(
        base=backbone["name"],
        path=f"WHAT `athena fetch {backbone['name']}` PRINTS" if backbone["name"] in MODELS else backbone["name"],
        model_type=backbone["model_type"],
        width=backbone["width"],
        blocks=backbone["blocks"],
        tokenizer=tokenizer,
        sites=", ".join(map(str, config.sites or ())),
        heads=memory.total_heads,
        rows=memory.rows,
        row_width=memory.width,
        orders=" and ".join(map(str, memory.orders)),
        canonical=memory.canonical,
        parameters=parameters,
        stage=stage,
        tau=config.router.tau,
        rho=config.router.rho,
        alpha_max=config.router.alpha_max,
    )
