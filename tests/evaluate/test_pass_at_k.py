"""pass@k beside counts by hand and beside drawing every subset."""

import math
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from sftplay.evaluate.code import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("n", range(1, 9))
def test_it_is_the_share_of_subsets_with_a_right_answer(n):
    for right in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([1] * right + [0] * (n - right), k))
            assert pass_at_k(k, n=n, right=right) == pytest.approx(fmean(max(subset) for subset in subsets))


@pytest.mark.parametrize(("n", "right", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_what_cannot_be_estimated_is_refused(n, right, k):
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(k, n=n, right=right)


@pytest.mark.parametrize(("n", "k"), [(20, 5), (200, 100)])
def test_it_is_what_the_product_of_the_paper_gives(n, k):
    # Chen et al. 2021, figure 3: the form that they give as code
    for right in range(n + 1):
        product = 1.0 if n - right < k else 1.0 - np.prod(1.0 - k / np.arange(n - right + 1, n + 1))
        assert pass_at_k(k, n=n, right=right) == pytest.approx(product, abs=1e-12)


def test_the_standard_error_is_what_a_bootstrap_over_the_problems_finds():
    draw = np.random.default_rng(0)
    right = draw.integers(0, 11, size=164).tolist()
    mean, error = mean_pass_at_k(right, n=10, k=3)
    values = np.array([1 - math.comb(10 - each, 3) / math.comb(10, 3) for each in right])
    means = values[draw.integers(0, len(values), size=(20_000, len(values)))].mean(axis=1)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(means.std(), rel=0.02)  # 20,000 draws: 0.5 % of noise
