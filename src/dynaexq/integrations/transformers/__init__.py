"""Transformers plug-in: `import dynaexq.integrations.transformers`, then plain `from_pretrained` loads stores.

Registers the quantisation method `dynaexq` and the experts implementation `dynaexq`. Works on Transformers
5.19 to 5.24. This package is the only place that imports Transformers.
"""

from dynaexq.integrations.transformers.config import DynaExqConfig
from dynaexq.integrations.transformers.quantizer import DynaExqQuantizer, runtime_of
from dynaexq.integrations.transformers.source import CheckpointExperts

__all__ = ["CheckpointExperts", "DynaExqConfig", "DynaExqQuantizer", "runtime_of"]
