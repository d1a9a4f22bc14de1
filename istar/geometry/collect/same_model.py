"""Check that an output folder does not hold the measures of another model, which a command must not replace."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from istar.errors import UserError
from istar.geometry.collect.measure import WEIGHT_DTYPES, hash_weights
from istar.inputs.pretrained import load_encoder, load_tokenizer
from istar.records.config import ModelConfig


@dataclass(frozen=True)
class ModelName:
    """A model as the user names it."""

    name: str  # hub id, folder, or name in a table
    revision: str | None = None  # branch, tag or commit on the hub

    def __str__(self) -> str:
        return f"{self.name} at revision {self.revision}" if self.revision else self.name


def refuse_other_model(out: Path, earlier: ModelName, new: ModelName, has_same_weights: Callable[[], bool]) -> None:
    """Raise an error if the measures in a folder are of another model than those that would replace them.

    Two models are the same if their names and revisions are equal, or else if their weights are.

    Args:
        out: folder with the earlier measures.
        earlier: model of the earlier measures.
        new: model of the new measures.
        has_same_weights: returns whether the weights are equal; called only if the names or revisions differ.

    Raises:
        UserError: if the models differ.
    """
    if earlier != new and not has_same_weights():
        raise UserError(
            f"--out {out} holds the measures of {earlier}, not of {new}; expected another folder: --out <folder>"
        )


def load_and_hash_weights(model: ModelName, dtype: str) -> str:
    """Load a model without its head, and return the hash of its weights.

    Args:
        model: model to load.
        dtype: dtype of the weights, a key of `WEIGHT_DTYPES`; the hash depends on it.

    Raises:
        UserError: if the model cannot be loaded.
    """
    config = ModelConfig(name=model.name, revision=model.revision)
    return hash_weights(load_encoder(config, load_tokenizer(config), WEIGHT_DTYPES[dtype]))
