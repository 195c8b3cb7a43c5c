"""Quality and cost of a network: how good its outputs are, and how much memory and computation they need.

Example:
    >>> from shaver.measure import cost, quality
    >>> quality(model, test_loader).accuracy
    >>> cost(model, x).flops_sparse
"""

from shaver.measure.cost import Cost, cost, summary
from shaver.measure.flops import Flops, flops
from shaver.measure.latency import Latency, latency
from shaver.measure.memory import peak_memory
from shaver.measure.quality import Quality, quality

__all__ = ["Cost", "Flops", "Latency", "Quality", "cost", "flops", "latency", "peak_memory", "quality", "summary"]
