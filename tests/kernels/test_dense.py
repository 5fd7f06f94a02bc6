from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dynaexq.core import OptionError
from dynaexq.kernels.dense import (
    PackedMatrix,
    PackedRows,
    check_dense,
    dense_format,
    embedding_bytes,
    packed_bytes,
)

FORMS = ("bf16", "int8", "int4")
LOST = {"bf16": 0.003, "int8": 0.008, "int4": 0.12}


@pytest.mark.parametrize("activations", ["int8", "fp32"])
@pytest.mark.parametrize("dense", FORMS)
@pytest.mark.parametrize("shape", [(64, 64), (203, 96), (9, 128), (1, 160)])
def test_product_with_the_restored_matrix(shape: tuple[int, int], dense: str, activations: str) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape) * 0.05, torch.randn(shape[0])
    matrix = PackedMatrix(weight.bfloat16(), dense, activations)
    assert matrix.packed.nbytes == packed_bytes(dense, *shape)
    assert (matrix.restore() - weight).norm() / weight.norm() < LOST[dense]
    for lead in ((), (1,), (3, 5), (70,), (0,)):
        x = torch.randn(*lead, shape[1])
        expected = F.linear(x.double(), matrix.restore().double(), bias.double())
        found = matrix.multiply(x, bias)
        assert found.shape == expected.shape
        bound = 1e-5 if activations == "fp32" or dense == "bf16" else 3e-4 if dense == "int8" else 0.02
        assert (found - expected).norm() <= bound * expected.norm()


def test_rows_of_a_batch_do_not_depend_on_each_other() -> None:
    torch.manual_seed(0)
    matrix = PackedMatrix(torch.randn(200, 192), "int4", "int8")
    x = torch.randn(37, 192)
    assert torch.equal(matrix.multiply(x, None), torch.cat([matrix.multiply(x[i : i + 1], None) for i in range(37)]))
    narrow = x.bfloat16()
    assert torch.equal(matrix.multiply(narrow, None), matrix.multiply(narrow.float(), None).bfloat16())


def test_widths_that_no_group_divides_stay_bf16() -> None:
    assert dense_format("int4", 50).name == "bf16"
    assert dense_format("int8", 96).group_size == 32
    assert dense_format("int8", 128).group_size == 64
    matrix = PackedMatrix(torch.randn(16, 50), "int4", "int8")
    assert torch.equal(matrix.restore(), matrix.restore().bfloat16().float())


@pytest.mark.parametrize("dense", FORMS)
def test_embeddings(dense: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5000, 64)
    weight[7] = 0
    rows = PackedRows(weight, dense)
    ids = torch.tensor([[0, 7, 4999], [1, 2, 4096]])
    found = rows.take(ids, torch.float32)
    assert (found - weight[ids]).norm() / weight[ids].norm() < 0.01
    assert not found[0, 1].any()
    assert rows.take(ids, torch.bfloat16).dtype == torch.bfloat16
    assert embedding_bytes(dense, 5000, 64) == (5000 * 128 if dense == "bf16" else 5000 * (64 + 2))


def test_unknown_form() -> None:
    with pytest.raises(OptionError, match="unknown dense 'int3'; known are full, bf16, int8, int4"):
        check_dense("int3")
