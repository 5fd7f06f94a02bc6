"""Quality: perplexity and divergence over texts."""

from dynaexq.evaluate.perplexity import Perplexity, Windows, cut_windows, measure_perplexity
from dynaexq.evaluate.texts import read_documents

__all__ = ["Perplexity", "Windows", "cut_windows", "measure_perplexity", "read_documents"]
