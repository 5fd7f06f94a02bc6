"""C++ parts: handle words and window epochs, aligned reads, checksums, kernels. All long calls run without the GIL."""

from dynaexq.native._native import (
    DecoderLayer,
    DecoderModel,
    ExpertLayers,
    HandleTable,
    LayerGate,
    PackedLinear,
    choose_codes,
    crc32c,
    crc32c_portable,
    instruction_sets,
    limit_malloc,
    normalize_rows,
    read_extent,
    team_kind,
)

__all__ = [
    "DecoderLayer",
    "DecoderModel",
    "ExpertLayers",
    "HandleTable",
    "LayerGate",
    "PackedLinear",
    "choose_codes",
    "crc32c",
    "crc32c_portable",
    "instruction_sets",
    "limit_malloc",
    "normalize_rows",
    "read_extent",
    "team_kind",
]
