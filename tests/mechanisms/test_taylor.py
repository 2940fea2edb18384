import pytest
import torch

from subquad.families.feature_maps import unit_vectors


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_unit_vectors_of_any_size(size):
    x = torch.randn(5, 7)
    torch.testing.assert_close(unit_vectors(x * size), unit_vectors(x))
    assert (unit_vectors(torch.zeros(2, 3)) == 0).all()
