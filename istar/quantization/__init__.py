"""What quantization does to fine-tuned models: simulated quantization, scores in each form, and two controls.

`istar.quantization.uniform` and `istar.quantization.linear_layers` depend on torch only.
"""

from istar.quantization.uniform import (
    integer_limit,
    largest_magnitude,
    noise_decibels,
    quantize_per_row,
    quantize_per_tensor,
    round_to_grid,
    scale_for,
)

__all__ = [
    "integer_limit",
    "largest_magnitude",
    "noise_decibels",
    "quantize_per_row",
    "quantize_per_tensor",
    "round_to_grid",
    "scale_for",
]
