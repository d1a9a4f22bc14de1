"""Simulated quantization, against torch's operators and a naive float64 loop."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.finetune.quantization import linear_layers as uniform
from istar.measures import isoscore

BITS = (8, 6, 4, 2)


def cloud(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def naive_quantize(values: Tensor, bits: int) -> np.ndarray:
    """Return for each value the nearest point of the grid, chosen from the list of all grid points."""
    flat_values = values.double().numpy().reshape(-1)
    largest_integer = 2 ** (bits - 1) - 1
    grid = np.array(
        [step * max(abs(flat_values)) / largest_integer for step in range(-largest_integer, largest_integer + 1)]
    )
    return np.array([grid[np.argmin(abs(grid - value))] for value in flat_values]).reshape(values.shape)


@pytest.mark.parametrize("bits", BITS)
def test_per_tensor_is_the_nearest_point_of_the_grid(bits: int) -> None:
    values = 3 * cloud(20, 7)
    torch.testing.assert_close(
        uniform.quantize_per_tensor(values, bits), torch.from_numpy(naive_quantize(values, bits)), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("bits", BITS)
def test_per_row_is_per_tensor_of_each_row(bits: int) -> None:
    values = cloud(3, 4, 9) * torch.tensor([1.0, 10.0, 0.1, 4.0], dtype=torch.float64)[:, None]
    expected = np.array([[naive_quantize(row, bits) for row in rows] for rows in values])
    torch.testing.assert_close(uniform.quantize_per_row(values, bits), torch.from_numpy(expected), rtol=0, atol=1e-13)


@pytest.mark.parametrize("bits", BITS)
def test_torch_fakes_the_same_quantization(bits: int) -> None:
    """The largest magnitude is a power of 2 times q, so that neither side rounds the quotient."""
    largest_integer = 2 ** (bits - 1) - 1
    values = cloud(16, 12, dtype=torch.float32)
    values = values / values.abs().amax(1, keepdim=True) * largest_integer * 2.0 ** torch.arange(-8, 8)[:, None]
    scale = uniform.scale_for(values.abs().max(), bits)
    expected = torch.fake_quantize_per_tensor_affine(values, scale.item(), 0, -largest_integer, largest_integer)
    torch.testing.assert_close(uniform.quantize_per_tensor(values, bits), expected, rtol=0, atol=0)
    scales = uniform.scale_for(values.abs().amax(1), bits)
    zeros = torch.zeros(len(values), dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(values, scales, zeros, 0, -largest_integer, largest_integer)
    torch.testing.assert_close(uniform.quantize_per_row(values, bits), expected, rtol=0, atol=0)


@pytest.mark.parametrize("quantizer", [uniform.quantize_per_tensor, uniform.quantize_per_row])
def test_properties_of_the_rounding(quantizer: object) -> None:
    assert callable(quantizer)
    values = cloud(40, 10)
    for bits in BITS:
        quantized = quantizer(values, bits)
        torch.testing.assert_close(quantizer(quantized, bits), quantized, rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(quantizer(-values, bits), -quantized, rtol=0, atol=0)
        torch.testing.assert_close(quantizer(8 * values, bits), 8 * quantized, rtol=0, atol=0)
        step = values.abs().max() / (2 ** (bits - 1) - 1)
        assert (quantized - values).abs().max() <= step / 2 * (1 + 1e-12)
        assert len(torch.unique((quantizer(values[0], bits)).abs())) <= 2 ** (bits - 1)


def test_values_beyond_a_calibrated_range_become_its_ends() -> None:
    scale = uniform.scale_for(torch.tensor(7.0), 4)
    quantized = uniform.round_to_grid(torch.tensor([-100.0, -7.0, 6.6, 99.0]), scale, 4)
    assert quantized.tolist() == [-7.0, -7.0, 7.0, 7.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_stays_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    assert uniform.quantize_per_row(cloud(3, 4, dtype=dtype), 8).dtype == dtype
    zeros = torch.zeros(2, 3, dtype=dtype)
    assert torch.equal(uniform.quantize_per_tensor(zeros, 8), zeros)
    assert torch.equal(uniform.quantize_per_row(zeros, 8), zeros)


def test_a_tiny_row_does_not_divide_by_zero() -> None:
    values = torch.tensor([[1e-45, 0.0], [1.0, -1.0]])
    quantized = uniform.quantize_per_row(values, 8)
    assert quantized.tolist() == [[0.0, 0.0], [1.0, -1.0]]


def test_wrong_arguments() -> None:
    for bits in (1, 17):
        with pytest.raises(UserError, match="bits cannot be simulated"):
            uniform.quantize_per_tensor(torch.ones(2), bits)
    for invalid_value in (math.nan, math.inf):
        with pytest.raises(NonFiniteError):
            uniform.quantize_per_row(torch.tensor([[1.0, invalid_value]]), 8)


def test_an_offset_leaves_isoscore_and_costs_decibels() -> None:
    """100 added to one dimension of all points: the number in docs/quantization.md."""
    points = cloud(10_000, 128)
    shifted = points.clone()
    shifted[:, 5] += 100
    torch.testing.assert_close(isoscore(shifted), isoscore(points), rtol=1e-9, atol=0)
    other_dimensions = [dimension for dimension in range(128) if dimension != 5]
    power_of_points, power_of_shifted_points = (
        float((uniform.quantize_per_tensor(cloud_points, 8) - cloud_points)[:, other_dimensions].square().mean())
        for cloud_points in (points, shifted)
    )
    decibels = 10 * math.log10(power_of_shifted_points / power_of_points)
    # The step grows with the largest magnitude.
    assert decibels == pytest.approx(20 * math.log10(shifted.abs().max() / points.abs().max()), abs=0.2)
    assert 25.5 < decibels < 27.5


def test_the_example_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).resolve().parents[3] / "docs" / "quantization.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    [expected_output] = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    exec(compile(code, "docs/quantization.md", "exec"), {})
    assert capsys.readouterr().out == expected_output


def test_whole_numbers_are_refused_in_one_line() -> None:
    for quantize in (uniform.quantize_per_tensor, uniform.quantize_per_row):
        with pytest.raises(UserError, match=r"are torch.int64; expected a floating dtype") as error:
            quantize(torch.arange(4), 8)
        assert "\n" not in str(error.value)
