"""Hashes of what the measures of a model depend on, by which an earlier result is found again."""

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.hidden_states.offloading import read_parameter
from istar.models.embedding_matrix import Matrix

_NAMES_IN_CONFIG = ("_name_or_path", "transformers_version", "dtype")
"""Keys of a model's configuration that say where its files are from, and how they are loaded."""


def hash_model(weights: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that a model's measures over a text depend on, as sixteen hexadecimal digits.

    That is `weights`, the result of `hash_weights`; the configuration, except for names and versions; and what decides
    how a new tokenizer splits texts.
    """
    config = json.loads(
        model.config.to_json_string(use_diff=False),
        object_hook=lambda values: {key: value for key, value in values.items() if key not in _NAMES_IN_CONFIG},
    )
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    tokenizer_parts = (type(tokenizer).__name__, vocabulary, tokenizer.special_tokens_map)
    return compute_identity(weights, config, tokenizer_parts)[:16]


def hash_weights(model: PreTrainedModel, output_matrix: Matrix | None) -> str:
    """Return a hash of a model's parameters and saved buffers, except its pooler's, and of untied output embeddings.

    It has sixteen hexadecimal digits. Offloaded weights are read one by one.
    """
    digest = hashlib.blake2b(digest_size=8)
    tensors: dict[str, Tensor] = dict(model.state_dict())
    if output_matrix is not None:
        tensors["output"] = output_matrix.values
    for name, tensor in tensors.items():
        # No hidden state depends on the pooler, which is initialized randomly if the checkpoint lacks it.
        if "pooler" not in name:
            tensor = read_parameter(model, name) if tensor.is_meta else tensor
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def compute_identity(*parts: object) -> str:
    """Return a hash of the `repr` of the values that the result of a pass depends on."""
    return hashlib.blake2b("".join(map(repr, parts)).encode()).hexdigest()
