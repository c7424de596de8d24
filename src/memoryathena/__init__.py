"""MemoryAthena: a memory for frozen causal language models.

>>> from memoryathena import AthenaConfig
>>> config = AthenaConfig.preset("tiny", sites=[2, 10])
>>> config.memory.memory_width
256
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memoryathena.backbone.model import AthenaModel, get_athena_model
    from memoryathena.config import AthenaConfig
    from memoryathena.errors import AthenaError

__version__ = "0.1.0"

__all__ = ["AthenaConfig", "AthenaError", "AthenaModel", "__version__", "get_athena_model"]

_HOMES = {
    "AthenaConfig": "memoryathena.config",
    "AthenaError": "memoryathena.errors",
    "AthenaModel": "memoryathena.backbone.model",
    "get_athena_model": "memoryathena.backbone.model",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `athena fetch` and `athena --help` need neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
