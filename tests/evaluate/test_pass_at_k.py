"""pass@k beside counts by hand and beside drawing every subset."""

from itertools import combinations
from statistics import fmean

import pytest

from sftplay.evaluate.code import pass_at_k


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
