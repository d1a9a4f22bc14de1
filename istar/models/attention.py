"""Isolation of packed documents: which inputs keep a model's tokens from attending to other documents of a block."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from istar.models.architectures import is_decoder

Way = Literal["positions", "mask"]
_LENGTHS = (5, 6)  # of the two documents of the trial, in tokens
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of hidden states, relative to the largest
_HALF_TOLERANCE = 0.05  # the same for bfloat16 and float16


def isolation(model: PreTrainedModel) -> Way | None:
    """Return which inputs of `isolating_inputs` keep packed documents apart in a model, or None if none do.

    The answer is found by trial: two random documents are packed into one block, and the hidden states of the second
    must be those of the document alone, and must not depend on the first. The trial leaves weights, random numbers and
    training modes as they are. It takes a few forward passes of 11 tokens.

    Call it before a penalty is attached, whose hooks would see the trial. Decoders that keep a cache of keys and values
    (`config.use_cache`) ignore positions that restart; `load_config` turns the cache off.
    """
    base_model = _without_adapters(model).base_model
    device = next(model.parameters()).device
    documents = torch.repeat_interleave(torch.tensor(_LENGTHS)).to(device)[None]
    first, other, second = _random_documents(model, device)
    with torch.no_grad(), _eval_mode(base_model):
        alone = _states(base_model, second, {})
        for way in ("positions", "mask"):
            inputs = isolating_inputs(way, documents, is_decoder(model.config))
            try:
                packed, repacked = (
                    _states(base_model, torch.cat([document, second], 1), inputs)[:, _LENGTHS[0] :]
                    for document in (first, other)
                )
            except Exception:  # the types depend on the architecture, which does not accept these inputs
                continue
            # The weights of hidden tokens are exactly 0, while rounding depends on the length of the block.
            if torch.equal(packed, repacked) and _are_close(packed, alone):
                return way
    return None


def isolating_inputs(way: Way, documents: Tensor, is_causal: bool = False) -> dict[str, Tensor]:
    """Return the inputs of a model that keep packed documents apart.

    Args:
        way: what `isolation` returned for the model. With `positions`, the model must get no `attention_mask`.
        documents: the number of each token's document in its block, (batch, tokens); -1 for padding. Equal numbers are
            neighbours.
        is_causal: whether the model is a decoder, whose mask must hide later tokens, too.

    Returns:
        `position_ids`, (batch, tokens), which count from 0 in each document and in the padding. With `mask` also
        `attention_mask`, (batch, 1, tokens, tokens), bool, which is True where a token (row) attends to another
        (column). Padding attends to all tokens but padding, because attention to nothing is not a number. The diagonal
        is therefore True for each token that is not padding.
    """
    tokens = torch.arange(documents.shape[1], device=documents.device)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(is_first, tokens, 0).cummax(1).values
    inputs = {"position_ids": tokens - starts}
    if way == "mask":
        is_real = documents >= 0
        mask = (documents[:, :, None] == documents[:, None, :]) & is_real[:, None, :]
        mask = mask.tril() if is_causal else mask
        inputs["attention_mask"] = (mask | (~is_real[:, :, None] & is_real[:, None, :]))[:, None]
    return inputs


def takes_positions(model: nn.Module) -> bool:
    """Return whether a model is a decoder that accepts `position_ids`.

    Many decoders number the tokens of a batch from its left edge, padding included, unless they are given positions.
    """
    plain = _without_adapters(model)
    return is_decoder(plain.config) and "position_ids" in inspect.signature(plain.forward).parameters


def _without_adapters(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers, which peft wraps."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def _random_documents(model: PreTrainedModel, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return two documents for the first place in the block and one for the second, without padding tokens."""
    generator = torch.Generator().manual_seed(0)
    size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    padding = getattr(model.config, "pad_token_id", None)
    usable = torch.tensor([token for token in range(min(size, 1_000)) if token != padding])
    lengths = (_LENGTHS[0], _LENGTHS[0], _LENGTHS[1])
    documents = [usable[torch.randint(len(usable), (1, length), generator=generator)] for length in lengths]
    return documents[0].to(device), documents[1].to(device), documents[2].to(device)


def _states(base_model: Any, ids: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states, (batch, tokens, d)."""
    states: Tensor = base_model(input_ids=ids, **inputs).last_hidden_state
    return states


def _are_close(states: Tensor, others: Tensor) -> bool:
    """Return whether hidden states are equal up to rounding, relative to their largest value."""
    tolerance = _TOLERANCE.get(states.dtype, _HALF_TOLERANCE)
    return bool((states - others).abs().max() <= tolerance * others.abs().max())


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode, and then back into the mode of each."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
