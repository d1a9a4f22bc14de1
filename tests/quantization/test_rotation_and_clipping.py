"""What a rotation does to the two errors of a static scale, rounding and clipping, in one linear layer in float64.

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

from istar.quantization.controls import random_orthogonal, rotate_inputs
from istar.quantization.linear_layers import Form, InputRanges, forward_observed, quantize_layers
from tests.quantization.test_guide_of_quantization import GUIDE

DIMENSIONS, EVALUATED, SEEDS = 64, 1000, 10
FEW, MANY = 8, 512
"""Numbers of calibration points, drawn from the same distribution as the evaluated points."""


def layer_and_points(seed: int, calibration: int, factor: float) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A layer without bias with calibration and evaluation points."""
    generator = torch.Generator().manual_seed(seed)
    weight, points = (
        torch.randn(rows, DIMENSIONS, generator=generator, dtype=torch.float64)
        for rows in (DIMENSIONS, calibration + EVALUATED)
    )
    factors = torch.ones(DIMENSIONS, dtype=torch.float64)
    factors[0] = factor
    layer = nn.Linear(DIMENSIONS, DIMENSIONS, bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(weight / factors)
    points = points * factors
    return nn.Sequential(layer), points[:calibration], points[calibration:]


@cache
def error(bits: int, calibration: int, is_rotated: bool, factor: float = 128.0) -> float:
    """Relative error of the outputs, root mean square over seeds.

    The ranges are those of `calibration` other points, or those of the evaluated points if it is 0.
    """
    errors = []
    for seed in range(SEEDS):
        model, calibrating, points = layer_and_points(seed, calibration, factor)
        with torch.no_grad():
            expected = model(points)
        name = "0"
        if is_rotated:
            model, name = rotate_inputs(model, ["0"], seed), "0.1"
        ranges = InputRanges()
        with torch.no_grad():
            inputs = calibrating if calibration else points
            layers = {name: model.get_submodule(name)}
            forward_observed(model, layers, {"input": inputs}, torch.ones(len(inputs)), ranges.update)
            result = quantize_layers(model, [name], Form(16, bits), ranges.largest)(points)
        errors.append((result - expected).square().mean() / expected.square().mean())
    return float(torch.stack(errors).mean().sqrt())


def test_where_nothing_is_clipped_a_rotation_lowers_the_error_in_8_bits() -> None:
    """The ranges are those of the evaluated points."""
    assert error(8, 0, is_rotated=True) < 0.5 * error(8, 0, is_rotated=False)
    assert error(12, 0, is_rotated=True) < 0.5 * error(12, 0, is_rotated=False)


def test_a_rotation_makes_clipping_expensive() -> None:
    """In 16 bits, rounding is negligible, so that the error is that of clipping."""
    for is_rotated in (False, True):
        assert error(16, 0, is_rotated) < 0.01
        assert error(16, FEW, is_rotated) > 3 * error(16, MANY, is_rotated)
    assert error(16, FEW, is_rotated=True) > 10 * error(16, FEW, is_rotated=False)
    assert error(16, MANY, is_rotated=True) > 10 * error(16, MANY, is_rotated=False)


@pytest.mark.parametrize("is_rotated", [False, True])
def test_the_error_in_16_bits_is_that_of_clipped_points(is_rotated: bool) -> None:
    """Clip in numpy, without rounding."""
    errors = []
    for seed in range(SEEDS):
        model, calibrating, points = layer_and_points(seed, FEW, 128.0)
        matrix = random_orthogonal(DIMENSIONS, seed).numpy() if is_rotated else np.eye(DIMENSIONS)
        weight = model[0].weight.detach().numpy()
        limit = np.abs(calibrating.numpy() @ matrix).max()
        clipped = np.clip(points.numpy() @ matrix, -limit, limit) @ matrix.T
        expected = points.numpy() @ weight.T
        errors.append(np.mean((clipped @ weight.T - expected) ** 2) / np.mean(expected**2))
    assert error(16, FEW, is_rotated) == pytest.approx(np.sqrt(np.mean(errors)), rel=0.05)


def test_a_rotation_pays_in_8_bits_if_the_calibration_suffices() -> None:
    assert error(8, FEW, is_rotated=True) > error(8, FEW, is_rotated=False)
    assert error(8, MANY, is_rotated=True) < 0.5 * error(8, MANY, is_rotated=False)


def test_in_4_bits_a_rotation_hurts_without_any_clipping() -> None:
    """Without it, all other dimensions are rounded to 0 and the relative error is at most about 1."""
    assert 0.9 < error(4, 0, is_rotated=False) < 1.1
    assert error(4, 0, is_rotated=True) > 3


def test_a_smaller_outlier_is_cheaper_after_a_rotation_in_4_bits() -> None:
    assert error(4, 0, is_rotated=True, factor=16.0) < 0.8 * error(4, 0, is_rotated=False, factor=16.0)


def test_without_an_outlier_a_rotation_changes_little() -> None:
    assert error(8, 0, is_rotated=True, factor=1.0) == pytest.approx(error(8, 0, is_rotated=False, factor=1.0), rel=0.1)


def test_the_table_of_the_guide() -> None:
    rows = re.findall(r"^\| (.*?) ?\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.MULTILINE)
    assert len(rows) == 6
    calibration = 0
    for source, bits, as_it_is, rotated in rows:
        if source:
            calibration = 0 if "evaluated" in source else int(source.split()[0])
        for number, is_rotated in ((as_it_is, False), (rotated, True)):
            digits = len(number.partition(".")[2])
            assert float(number) == pytest.approx(error(int(bits), calibration, is_rotated), abs=0.6 * 10**-digits)
