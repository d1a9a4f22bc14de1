"""A sentence-transformers loss that adds a penalty to another loss, and a callback that computes Sigma_S."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from istar.errors import UserError
from istar.hidden_states import attach
from istar.hidden_states.model_layers import find_layers
from istar.hidden_states.shrinkage import NUM_POINTS
from istar.integrations.loaders import iterate_in_new_order
from istar.integrations.penalty_file import load_penalty, save_penalty
from istar.regularizers import IStar, Penalty, select_layers
from istar.regularizers.points import Tokens

POINT_TYPES = ("tokens", "pooled")


class PenaltyLoss(nn.Module):
    """Adds a penalty on the hidden states or the sentence embeddings of all text columns to another loss.

    >>> import datasets, istar, tempfile, transformers
    >>> from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    >>> from sentence_transformers import SentenceTransformerTrainingArguments
    >>> from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    >>> from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    >>> folder = tempfile.mkdtemp()
    >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "ran", "away"]
    >>> tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    >>> config = transformers.BertConfig(
    ...     hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=11
    ... )
    >>> _ = tokenizer.save_pretrained(folder), transformers.BertModel(config).save_pretrained(folder)
    >>> model = SentenceTransformer(modules=[Transformer(folder), Pooling(16)], device="cpu")
    >>> pairs = {"anchor": ["the cat sat", "the dog ran"] * 4, "positive": ["a cat", "dog"] * 4}
    >>> loss = PenaltyLoss(model, MultipleNegativesRankingLoss(model), istar.IStar(weight=-1.0, zeta=0.4))
    >>> args = SentenceTransformerTrainingArguments(
    ...     folder, per_device_train_batch_size=4, max_steps=2, report_to="none", use_cpu=True
    ... )
    >>> trainer = SentenceTransformerTrainer(
    ...     model, args, train_dataset=datasets.Dataset.from_dict(pairs), loss=loss, callbacks=[RefreshCallback(loss)]
    ... )
    >>> _ = trainer.train()  # doctest: +ELLIPSIS
    {'train_runtime': ...}
    >>> loss.penalty.last.points.item() > 0
    True

    The loss returns its components by name; the trainer adds them up and logs each. With gradient accumulation, the
    penalty is computed per micro-batch, and the gradient is the mean over the micro-batches of loss and penalty. In
    evaluation, without gradients, there is no penalty.

    Args:
        model: the model that is trained.
        loss: any loss that runs the model with gradients, also one around another loss such as `MatryoshkaLoss`.
            Losses that compute embeddings again in the backward pass, such as `CachedMultipleNegativesRankingLoss`, are
            not supported.
        penalty: `IStar`, `CosReg` or any other `Penalty`.
        on: what the points are. `tokens`: the hidden states of the penalty's layers, of all columns. `pooled`: the
            sentence embeddings of all columns, one point per text.

    Raises:
        UserError: if `on` has another value, or the model's hidden states cannot be read.
    """

    def __init__(self, model: SentenceTransformer, loss: nn.Module, penalty: Penalty, on: str = "tokens") -> None:
        super().__init__()
        if on not in POINT_TYPES:
            raise UserError(f"on is {on!r}; expected one of {', '.join(POINT_TYPES)}")
        # The trainer replaces this attribute, here and in the inner loss, by the wrapped model.
        self.model: nn.Module = model
        self.loss = loss
        self.penalty = penalty
        self.on = on
        # The tuple keeps this reference from being a submodule, which the trainer would replace, too.
        self._model_in_tuple = (model,)
        self._collects_points = False
        # Penalty summaries of the points of all forward passes of the current loss; None before the first one.
        self._point_summaries: list[Any] | None = None
        # Hidden states of these passes. `AdaptiveLayerLoss` returns them several times, but they are one cloud.
        self._collected_states: list[Any] = []
        if on == "pooled":
            model[-1].register_forward_hook(self._collect_sentence_embeddings)
            return
        layers = find_layers(model)
        if not layers.returns_embeddings:
            name = type(layers.base_model).__name__
            raise UserError(f"{name} returns no embeddings as its first hidden state; expected on='pooled' for it")
        self._argument_names = set(inspect.signature(layers.base_model.forward).parameters)
        transformers = [module for module in model.modules() if isinstance(module, Transformer)]
        if len(transformers) != 1:
            raise UserError(f"the model has {len(transformers)} transformers; expected 1, or use on='pooled'")
        # This module calls `forward` of the transformers model directly, which skips the hooks of `istar.attach`.
        transformers[0].register_forward_pre_hook(self._request_hidden_states)
        # The hooks of several losses restore the setting of the model in the opposite order.
        transformers[0].register_forward_hook(self._collect_hidden_states, always_call=True, prepend=True)

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the components of the wrapped loss (`task_loss` if it has none) and the weighted `penalty`.

        Raises:
            UserError: if the wrapped loss did not run the model with gradients.
        """
        self._collects_points = torch.is_grad_enabled() and self.penalty.weight != 0
        self._point_summaries, self._collected_states = None, []
        try:
            loss = self.loss(sentence_features, labels)
        finally:
            is_penalized, self._collects_points = self._collects_points, False
            summaries, self._point_summaries, self._collected_states = self._point_summaries, None, []
        components = _Components(loss) if isinstance(loss, Mapping) else _Components(task_loss=loss)
        if not is_penalized:
            return components
        if summaries is None:
            raise UserError(
                f"{type(self.loss).__name__} does not run the model with gradients, like all losses that compute "
                "embeddings again in the backward pass; wrap its counterpart without a cache"
            )
        # The wrapped loss may be a `PenaltyLoss`, too, with other points.
        name = f"penalty_{len(components)}" if "penalty" in components else "penalty"
        components[name] = self.penalty.combine(summaries)
        return components

    def refresh(self, loader: Iterable[Any], num_points: int = NUM_POINTS, momentum: float = 0.0) -> int:
        """Compute Sigma_S from the batches of the trainer's dataloader; see `istar.Watch.refresh`.

        Returns:
            The number of points used.
        """
        [model] = self._model_in_tuple
        if self.on == "tokens":
            watch = attach(model, self.penalty)
        else:
            pooled_model = _SentenceEmbeddingModel(model)
            watch = attach(pooled_model, self.penalty, [pooled_model.embeddings])
        with watch:
            return watch.refresh(self._iterate_inputs_by_column(loader), num_points, momentum)

    def _should_collect(self) -> bool:
        """Return whether the current forward pass belongs to a penalized loss, so that its points are collected."""
        return self._collects_points and torch.is_grad_enabled()

    def _request_hidden_states(self, module: Transformer, args: Any) -> None:
        """Make the transformers model return its hidden states, as a hook before its forward pass."""
        self._previous_output_hidden_states = module.model.config.output_hidden_states
        if self._should_collect():
            module.model.config.output_hidden_states = True

    def _collect_hidden_states(self, module: Transformer, args: Any, output: dict[str, Any] | None) -> None:
        """Collect the hidden states of the penalty's layers, as a hook after the transformers model's forward pass."""
        module.model.config.output_hidden_states = self._previous_output_hidden_states
        # The output is None if the pass failed.
        if not self._should_collect() or output is None:
            return
        states = output["all_layer_embeddings"]
        if any(states is collected_states for collected_states in self._collected_states):
            return
        self._collected_states.append(states)
        for state in select_layers(states, self.penalty.layers):
            self._add_summary(state, output.get("attention_mask"))

    def _collect_sentence_embeddings(self, module: nn.Module, args: Any, output: dict[str, Any]) -> None:
        """Collect the sentence embeddings, as a hook after the forward pass of the model's last module."""
        if self._should_collect():
            self._add_summary(output["sentence_embedding"], None)

    def _add_summary(self, points: Tensor, mask: Tensor | None) -> None:
        """Add the summary of points to the summaries of the current loss; without padding, if there is a mask."""
        # Append, because a loss may call the model once per column.
        self._point_summaries = [*(self._point_summaries or []), self.penalty.summarize(points, Tokens(mask))]

    def _iterate_inputs_by_column(self, loader: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
        """Yield the model's inputs for each text column of each batch.

        The trainer's batches contain all columns in one mapping, with the column's name as a prefix of each key.
        """
        for batch in loader:
            prefixes = [name.removesuffix("input_ids") for name in batch if name.endswith("input_ids")]
            for prefix in prefixes:
                features = {name.removeprefix(prefix): batch[name] for name in batch if name.startswith(prefix)}
                if self.on == "tokens":
                    yield {name: value for name, value in features.items() if name in self._argument_names}
                else:
                    # The single positional argument of `_SentenceEmbeddingModel.forward`.
                    yield [features]


class _Components(dict[str, Tensor]):
    """The components of a loss by name, which the trainer adds up."""

    def __mul__(self, factor: Any) -> NoReturn:
        """Refuse what losses around other losses do, such as `MatryoshkaLoss`: they multiply a single number."""
        raise UserError(
            "a loss around PenaltyLoss would weight the penalty several times; put PenaltyLoss around it: "
            "PenaltyLoss(model, MatryoshkaLoss(model, loss, dims), penalty)"
        )

    __rmul__ = __mul__


class _SentenceEmbeddingModel(nn.Module):
    """A wrapper whose submodule `embeddings` outputs the sentence embeddings, so that `attach` can read them."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model
        self.embeddings = nn.Identity()

    def forward(self, features: dict[str, Any]) -> Tensor:
        """Return the sentence embeddings of a batch of tokenized texts."""
        embeddings: Tensor = self.embeddings(self.model(features)["sentence_embedding"])
        return embeddings


class RefreshCallback(TrainerCallback):
    """Computes the Sigma_S of a `PenaltyLoss` before each epoch, and saves it beside the trainer's checkpoints.

    Sigma_S is computed in an additional pass over the trainer's train dataloader in a different order, which affects
    neither the batches of training nor the global random number generators.

    Args:
        loss: the trainer's loss.
        num_points: number of points in Sigma_S.
        momentum: weight of the previous Sigma_S in the new one, in [0, 1).
    """

    def __init__(self, loss: PenaltyLoss, num_points: int = NUM_POINTS, momentum: float = 0.0) -> None:
        self.loss = loss
        self.num_points = num_points
        self.momentum = momentum

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the penalty's state if training resumes from a checkpoint."""
        path = self._build_penalty_path(args, state)
        if state.global_step > 0 and path.exists():
            load_penalty(self.loss.penalty, path, args.device)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compute Sigma_S in the precision of training, unless a checkpoint within this epoch had it."""
        penalty = self.loss.penalty
        if not isinstance(penalty, IStar) or penalty.weight == 0:
            return
        # Training that resumes within an epoch continues with the Sigma_S of that epoch.
        is_resumed = state.epoch is not None and not float(state.epoch).is_integer()
        if is_resumed and penalty.shrinkage_covariance is not None:
            return
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        with torch.autocast(args.device.type, dtype, enabled=args.bf16 or args.fp16):
            batches = iterate_in_new_order(kwargs["train_dataloader"], state.global_step)
            self.loss.refresh(batches, self.num_points, self.momentum)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the penalty's state in the folder of the checkpoint."""
        save_penalty(self.loss.penalty, self._build_penalty_path(args, state))

    def _build_penalty_path(self, args: TrainingArguments, state: TrainerState) -> Path:
        """Return the path of the file with the penalty's state in the current checkpoint's folder.

        Each process has a file of its own, because with `sync=False` each has a different Sigma_S.
        """
        assert args.output_dir is not None
        return Path(
            args.output_dir, f"checkpoint-{state.global_step}", f"istar_penalty_rank{args.process_index}.safetensors"
        )
