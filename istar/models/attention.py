"""Isolation of packed documents: model inputs that stop tokens from attending to other documents of a block."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from istar.hidden_states.model_modes import eval_mode
from istar.models.architectures import is_decoder

IsolationMethod = Literal["positions", "mask"]
_TRIAL_LENGTHS = (5, 6)  # number of tokens of the two documents that `isolation` packs for its trial
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of hidden states, relative to the largest
_HALF_TOLERANCE = 0.05  # the same for bfloat16 and float16


def isolation(model: PreTrainedModel) -> IsolationMethod | None:
    """Find the inputs that stop a model's tokens from attending to other documents in the same packed block.

    The methods of `make_isolating_inputs` are tried on two random documents in one block. A method works if the second
    document's hidden states do not depend on the first document and equal the states computed for it alone. The trial
    takes a few forward passes of 11 tokens and leaves weights, random numbers and training modes unchanged.

    Call it before attaching a penalty, because the penalty's hooks would see the trial. Decoders with a key-value cache
    (`config.use_cache`) ignore that position ids restart; a training turns the cache off.

    Returns:
        The first method that works, or None if neither does.
    """
    base_model = _unwrap_adapters(model).base_model
    device = next(model.parameters()).device
    document_numbers = torch.repeat_interleave(torch.tensor(_TRIAL_LENGTHS)).to(device)[None]
    first, other_first, second = _make_random_documents(model, device)
    with torch.no_grad(), eval_mode(base_model):
        states_alone = _compute_states(base_model, second, other_inputs={})
        for method in ("positions", "mask"):
            inputs = make_isolating_inputs(method, document_numbers, is_decoder(model.config))
            try:
                states_after_first, states_after_other = (
                    _compute_states(base_model, torch.cat([document, second], 1), inputs)[:, _TRIAL_LENGTHS[0] :]
                    for document in (first, other_first)
                )
            except Exception:  # the types depend on the architecture, which does not accept these inputs
                continue
            # Masked tokens have attention weights of exactly 0, but rounding depends on the length of the block.
            if torch.equal(states_after_first, states_after_other) and are_close(states_after_first, states_alone):
                return method
    return None


def make_isolating_inputs(method: IsolationMethod, documents: Tensor, is_causal: bool = False) -> dict[str, Tensor]:
    """Make the model inputs that keep the documents of a packed block apart.

    Args:
        method: result of `isolation` for the model. With `positions`, the model must get no `attention_mask`.
        documents: index of each token's document within its block, (batch, tokens); -1 for padding. The tokens of a
            document are contiguous.
        is_causal: whether the model is a decoder; its mask must also hide later tokens.

    Returns:
        `position_ids`, (batch, tokens), which count from 0 in each document and in the padding. With `mask` also
        `attention_mask`, (batch, 1, tokens, tokens), bool: True where a token (row) attends to another (column).
        Padding attends to all tokens except padding, because attention to no token would give NaN. The diagonal is
        therefore True exactly for tokens that are not padding.
    """
    positions = torch.arange(documents.shape[1], device=documents.device)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    document_starts = torch.where(is_first, positions, 0).cummax(1).values
    inputs = {"position_ids": positions - document_starts}
    if method == "mask":
        is_not_padding = documents >= 0
        mask = (documents[:, :, None] == documents[:, None, :]) & is_not_padding[:, None, :]
        mask = mask.tril() if is_causal else mask
        inputs["attention_mask"] = (mask | (~is_not_padding[:, :, None] & is_not_padding[:, None, :]))[:, None]
    return inputs


def accepts_position_ids(model: nn.Module) -> bool:
    """Return whether a model is a decoder that accepts `position_ids`.

    Without `position_ids`, many decoders count positions from the left edge of a batch, padding included.
    """
    unwrapped = _unwrap_adapters(model)
    return is_decoder(unwrapped.config) and "position_ids" in inspect.signature(unwrapped.forward).parameters


def _unwrap_adapters(model: nn.Module) -> PreTrainedModel:
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def _make_random_documents(model: PreTrainedModel, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    pad_token_id = getattr(model.config, "pad_token_id", None)
    candidate_ids = torch.tensor([token_id for token_id in range(min(vocab_size, 1_000)) if token_id != pad_token_id])
    lengths = (_TRIAL_LENGTHS[0], *_TRIAL_LENGTHS)
    indices = torch.randint(len(candidate_ids), (1, sum(lengths)), generator=generator)
    return candidate_ids[indices].to(device).split(lengths, dim=1)


def _compute_states(base_model: Any, token_ids: Tensor, other_inputs: dict[str, Tensor]) -> Tensor:
    states: Tensor = base_model(input_ids=token_ids, **other_inputs).last_hidden_state
    return states


def are_close(states: Tensor, reference_states: Tensor) -> bool:
    """Return whether hidden states equal the reference up to rounding, relative to the largest reference value."""
    tolerance = _TOLERANCE.get(states.dtype, _HALF_TOLERANCE)
    return bool((states - reference_states).abs().max() <= tolerance * reference_states.abs().max())
