import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import BLOCK_BYTES, ExpertShape, OptionError
from dynaexq.formats import TIERS, VersionLayout, tier_format

shapes = st.builds(ExpertShape, st.integers(1, 12).map(lambda n: n * 128), st.integers(1, 12).map(lambda n: n * 128))


@given(shapes, st.sampled_from(sorted(TIERS)), st.sampled_from([32, 64, 128]))
def test_sections_are_aligned_disjoint_and_inside_the_extent(shape: ExpertShape, tier: str, group: int) -> None:
    layout = VersionLayout.of(tier_format(tier, group), shape)
    end = 0
    for section in layout.sections:
        assert section.offset % 64 == 0
        assert section.offset >= end
        end = section.offset + section.nbytes
    assert end <= layout.extent_bytes < end + BLOCK_BYTES + 128
    assert layout.extent_bytes % BLOCK_BYTES == 0


@given(shapes, st.sampled_from(["int1", "int2", "int4", "int8"]), st.sampled_from([32, 64, 128]))
def test_payload_is_codes_plus_sixteen_bits_a_scale_and_offset(shape: ExpertShape, tier: str, group: int) -> None:
    fmt = tier_format(tier, group)
    meta = 16 if tier == "int8" else 32
    assert VersionLayout.of(fmt, shape).payload_bytes * 8 == shape.weights * fmt.bits + shape.weights // group * meta


def test_known_sizes() -> None:
    qwen = ExpertShape(2048, 768)
    sizes = {tier: VersionLayout.of(tier_format(tier, 64), qwen).payload_bytes for tier in TIERS}
    assert sizes == {
        "int1": 884736,
        "int2": 1474560,
        "int2d3": 1671168,  # a third more of a bit
        "int2d4": 1867776,
        "int3": 2064384,
        "int3d4": 2260992,
        "int4": 2654208,
        "int2+2": 1179648,  # what int2 lacks: 2 bits a weight, no scales
        "int4d8": 3391488,
        "int8": 4866048,
        "int4+4": 2359296,
        "bf16": 9437184,
    }


@pytest.mark.parametrize(
    ("shape", "tier", "group", "words"),
    [
        (ExpertShape(96, 64), "int4", 64, ["group size 64", "hidden size 96", "--group-size 32"]),
        (ExpertShape(64, 48), "int4", 32, ["expert width 48", "only the bf16 tier"]),
        (ExpertShape(60, 64), "bf16", 64, ["hidden size 60", "multiple of 8"]),
    ],
)
def test_unfit_shapes_are_refused_with_a_way_out(shape: ExpertShape, tier: str, group: int, words: list[str]) -> None:
    with pytest.raises(OptionError) as error:
        VersionLayout.of(tier_format(tier, group), shape)
    assert all(word in str(error.value) for word in words)


def test_unknown_tier_and_group_size_name_the_known_ones() -> None:
    known = r"unknown tier 'int5'; known tiers are int1, int2, int2d3, int2d4, int3, int3d4, int4, int2\+2, int4d8, "
    with pytest.raises(OptionError, match=known):
        tier_format("int5")
    with pytest.raises(OptionError, match="unknown group size 48; known group sizes are 32, 64, 128"):
        tier_format("int4", 48)
