import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.formats import ExpertFormat, tier_format
from dynaexq.formats.interleave import pack_bf16, pack_matrix, unpack_bf16, unpack_codes, unpack_matrix
from dynaexq.formats.layout import matrix_bytes

formats = st.builds(
    tier_format, st.sampled_from(["int1", "int2", "int3", "int4", "int8"]), st.sampled_from([32, 64, 128])
)


def random_codes(fmt: ExpertFormat, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << fmt.bits, (rows, columns), generator=generator).to(torch.uint8)
    meta = torch.randn((2, rows, columns // fmt.group_size), generator=generator).to(torch.float16)
    return codes, meta[0], meta[1]


@given(formats, st.integers(1, 5), st.integers(1, 4), st.integers(0, 1 << 30))
def test_packing_is_bit_exact_both_ways(fmt: ExpertFormat, tiles: int, groups: int, seed: int) -> None:
    rows, columns = 8 * tiles, fmt.group_size * groups
    codes, scale, offset = random_codes(fmt, rows, columns, seed)
    stored = None if fmt.symmetric else offset
    packed = pack_matrix(fmt, codes, scale, stored)
    assert packed.dtype == torch.uint8
    assert packed.numel() == matrix_bytes(fmt, rows, columns)
    found = unpack_matrix(fmt, packed, rows, columns)
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1].view(torch.int16), scale.view(torch.int16))
    assert found[2] is None if stored is None else torch.equal(found[2].view(torch.int16), offset.view(torch.int16))


@given(formats, st.integers(0, 1 << 30), st.data())
def test_every_code_stands_where_the_document_says(fmt: ExpertFormat, seed: int, data: st.DataObject) -> None:
    """docs/format.md, written out by hand for single positions."""
    rows, columns = 16, 2 * fmt.group_size
    codes, scale, offset = random_codes(fmt, rows, columns, seed)
    packed = pack_matrix(fmt, codes, scale, None if fmt.symmetric else offset)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    group, k = divmod(column, fmt.group_size)
    record = fmt.group_size * fmt.bits + fmt.meta_bytes
    base = (row // 8 * 2 + group) * record

    def stored(start: int, bits: int) -> int:
        vector, rest = divmod(k, 32 // bits)
        plane, byte = divmod(rest, 4)
        return int(packed[start + vector * 32 + row % 8 * 4 + byte]) >> plane * bits & (1 << bits) - 1

    parts = (2, 1) if fmt.bits == 3 else (fmt.bits,)
    code = stored(base, parts[0])
    if fmt.bits == 3:
        code |= stored(base + 2 * fmt.group_size, 1) << 2
    assert code == int(codes[row, column])
    at = base + fmt.group_size * fmt.bits + row % 8 * 2
    assert packed[at : at + 2].view(torch.float16).item() == scale[row, group].item()


@given(st.sampled_from(["int2+2", "int4+4"]), st.sampled_from([32, 64, 128]), st.integers(0, 1 << 30))
def test_nested_versions_hold_codes_alone(tier: str, group: int, seed: int) -> None:
    fmt = tier_format(tier, group)
    codes, *_ = random_codes(fmt, 16, 2 * group, seed)
    packed = pack_matrix(fmt, codes, None, None)
    assert packed.numel() == matrix_bytes(fmt, 16, 2 * group) == codes.numel() * fmt.bits // 8
    assert torch.equal(unpack_codes(fmt, packed.reshape(2, 2, -1)), codes)


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 1 << 30))
def test_bf16_tiles_round_trip(tiles: int, columns: int, seed: int) -> None:
    matrix = torch.randn((8 * tiles, columns), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    packed = pack_bf16(matrix)
    assert torch.equal(unpack_bf16(packed, 8 * tiles, columns), matrix)
    assert packed.view(torch.bfloat16)[8 * 0 + 3] == matrix[3, 0]  # column by column, 8 rows each
