"""The states of a batch as places `(batch, places, d)`, and which of the places count."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError

Channels = Literal["first", "last"]
"""Where the width of a state with four dimensions is: `(batch, d, height, width)` or `(batch, height, width, d)`."""


class Places(NamedTuple):
    """A state of a batch, such as the tokens of texts or the patches of images at one layer."""

    values: Tensor  # `(batch, places, d)`, floating
    mask: Tensor | None  # which places count, `(batch, places)`, bool; None: all


def to_places(name: str, state: Tensor, mask: Tensor | None, channels: Channels | None, config: Any = None) -> Places:
    """Return a state as places, with the mask on its device.

    A state `(batch, d)` has one place an example, to which the mask does not apply. A nested tensor, as
    `nn.TransformerEncoder` makes of padded sequences, is padded to the width of the mask.

    Args:
        name: name of the state, for messages.
        state: `(batch, places, d)`, `(batch, d)` or, with `channels`, with four dimensions.
        mask: which places count, `(batch, places)`, bool. For speech models it may be of samples, see `count_frames`.
        channels: where the width of a state with four dimensions is.
        config: configuration of the model, if it has one.

    Raises:
        UserError: for a state that is not floating or has another number of dimensions, or a mask of another shape.
    """
    if not state.is_floating_point():
        raise UserError(f"{name} is {state.dtype}; expected a floating state: leave it out of modules=[...]")
    if state.is_nested:
        if mask is None:
            raise UserError(f"{name} has sequences of different lengths; expected a mask of the padding: mask=...")
        state = state.to_padded_tensor(0.0, (len(mask), mask.shape[1], state.size(-1)))
    if state.dim() == 4:
        if channels is None:
            raise UserError(
                f"{name} has shape {tuple(state.shape)}; expected to be told where its width is: "
                'channels="first" for (batch, d, height, width), or channels="last"'
            )
        state = state.flatten(2).transpose(1, 2) if channels == "first" else state.flatten(1, 2)
    if state.dim() == 2:
        return Places(state[:, None], None)
    if state.dim() != 3:
        raise UserError(f"{name} has shape {tuple(state.shape)}; expected (batch, d) or (batch, places, d)")
    num_examples, num_places = int(state.shape[0]), int(state.shape[1])
    if mask is not None and mask.shape != (num_examples, num_places):
        frames = count_frames(mask, config)
        if frames is None or (len(mask), int(frames[-1])) != (num_examples, num_places):
            raise UserError(
                f"the mask has shape {tuple(mask.shape)}, and {name} has {num_places} places for {num_examples} "
                "examples; expected a mask of this shape: mask= a function of the batch that returns it"
            )
        mask = torch.arange(num_places, device=mask.device) < frames[:-1, None]
    return Places(state, None if mask is None else mask.to(state.device))


def count_frames(mask: Tensor, config: Any) -> Tensor | None:
    r"""Return how many frames the convolutions of a speech model make of the samples of each recording.

    A convolution with kernel k and stride s makes :math:`\lfloor (n - k) / s \rfloor + 1` frames of n samples. wav2vec
    2.0 (Baevski et al., 2020) has seven of them.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(conv_kernel=(10, 3), conv_stride=(5, 2))
    >>> count_frames(torch.tensor([[1] * 250 + [0] * 150]), config)
    tensor([24, 39])

    Args:
        mask: which samples belong to each recording, `(batch, samples)`, all before the padding.
        config: configuration of the model.

    Returns:
        The number of frames of each recording, and of a recording without padding, `(batch + 1,)`; None unless the
        configuration has the lists `conv_kernel` and `conv_stride`.

    Raises:
        UserError: for padding before a sample.
    """
    kernels, strides = (getattr(config, key, None) for key in ("conv_kernel", "conv_stride"))
    if not isinstance(kernels, list | tuple) or not isinstance(strides, list | tuple):
        return None
    if (mask[:, 1:] > mask[:, :-1]).any():
        raise UserError("the mask has padding before samples; expected all padding after them")
    counts = torch.cat([mask.long().sum(-1), torch.tensor([mask.shape[-1]], device=mask.device)])
    for kernel, stride in zip(kernels, strides, strict=True):
        counts = (counts - kernel).div(stride, rounding_mode="floor") + 1
    return counts


def leave_out_first(places: Places, number: int) -> Places:
    """Return places of which the first ones of each example do not count."""
    are_counted = torch.arange(places.values.shape[1], device=places.values.device) >= number
    mask = are_counted.expand(places.values.shape[:2]) if places.mask is None else places.mask & are_counted
    return places._replace(mask=mask)
