"""The source of a model: the folder or the repository of the hub that its files are loaded from."""

import os
from dataclasses import dataclass

from istar.errors import UserError
from istar.runs.names import TINY

DTYPES = {"float32": "float32", "float64": "float64", "bf16": "bfloat16", "float16": "float16"}
"""torch's names of the data types of weights, by their names in configs, on the command line and in results."""


@dataclass(frozen=True)
class ModelSource:
    """Where the files of a model and of its tokenizer are loaded from.

    Raises a `UserError` if the name is empty or `tiny`, which has no files, or if a folder has a revision.
    """

    name: str  # folder that `save_pretrained` wrote, or hub id
    revision: str | None = None  # branch, tag or commit on the hub; None is the branch `main`
    tokenizer: str | None = None  # another tokenizer, `<folder or hub id>[@<revision>]`; None is the model's own

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise UserError("the name of the model is empty; expected a hub id or a folder that save_pretrained wrote")
        if self.name == TINY:
            raise UserError(
                f"model {TINY} is istar's own, without pretrained weights; train it with model={TINY}, or write "
                f"./{TINY} for a folder of that name"
            )
        if self.revision is not None and is_folder(self.name):
            raise UserError(f"revision {self.revision} needs a model of the hub, but {self.name} is a folder")

    @property
    def label(self) -> str:
        """Name of the model in messages, such as `model gpt2`."""
        return f"model {self.name}"

    @property
    def tokenizer_source(self) -> "ModelSource":
        """Source of the tokenizer: this one, unless it names another tokenizer."""
        return self if self.tokenizer is None else ModelSource(*split_revision(self.tokenizer))


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `<folder or hub id>[@<revision>]`. What exists on this machine has no revision, even if it contains an @.

    >>> split_revision("EleutherAI/pythia-70m@step1000")
    ('EleutherAI/pythia-70m', 'step1000')
    """
    if os.path.exists(name):  # noqa: PTH110  Path.exists raises an error if the name is too long
        return name, None
    hub_id, _, revision = name.partition("@")
    return hub_id, revision or None


def is_folder(name: str) -> bool:
    """Return whether a model's name is a folder."""
    return os.path.isdir(name)  # noqa: PTH112  Path.is_dir raises an error if the name is too long
