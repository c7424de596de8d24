"""MemoryAthena: a memory for frozen causal language models.

>>> from memoryathena import AthenaConfig, get_athena_model
>>> config = AthenaConfig.preset("tiny", sites=[2, 10])
>>> config.memory.memory_width
256
"""

from memoryathena.backbone.model import AthenaModel, get_athena_model
from memoryathena.config import AthenaConfig
from memoryathena.errors import AthenaError

__version__ = "0.1.0"

__all__ = ["AthenaConfig", "AthenaError", "AthenaModel", "__version__", "get_athena_model"]
