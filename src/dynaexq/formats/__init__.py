"""Numeric formats: the byte layout of one expert version, packing, and the quantisers that fill it."""

from dynaexq.formats.base import TIERS, ExpertFormat, ExpertWeights, tier_format, tier_rank
from dynaexq.formats.codec import decode, encode
from dynaexq.formats.layout import LAYOUT_ID, VersionLayout
from dynaexq.formats.quantizers import DEFAULT_QUANTIZER, QUANTIZERS

__all__ = [
    "DEFAULT_QUANTIZER",
    "LAYOUT_ID",
    "QUANTIZERS",
    "TIERS",
    "ExpertFormat",
    "ExpertWeights",
    "VersionLayout",
    "decode",
    "encode",
    "tier_format",
    "tier_rank",
]
