"""Selection of the layers and tokens of a penalty."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from istar.errors import NamedOptions, OptionError, UserError, check_one_of
from istar.measures.batch_moments import mask_to_indices
from istar.measures.numerics import check_tensor

Layers = str | Sequence[int]

NAMED_LAYERS = ("all", "last", "with_embeddings")
POINTS = ("all", "content", "labelled", "first", "last", "completion")
IGNORED_LABEL = -100
"""Label of a token that the task loss leaves out, in torch and transformers."""


@dataclass(frozen=True)
class Points(NamedOptions):
    """Which tokens of a forward pass are points of a penalty. Padding never is.

    Raises:
        OptionError: for an unknown name, a ratio that is not above 1, or `content` without ids.
    """

    which: str = "all"
    """Tokens to penalize: all, content (no special tokens), labelled (tokens that predict a token with a label), first
    or last (of each sequence or packed document; the first token of encoders is [CLS]), or completion (tokens with a
    label)."""
    max_norm_ratio: float | None = None
    """Leave out points with a norm above this number times the median norm of the layer's points in the batch, such as
    attention sinks; None keeps all. Each process takes the median of its part of the batch."""
    special_ids: Sequence[int] = ()
    """Token ids of the special tokens, see `special_ids`; needed for `content`."""

    def __post_init__(self) -> None:
        check_one_of("points", self.which, POINTS)
        if self.max_norm_ratio is not None and not self.max_norm_ratio > 1:
            raise OptionError(
                f"max_norm_ratio={self.max_norm_ratio:g} is not above 1, so it leaves out half of the points"
            )
        if self.which == "content" and not self.special_ids:
            raise OptionError(
                "points=content leaves out special tokens, but the tokenizer has none, or their ids are not given: "
                "special_ids=special_ids(tokenizer); otherwise use points=all"
            )

    @property
    def are_all(self) -> bool:
        """Whether all tokens that are not padding are points."""
        return self.which == "all" and self.max_norm_ratio is None

    def check_include_padding(self, include_padding: bool) -> None:
        """Raise `OptionError` if all tokens are to count, although these points leave out some."""
        if include_padding and not self.are_all:
            raise OptionError("include_padding=true counts all tokens; it needs points=all and no max_norm_ratio")

    @property
    def need_labels(self) -> bool:
        """Whether the points depend on the labels."""
        return self.which in ("labelled", "completion")


ALL_POINTS = Points()


@dataclass(frozen=True)
class PointSample:
    """A random part of the points of one forward pass: the same tokens in all layers.

    >>> PointSample(0.25, seed=0).choose(None, 8, torch.device("cpu")).shape
    torch.Size([2])
    """

    fraction: float
    """Fraction of the points, in (0, 1]."""
    seed: int
    """Seed of the random numbers."""

    def choose(self, indices: Tensor | None, num_rows: int, device: torch.device) -> Tensor:
        """Return the ascending indices of the sampled rows among `indices`; None stands for all `num_rows` rows.

        The size of the sample is rounded to the nearest integer, and is at least 1 if there are points.
        """
        num_points = num_rows if indices is None else len(indices)
        size = max(round(self.fraction * num_points), min(num_points, 1))
        # On the CPU, so that the sample does not depend on the device.
        chosen = torch.randperm(num_points, generator=torch.Generator().manual_seed(self.seed), device="cpu")[:size]
        chosen = chosen.sort().values.to(device)
        return chosen if indices is None else indices[chosen]


def check_layers(layers: Layers) -> None:
    """Raise `OptionError` unless `layers` is one of `NAMED_LAYERS` or a list of layer numbers."""
    if isinstance(layers, str):
        check_one_of("layers", layers, NAMED_LAYERS)
    elif not (isinstance(layers, Sequence) and layers and all(type(layer) is int for layer in layers)):
        raise OptionError(
            f"layers={layers} is neither one of {', '.join(NAMED_LAYERS)} nor a list of layer numbers like [1,2,12]"
        )


def check_same_width(widths: Iterable[int]) -> None:
    """Raise `UserError` unless all layers have the same width."""
    different_widths = sorted(set(widths))
    if len(different_widths) > 1:
        raise UserError(
            f"the layers have {different_widths} dimensions; expected the same in all, so choose other layers"
        )


def unit_points(points: Tensor, indices: Tensor | None) -> Tensor:
    """Return the points divided by their norms, `(n, d)`, float32 or wider. A zero vector stays 0, with gradient 0.

    Args:
        points: `(..., d)`, any floating dtype.
        indices: the rows of points `(n, d)` to take; None takes all.
    """
    points = points if indices is None else points.index_select(0, indices)
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    norms: Tensor = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    return points / norms.masked_fill(norms == 0, torch.inf)


def special_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of the special tokens of a tokenizer of transformers, ascending, for `Points`."""
    return tuple(sorted(set(tokenizer.all_special_ids)))


def select_layers(hidden_states: Sequence[Tensor], layers: Layers = "all") -> list[Tensor]:
    """Return the hidden states of the selected layers, in the model's order and without copying.

    Args:
        hidden_states: L + 1 tensors `(batch, tokens, d)`: the embedding output and the output of each of L layers.
        layers: `all` (the outputs of all layers), `last`, `with_embeddings` (all and the embedding output), or a list
            of layer numbers, where 0 is the embedding output, 1 to L are the layers, and negative numbers count from
            the last layer.

    Raises:
        UserError: for an unknown name, a number of a layer that does not exist, and anything but a sequence of tensors
            with the same number of dimensions.
    """
    # One tensor would be taken for its sequences, and a `ModelOutput` for all that a model returns.
    if not isinstance(hidden_states, Sequence):
        raise UserError(
            f"the hidden states are a {type(hidden_states).__name__}; expected a sequence of tensors (batch, tokens, "
            "d), such as outputs.hidden_states"
        )
    for hidden_state in hidden_states:
        check_tensor(hidden_state, "a hidden state")
    if len({hidden_state.dim() for hidden_state in hidden_states}) > 1:
        shapes = ", ".join(str(tuple(hidden_state.shape)) for hidden_state in hidden_states)
        raise UserError(f"the hidden states have shapes {shapes}; expected (batch, tokens, d) for each")
    if len(hidden_states) < 2:
        raise UserError(
            f"{len(hidden_states)} hidden states were given; expected the embedding output and one per layer"
        )
    return [hidden_states[layer] for layer in layer_numbers(len(hidden_states) - 1, layers)]


def layer_numbers(num_layers: int, layers: Layers) -> list[int]:
    """Convert `layers`, as `select_layers` accepts it, to ascending layer numbers from 0 to L = `num_layers`."""
    check_layers(layers)
    if isinstance(layers, str):
        numbers_by_name = {
            "all": list(range(1, num_layers + 1)),
            "last": [num_layers],
            "with_embeddings": list(range(num_layers + 1)),
        }
        return numbers_by_name[layers]
    selected_numbers = set()
    for layer in layers:
        if not -num_layers - 1 <= layer <= num_layers:
            raise UserError(
                f"layer {layer} does not exist; expected 0 (embeddings) to {num_layers}, the last layer, or -1 and "
                "less to count from the last"
            )
        selected_numbers.add(layer % (num_layers + 1))
    return sorted(selected_numbers)


@dataclass(eq=False)
class Tokens:
    """The tokens of a forward pass that are points, chosen from the arguments of the call.

    Args:
        attention_mask: `(batch, tokens)`, 1 for tokens and 0 for padding. Or `(batch, 1 or heads, tokens, tokens)`, as
            for packed documents: bool, or floating to be added to the attention scores; a token that may attend to
            itself is not padding. None: no padding.
        points: which tokens are points.
        input_ids: token ids, `(batch, tokens)`; needed for `content`.
        labels: labels of the tokens, `(batch, tokens)`; needed for `labelled` and `completion`.
        position_ids: `(batch or 1, tokens)`; they restart at the beginning of each packed document. May be None.
        predicts_next: whether the model predicts the label of the next token, as causal language models do.
        sample: the part of the points that counts; None: all of them.

    Attributes:
        num_left_out: number of points that `max_norm_ratio` has left out so far, in all layers.
    """

    attention_mask: Any = None
    points: Points = ALL_POINTS
    input_ids: Tensor | None = None
    labels: Tensor | None = None
    position_ids: Tensor | None = None
    predicts_next: bool = False
    sample: PointSample | None = None
    num_left_out: int = field(default=0, init=False)
    # By the shape of the hidden states, `(batch, tokens)`, which is the same for most layers of a pass.
    _indices: dict[torch.Size, Tensor | None] = field(default_factory=dict, init=False)
    _row_mask: Tensor | None = field(default=None, init=False)

    def indices_of(self, hidden_state: Tensor) -> Tensor | None:
        """Return the row indices of the points in a hidden state flattened to `(n, d)`; None if all rows count.

        Without `max_norm_ratio`, the indices are computed once and shared by all layers of the same shape.

        Raises:
            UserError: if the hidden state is not floating, a shape does not match, or the call lacks an argument that
                the points depend on.
        """
        self._check_hidden_state(hidden_state)
        shape = hidden_state.shape[:-1]
        if shape not in self._indices:
            self._indices[shape] = self._compute_indices(shape, hidden_state.device)
        indices, ratio = self._indices[shape], self.points.max_norm_ratio
        if ratio is None:
            return indices
        kept_indices = select_by_norm_ratio(hidden_state.flatten(0, -2), indices, ratio)
        if kept_indices is not indices:
            assert kept_indices is not None
            num_before = shape.numel() if indices is None else len(indices)
            self.num_left_out += num_before - len(kept_indices)
        return kept_indices

    def rows_of(self, hidden_state: Tensor) -> Tensor | None:
        """Return the rows that count as `indices_of`, but in a graph of torch.compile as a bool mask `(n,)`.

        The number of indices depends on the data, which a graph does not know. The tokens must then be all that are
        not padding, without a sample.
        """
        if not torch.compiler.is_compiling():
            return self.indices_of(hidden_state)
        self._check_hidden_state(hidden_state)
        mask = non_padding_mask(self.attention_mask)
        if mask is not None and self._row_mask is None:
            self._row_mask = mask.reshape(-1) != 0
        return self._row_mask

    def prepare(self) -> None:
        """Compute the indices that the layers share before they exist, if the mask alone decides them.

        On a GPU, this waits for the device, which takes the less time the earlier in the forward pass it is done. A
        graph of torch.compile needs no indices.
        """
        mask = self.attention_mask
        if self.points.which != "all" or not isinstance(mask, Tensor) or torch.compiler.is_compiling():
            return
        shape = mask.shape[:1] + mask.shape[-1:]
        if mask_fits(mask, (*shape, 1)):
            self._indices[shape] = self._compute_indices(shape, mask.device)

    def _compute_indices(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        indices = mask_to_indices(self._compute_point_mask(shape, device))
        return indices if self.sample is None else self.sample.choose(indices, shape.numel(), device)

    def _compute_point_mask(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        is_token = non_padding_mask(self.attention_mask)
        which = self.points.which
        if which == "all":
            return is_token
        is_token = torch.ones(shape, device=device) if is_token is None else is_token
        is_token = is_token.to(device) != 0
        if which == "content":
            assert self.input_ids is not None
            special_ids = torch.tensor(list(self.points.special_ids), device=self.input_ids.device)
            return is_token & ~torch.isin(self.input_ids, special_ids)
        if which == "completion":
            assert self.labels is not None
            return is_token & (self.labels != IGNORED_LABEL)
        starts = document_starts(is_token, self.attention_mask, self.position_ids)
        if which in ("first", "last"):
            return end_tokens_of_documents(which, is_token, starts)
        assert self.labels is not None
        has_label = self.labels != IGNORED_LABEL
        return is_token & (next_token_has_label(has_label, starts) if self.predicts_next else has_label)

    def _check_hidden_state(self, hidden_state: Tensor) -> None:
        if not hidden_state.is_floating_point():
            raise UserError(f"hidden states are {hidden_state.dtype}; expected a floating dtype")
        shape = tuple(hidden_state.shape)
        mask = self.attention_mask
        if mask is not None and not isinstance(mask, Tensor):
            raise UserError(
                f"the attention mask is a {type(mask).__name__}; expected a tensor of shape {shape[:-1]}, 1 for each "
                "token that counts"
            )
        if mask is not None and not mask_fits(mask, shape):
            raise UserError(
                f"the attention mask has shape {tuple(mask.shape)} and the hidden states have shape {shape}; "
                f"expected a mask of shape {shape[:-1]}, 1 for each token that counts, or (batch, 1, tokens, tokens)"
            )
        if self.points.which != "all":
            self._check_arguments(shape)

    def _check_arguments(self, shape: tuple[int, ...]) -> None:
        which = self.points.which
        if len(shape) != 3:
            raise UserError(f"points={which!r} needs hidden states (batch, tokens, d); these have shape {shape}")
        if which in ("first", "last"):
            return
        name, values = ("input_ids", self.input_ids) if which == "content" else ("labels", self.labels)
        if values is None:
            raise UserError(
                f"points={which!r} needs {name}, which this call of the model does not have; pass them to the model, "
                "or use points='all'"
            )
        if tuple(values.shape) != shape[:-1]:
            raise UserError(
                f"points={which!r} needs {name} of shape {shape[:-1]}, one for each token; they have shape "
                f"{tuple(values.shape)}"
            )


def non_padding_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Return the mask of the tokens that are not padding, `(batch, tokens)`, or None without a mask."""
    if attention_mask is None or attention_mask.dim() != 4:
        return attention_mask
    return _may_attend(attention_mask.diagonal(dim1=-2, dim2=-1))


def document_starts(is_token: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """Return the mask of the first tokens of packed documents, `(batch, tokens)`, bool; each row begins a document.

    A document also begins where the position id does not increase and, with an attention mask of four dimensions, at a
    token that may not attend to the token before it.

    Args:
        is_token: mask of the tokens that are not padding, `(batch, tokens)`, bool.
        attention_mask: see `Tokens`.
        position_ids: see `Tokens`; position ids of other shapes, as for images, are not used.
    """
    starts = torch.zeros_like(is_token)
    starts[:, 0] = True
    if position_ids is not None and tuple(position_ids.shape) in (tuple(is_token.shape), (1, is_token.shape[1])):
        starts[:, 1:] |= position_ids[:, 1:] <= position_ids[:, :-1]
    if attention_mask is not None and attention_mask.dim() == 4:
        starts[:, 1:] |= ~_may_attend(attention_mask.diagonal(offset=-1, dim1=-2, dim2=-1))
    return starts


def end_tokens_of_documents(which: str, is_token: Tensor, starts: Tensor) -> Tensor:
    """Return the mask `(batch, tokens)` of the first or the last token (`which`) that is not padding in each document.

    `is_token` is the mask of the tokens that are not padding, and `starts` the result of `document_starts`.
    """
    token_rows = is_token.flatten().nonzero().squeeze(1)
    document_numbers = starts.flatten().cumsum(0)[token_rows]
    is_new_document = document_numbers[1:] != document_numbers[:-1]
    is_end = torch.ones_like(token_rows, dtype=torch.bool)
    if which == "first":
        is_end[1:] = is_new_document
    else:
        is_end[:-1] = is_new_document
    end_mask = torch.zeros_like(is_token).flatten()
    end_mask[token_rows[is_end]] = True
    return end_mask.view_as(is_token)


def next_token_has_label(has_label: Tensor, starts: Tensor) -> Tensor:
    """Return the mask of the tokens with a labelled next token in the same document, `(batch, tokens)`."""
    predicts = torch.zeros_like(has_label)
    predicts[:, :-1] = has_label[:, 1:] & ~starts[:, 1:]
    return predicts


def select_by_norm_ratio(points: Tensor, indices: Tensor | None, ratio: float) -> Tensor | None:
    """Return the row indices of the points with a norm of at most `ratio` (above 1) times the median norm.

    `indices` are the rows of `points` `(n, d)` that are points; None means all. If no point is left out, `indices`
    itself is returned. Points with a NaN norm are kept, so that the penalty is NaN and does not hide them.
    """
    points = points.detach() if indices is None else points.detach()[indices]
    if not len(points):
        return indices
    norms = torch.linalg.vector_norm(points, dim=-1, dtype=torch.promote_types(points.dtype, torch.float32))
    kept_indices = (~(norms > ratio * norms.median())).nonzero().squeeze(1)
    if len(kept_indices) == len(norms):
        return indices
    return kept_indices if indices is None else indices[kept_indices]


def _may_attend(mask: Tensor) -> Tensor:
    return (mask == 0 if mask.is_floating_point() else mask != 0).any(1)


def mask_fits(mask: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether an attention mask, see `Tokens`, fits hidden states of a shape `(..., d)`."""
    if mask.dim() != 4:
        return tuple(mask.shape) == shape[:-1]
    return len(shape) == 3 and (mask.shape[0], *mask.shape[2:]) == (shape[0], shape[1], shape[1])
