import math

import numpy as np
import pytest
from scipy import stats

from istar.errors import UserError
from istar.statistics.correlation import Method, partial_correlation


def make_related_data(points: int, covariates: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    table = random.normal(3, 1, (points, covariates)) @ random.normal(size=(covariates, covariates))
    x = table.sum(axis=1) + random.normal(size=points)
    return x, 0.5 * x - 2 * table.sum(axis=1) + random.normal(size=points), table


@pytest.mark.parametrize("method", ["pearson", "spearman"])
@pytest.mark.parametrize("covariates", [1, 2, 4])
def test_the_value_is_that_of_the_inverse_correlation_matrix(covariates: int, method: Method) -> None:
    x, y, table = make_related_data(25, covariates, covariates)
    columns = np.column_stack([x, y, table])
    matrix = np.corrcoef(columns.T) if method == "pearson" else np.corrcoef(stats.rankdata(columns, axis=0).T)
    inverse = np.linalg.inv(matrix)
    expected = -inverse[0, 1] / math.sqrt(inverse[0, 0] * inverse[1, 1])
    assert partial_correlation(x, y, table, method).value == pytest.approx(expected, rel=1e-10)


def test_a_published_example() -> None:
    """A widely used example has four points with the correlation 0.970 and the partial correlation 0.919."""
    x, y, z = [2, 4, 15, 20], [1, 2, 3, 4], [0, 0, 1, 1]
    assert np.corrcoef(x, y)[0, 1] == pytest.approx(0.970, abs=5e-4)
    result = partial_correlation(x, y, z)
    assert result.value == pytest.approx(0.919, abs=5e-4)
    # The recursive formula for one covariate.
    xy, xz, yz = (np.corrcoef(a, b)[0, 1] for a, b in ((x, y), (x, z), (y, z)))
    assert result.value == pytest.approx((xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2)), rel=1e-12)
    # There are 4 - 3 - 1 = 0 degrees of freedom, so there is no interval.
    assert (result.low, result.high, result.points, result.covariates) == (None, None, 4, 1)


@pytest.mark.parametrize("covariates", [1, 3])
def test_the_p_value_is_that_of_a_regression_coefficient(covariates: int) -> None:
    x, y, table = make_related_data(15, covariates, 7)
    design = np.column_stack([x, table, np.ones(15)])
    coefficients = np.linalg.inv(design.T @ design) @ design.T @ y
    degrees = 15 - design.shape[1]
    variance = np.sum((y - design @ coefficients) ** 2) / degrees
    t = coefficients[0] / math.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0])
    assert partial_correlation(x, y, table).p_value == pytest.approx(2 * stats.t.sf(abs(t), degrees), rel=1e-8)


def test_without_covariates_it_is_the_correlation_of_scipy() -> None:
    x, y, _ = make_related_data(20, 1, 3)
    reference = stats.pearsonr(x, y)
    result = partial_correlation(x, y, np.empty((20, 0)), level=0.9)
    interval = reference.confidence_interval(0.9)
    assert result[:4] == pytest.approx((reference.statistic, interval.low, interval.high, reference.pvalue), rel=1e-9)
    spearman = stats.spearmanr(x, y)
    assert partial_correlation(x, y, [], "spearman").value == pytest.approx(spearman.statistic, rel=1e-12)


@pytest.mark.parametrize(("method", "factor"), [("pearson", 1.0), ("spearman", 1.06)])
def test_the_interval_is_fishers(method: Method, factor: float) -> None:
    x, y, table = make_related_data(30, 2, 1)
    result = partial_correlation(x, y, table, method)
    margin = stats.norm.ppf(0.975) * math.sqrt(factor / (30 - 3 - 2))
    expected = np.tanh(np.arctanh(result.value) + np.array([-margin, margin]))
    assert (result.low, result.high) == pytest.approx(expected, rel=1e-10)


def test_affine_changes_of_units_do_not_matter() -> None:
    x, y, table = make_related_data(12, 2, 5)
    result = partial_correlation(x, y, table)
    rescaled_result = partial_correlation(1e6 * x - 5, -1e-6 * y + 2, table @ np.array([[3.0, 1.0], [0.0, 1e4]]) + 7)
    assert rescaled_result.value == pytest.approx(-result.value, rel=1e-8)
    assert (rescaled_result.low, rescaled_result.high) == pytest.approx((-result.high, -result.low), rel=1e-8)
    monotone_result = partial_correlation(np.exp(x), y**3, np.exp(table), "spearman")
    assert monotone_result == partial_correlation(x, y, table, "spearman")


@pytest.mark.slow
def test_the_partial_interval_covers_no_correlation() -> None:
    """x and y depend on each other only through a covariate."""
    random = np.random.default_rng(0)
    is_covered = []
    for _ in range(2_000):
        z = random.normal(size=12)
        result = partial_correlation(z + random.normal(size=12), z + random.normal(size=12), z)
        assert result.low is not None
        assert result.high is not None
        is_covered.append(result.low <= 0 <= result.high)
    assert np.mean(is_covered) == pytest.approx(0.95, abs=0.02)


LINE = np.arange(9.0)


@pytest.mark.parametrize(
    ("x", "y", "covariates", "message"),
    [
        (LINE, LINE[:5], LINE, "x has 9 values and y has 5"),
        (LINE, LINE**2, LINE[:4], "expected a row for each of the 9 points"),
        (LINE, LINE**2, 2 * LINE + 1, "x is constant or a linear function of the covariates"),
        (LINE**2, np.ones(9), LINE, "y is constant or a linear function of the covariates"),
        (
            LINE**2,
            LINE**3,
            np.column_stack([LINE, -LINE]),
            "a covariate is constant or a linear function of the others",
        ),
        (LINE**2, LINE**3, np.full(9, 0.1), "a covariate is constant or a linear function of the others"),
        (LINE[:3], LINE[:3] ** 2, LINE[:3], "the number of points, with 1 covariate, is 3; expected 4 or more"),
        ([1, 2, math.nan], LINE[:3], [], "values of x include NaN"),
    ],
)
def test_points_without_an_answer(x, y, covariates, message: str) -> None:
    with pytest.raises(UserError) as error:
        partial_correlation(x, y, covariates)
    assert message in str(error.value)


def test_arguments_out_of_range() -> None:
    with pytest.raises(UserError, match="expected one of pearson, spearman"):
        partial_correlation(LINE, LINE**2, (), method="kendall")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"the confidence level is 1\.0"):
        partial_correlation(LINE, LINE**2, (), level=1.0)
