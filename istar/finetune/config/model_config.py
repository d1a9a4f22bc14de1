"""The settings of the model that is trained."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from istar.errors import UserError, check_at_least, check_one_of
from istar.files.folders import is_model_folder
from istar.finetune.config.fields import NEVER_MATTERS, matters
from istar.models.model_source import ModelSource
from istar.runs.names import TINY

ALL_LINEAR = "all-linear"
"""Value of `model.lora_target_modules` for adapters on all linear modules."""
MIN_VOCAB_SIZE = 300
"""Smallest `model.vocab_size`: byte-level BPE has 256 tokens for the bytes, and special tokens."""
TRAIN = "train"
"""Value of `model.tokenizer` for a tokenizer that is trained on the task's text."""
WITH_LORA = matters(if_=lambda config: config.model.lora)


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = field(default=MISSING, metadata=NEVER_MATTERS)
    """Hub id, folder, or `tiny`. The hash of a run contains the commit on the hub, or a hash of the files, instead.
    With `architecture` it is a label of your choice, which only the name of the run contains."""
    pretrained: bool = True
    """Load pretrained weights. False gives the model random weights, with its architecture and its tokenizer."""
    revision: str | None = field(default=None, metadata=NEVER_MATTERS)
    """Branch, tag or commit on the hub; null is the branch `main`. A run replaces a branch or a tag by its commit."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory. Losses are equal; with a penalty, up to rounding."""
    attn_implementation: str | None = None
    """Implementation of attention: eager or sdpa. None uses the default of transformers, sdpa for most models. On a CPU
    in bf16, eager trains faster, because sdpa lacks a fast path with dropout there."""
    compile: bool = False
    """Compile the model with torch.compile: the first steps are slow, later ones faster; losses differ by rounding."""
    architecture: str | None = None
    """Architecture of a new model, a model type of transformers, such as bert, gpt2, gpt_neox or llama. It needs
    `pretrained=false` and a tokenizer; its sizes come from `config`, or else from transformers' defaults. None uses the
    architecture of the model `name`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values to replace in the model's configuration, for example model.config.hidden_size=256. Only new models
    (`pretrained=false`) can have other values. hidden_size, num_hidden_layers, num_attention_heads and
    max_position_embeddings are valid for nearly all architectures."""
    tokenizer: str | None = field(default=None, metadata=NEVER_MATTERS)
    """Tokenizer: a folder, a hub id, or train for a new one that is trained on the task's text (byte-level BPE for
    decoders, WordPiece for encoders). None uses the tokenizer of the model `name`. The hash of a run contains the
    commit on the hub, or a hash of the files, instead."""
    vocab_size: int = field(default=8192, metadata=matters(if_=lambda config: config.model.trains_tokenizer))
    """Largest size of the vocabulary of a new tokenizer (`tokenizer=train`); little text yields a smaller one."""
    load_in: str = "float32"
    """Data type of the weights: float32 or bf16. trainer.precision decides about the arithmetic."""
    lora: bool = False
    """Train low-rank adapters (LoRA) and the head, and freeze the pretrained weights. Needs `istar[lora]`."""
    lora_r: int = field(default=8, metadata=WITH_LORA)
    """Rank of the adapters."""
    lora_alpha: float = field(default=16.0, metadata=WITH_LORA)
    """The adapters' outputs are multiplied by `lora_alpha / lora_r`."""
    lora_dropout: float = field(default=0.05, metadata=WITH_LORA)
    """Dropout probability of the adapters' inputs, in [0, 1)."""
    lora_target_modules: Any = field(default=None, metadata=WITH_LORA)
    """Names of the modules that get adapters, e.g. [q_proj,v_proj], or all-linear; None uses peft's default for the
    architecture."""

    def __post_init__(self) -> None:
        self._check_architecture()
        self._check_adapters()
        check_one_of("model.load_in", self.load_in, ("float32", "bf16"))
        if self.attn_implementation is not None:
            check_one_of("model.attn_implementation", self.attn_implementation, ("eager", "sdpa"))
        check_at_least(MIN_VOCAB_SIZE, "model.vocab_size", self.vocab_size)
        if self.pretrained or not self.is_tiny:
            self.source()  # checks name and revision
        elif self.revision is not None:
            raise UserError(f"revision {self.revision} needs a model of the hub, but model {TINY} is istar's own")

    def source(self) -> ModelSource:
        """Return where the files of the model and its tokenizer are loaded from; the tiny model has none."""
        return ModelSource(self.name, self.revision, None if self.trains_tokenizer else self.tokenizer)

    @property
    def is_tiny(self) -> bool:
        """Whether this is istar's tiny BERT, which has random weights and no files."""
        return self.name == TINY

    @property
    def label(self) -> str:
        """Name of the model in messages, such as `model gpt2`."""
        return f"model {self.name}" if self.architecture is None else f"model.architecture={self.architecture}"

    @property
    def trains_tokenizer(self) -> bool:
        return self.tokenizer == TRAIN

    def _check_architecture(self) -> None:
        if not isinstance(self.config, dict):
            raise UserError(f"model.config={self.config} is not a mapping, e.g. {{hidden_size: 256}}")
        if self.is_tiny and (self.architecture is not None or self.config or self.tokenizer is not None):
            raise UserError(
                f"model={TINY} has a fixed architecture and tokenizer; model=new accepts model.architecture, "
                "model.config and model.tokenizer"
            )
        if self.architecture is not None and not self.architecture.strip():
            raise UserError("model.architecture is not set; give it on the command line, e.g. model.architecture=llama")
        if self.tokenizer is not None and not self.tokenizer.strip():
            raise UserError("model.tokenizer is empty; expected train, a folder, a hub id or null")
        if self.pretrained:
            if self.architecture is not None:
                raise UserError(
                    f"model.architecture={self.architecture} has no pretrained weights; add model.pretrained=false"
                )
            if self.config:
                raise UserError(
                    f"model.config.{min(self.config)} cannot be set, because pretrained weights have the values of "
                    "their own configuration; model.pretrained=false makes a new model"
                )
            if self.trains_tokenizer:
                raise UserError(
                    "model.tokenizer=train: pretrained weights belong to the tokenizer of their model; "
                    "model.pretrained=false makes a new model"
                )
        if self.architecture is not None and os.path.isdir(self.name) and is_model_folder(Path(self.name)):  # noqa: PTH112
            raise UserError(
                f"model.name={self.name} would only be a label, because model.architecture={self.architecture} makes a "
                "new model; add model=auto to train the model in this folder"
            )
        if self.architecture is not None and self.tokenizer is None:
            raise UserError(
                f"model.architecture={self.architecture} has no tokenizer; add model.tokenizer=train, a folder or id"
            )

    def _check_adapters(self) -> None:
        check_at_least(1, "model.lora_r", self.lora_r)
        if not 0 < self.lora_alpha < math.inf:
            raise UserError(f"model.lora_alpha={self.lora_alpha:g} must be above 0")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"model.lora_dropout={self.lora_dropout:g} is not a probability in [0, 1)")
        targets = self.lora_target_modules
        is_list = isinstance(targets, list) and targets and all(isinstance(name, str) and name for name in targets)
        if not (targets in (None, ALL_LINEAR) or is_list):
            raise UserError(
                f"model.lora_target_modules={targets} is neither a list of names, e.g. [q_proj,v_proj], nor "
                f"{ALL_LINEAR}"
            )
        if self.lora and not self.pretrained:
            raise UserError(
                "model.lora=true with model.pretrained=false: adapters change pretrained weights, and this model has "
                "random ones; leave out one of them"
            )
