"""The effect of a rotation on the two errors of a static scale, rounding and clipping, in one linear layer in float64.

docs/quantization.md states the results. Points have a standard normal distribution; one dimension is multiplied by 128
and its column of the weight divided by 128, as `--control outlier` does. The weights have 16 bits, so that the errors
of the inputs are measured.
"""

import re
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from istar.quantization.equivalent_models import random_orthogonal, rotate_inputs
from istar.quantization.linear_layers import Form, InputRanges, forward_observed, quantize_layers
from tests.quantization.test_guide_of_quantization import GUIDE

DIMENSIONS, EVALUATED, SEEDS = 64, 1000, 10
FEW_POINTS, MANY_POINTS = 8, 512
"""Numbers of calibration points, drawn from the same distribution as the evaluated points."""


def make_layer_and_points(seed: int, num_calibration: int, factor: float) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return a linear layer without bias, its calibration points and its evaluated points."""
    generator = torch.Generator().manual_seed(seed)
    weight, points = (
        torch.randn(num_rows, DIMENSIONS, generator=generator, dtype=torch.float64)
        for num_rows in (DIMENSIONS, num_calibration + EVALUATED)
    )
    factors = torch.ones(DIMENSIONS, dtype=torch.float64)
    factors[0] = factor
    layer = nn.Linear(DIMENSIONS, DIMENSIONS, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(weight / factors)
    points = points * factors
    return nn.Sequential(layer), points[:num_calibration], points[num_calibration:]


@cache
def compute_error(bits: int, num_calibration: int, is_rotated: bool, factor: float = 128.0) -> float:
    """Return the relative error of the outputs, a root mean square over seeds.

    The ranges are those of `num_calibration` other points, or those of the evaluated points if it is 0.
    """
    errors = []
    for seed in range(SEEDS):
        model, calibration_points, points = make_layer_and_points(seed, num_calibration, factor)
        with torch.no_grad():
            expected = model(points)
        name = "0"
        if is_rotated:
            model, name = rotate_inputs(model, ["0"], seed), "0.1"
        ranges = InputRanges()
        with torch.no_grad():
            inputs = calibration_points if num_calibration else points
            layers = {name: model.get_submodule(name)}
            forward_observed(model, layers, {"input": inputs}, torch.ones(len(inputs)), ranges.update)
            result = quantize_layers(model, [name], Form(16, bits), ranges.largest)(points)
        errors.append((result - expected).square().mean() / expected.square().mean())
    return float(torch.stack(errors).mean().sqrt())


def test_where_nothing_is_clipped_a_rotation_lowers_the_error_in_8_bits() -> None:
    """The ranges are those of the evaluated points."""
    assert compute_error(8, 0, is_rotated=True) < 0.5 * compute_error(8, 0, is_rotated=False)
    assert compute_error(12, 0, is_rotated=True) < 0.5 * compute_error(12, 0, is_rotated=False)


def test_a_rotation_makes_clipping_expensive() -> None:
    """In 16 bits, rounding is negligible, so that the error is that of clipping."""
    for is_rotated in (False, True):
        assert compute_error(16, 0, is_rotated) < 0.01
        assert compute_error(16, FEW_POINTS, is_rotated) > 3 * compute_error(16, MANY_POINTS, is_rotated)
    assert compute_error(16, FEW_POINTS, is_rotated=True) > 10 * compute_error(16, FEW_POINTS, is_rotated=False)
    assert compute_error(16, MANY_POINTS, is_rotated=True) > 10 * compute_error(16, MANY_POINTS, is_rotated=False)


@pytest.mark.parametrize("is_rotated", [False, True])
def test_the_error_in_16_bits_is_that_of_clipped_points(is_rotated: bool) -> None:
    """Clip in numpy, without rounding."""
    errors = []
    for seed in range(SEEDS):
        model, calibration_points, points = make_layer_and_points(seed, FEW_POINTS, 128.0)
        matrix = random_orthogonal(DIMENSIONS, seed).numpy() if is_rotated else np.eye(DIMENSIONS)
        weight = model[0].weight.detach().numpy()
        limit = np.abs(calibration_points.numpy() @ matrix).max()
        clipped = np.clip(points.numpy() @ matrix, -limit, limit) @ matrix.T
        expected = points.numpy() @ weight.T
        errors.append(np.mean((clipped @ weight.T - expected) ** 2) / np.mean(expected**2))
    assert compute_error(16, FEW_POINTS, is_rotated) == pytest.approx(np.sqrt(np.mean(errors)), rel=0.05)


def test_a_rotation_pays_in_8_bits_if_the_calibration_suffices() -> None:
    assert compute_error(8, FEW_POINTS, is_rotated=True) > compute_error(8, FEW_POINTS, is_rotated=False)
    assert compute_error(8, MANY_POINTS, is_rotated=True) < 0.5 * compute_error(8, MANY_POINTS, is_rotated=False)


def test_in_4_bits_a_rotation_hurts_without_any_clipping() -> None:
    """Without a rotation, all other dimensions are rounded to 0 and the relative error is at most about 1."""
    assert 0.9 < compute_error(4, 0, is_rotated=False) < 1.1
    assert compute_error(4, 0, is_rotated=True) > 3


def test_a_smaller_outlier_is_cheaper_after_a_rotation_in_4_bits() -> None:
    assert compute_error(4, 0, is_rotated=True, factor=16.0) < 0.8 * compute_error(4, 0, is_rotated=False, factor=16.0)


def test_without_an_outlier_a_rotation_changes_little() -> None:
    assert compute_error(8, 0, is_rotated=True, factor=1.0) == pytest.approx(
        compute_error(8, 0, is_rotated=False, factor=1.0), rel=0.1
    )


def test_the_table_of_the_guide() -> None:
    rows = re.findall(r"^\| (.*?) ?\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.MULTILINE)
    assert len(rows) == 6
    num_calibration = 0
    for source, bits, error_without_rotation, error_with_rotation in rows:
        if source:
            num_calibration = 0 if "evaluated" in source else int(source.split()[0])
        for printed_error, is_rotated in ((error_without_rotation, False), (error_with_rotation, True)):
            digits = len(printed_error.partition(".")[2])
            assert float(printed_error) == pytest.approx(
                compute_error(int(bits), num_calibration, is_rotated), abs=0.6 * 10**-digits
            )
