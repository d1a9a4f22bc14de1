"""The LightningModule for language modelling with a penalty on the hidden states."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from istar.finetune.config import OptimConfig
from istar.finetune.tasks.language_modelling import LanguageModelEvaluator
from istar.finetune.training.module import Batch, FineTuner, inputs_with_labels, token_mask
from istar.hidden_states import AttachedPenalty
from istar.hidden_states.model_layers import find_head_model, make_trial_ids
from istar.hidden_states.model_modes import preserve_rng_states
from istar.hidden_states.offloading import find_input_device
from istar.measures.accumulator import sum_over_processes, world_size
from istar.regularizers.points import IGNORED_LABEL


class LanguageModelTuner(FineTuner):
    """Train a causal or masked language model on its token loss plus a weighted penalty on its hidden states.

    The loss of a step is the mean over the predicted tokens of all processes together, plus what the model itself adds,
    such as the load-balancing loss of its routers. In validation, only the losses of the tokens are summed, in float64
    for each block of text. The other arguments are as in `FineTuner`.

    Args:
        is_causal: whether the logits at a token predict the next token.
        restrict_head_to_labels: compute the head of a masked language model only for the tokens to predict, which saves
            most of the head's time. This needs a hook, which a compiled model does not call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        penalty: AttachedPenalty | None,
        optim: OptimConfig,
        evaluators: Mapping[str, LanguageModelEvaluator],
        *,
        is_causal: bool,
        restrict_head_to_labels: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, penalty, optim, evaluators, **options)
        self.is_causal = is_causal
        self.adds_to_loss = adds_to_loss(model)
        # The points of a penalty may depend on the labels, which its hooks read from the call of the model.
        self._model_takes_labels = self.adds_to_loss or (penalty is not None and penalty.needs_token_labels)
        self.restrict_head_to_labels = restrict_head_to_labels and not is_causal and not self._model_takes_labels

    def task_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over the predicted tokens of a batch, scaled for DDP's mean over processes.

        What the model adds to it is not scaled, so that its gradient is the mean over micro-batches and processes.
        """
        losses, _, _, outputs, _ = self._predict(batch)
        num_tokens = torch.tensor(float(len(losses)), device=losses.device, dtype=torch.float64)
        # DDP averages the gradients over processes, so each process divides by the mean number of tokens.
        mean_num_tokens = sum_over_processes(num_tokens) / world_size()
        loss = losses.sum() / mean_num_tokens.clamp(min=1).to(losses.dtype)
        if self.adds_to_loss and len(losses) > 0:
            loss = loss + (outputs.loss - losses.mean())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        # Callbacks measure the hidden states of the first validation set only.
        prediction = self._predict(batch, reads_states=dataloader_idx == 0)
        losses = prediction.losses.double()
        is_correct = (prediction.logits.argmax(-1) == prediction.targets)[prediction.targets != IGNORED_LABEL]
        row_indices = _align_labels_with_logits(batch["labels"], self.is_causal).ne(IGNORED_LABEL).nonzero()[:, 0]
        sums = torch.zeros(len(batch["input_ids"]), 3, dtype=torch.float64, device=losses.device)
        sums.index_add_(0, row_indices, torch.stack([losses, torch.ones_like(losses), is_correct.double()], dim=1))
        self._outputs[dataloader_idx] |= dict(zip(batch["feature_id"].tolist(), sums.cpu().numpy(), strict=True))
        return {"hidden_states": prediction.states, "attention_mask": token_mask(batch)}

    def _predict(self, batch: Batch, reads_states: bool = False) -> "_Prediction":
        labels = _align_labels_with_logits(batch["labels"], self.is_causal)
        is_predicted = labels != IGNORED_LABEL
        inputs = inputs_with_labels(batch)
        if not self._model_takes_labels:
            del inputs["labels"]
        is_head_restricted = self.restrict_head_to_labels and bool(is_predicted.any())
        with restrict_head_to(self.model, is_predicted) if is_head_restricted else nullcontext():
            outputs, states = self.run_model(self.model, inputs, reads_states)
        targets = labels[is_predicted] if is_head_restricted else labels.flatten()
        # The logits, the largest tensor of a step, are not copied. Ignored targets have loss 0.
        logits = outputs.logits.flatten(0, 1)
        losses = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED_LABEL, reduction="none")
        return _Prediction(losses[targets != IGNORED_LABEL], logits.detach(), targets, outputs, states)


class _Prediction(NamedTuple):
    losses: Tensor  # loss of each predicted token, in the order of the text, `(predicted,)`
    logits: Tensor  # `(positions, vocabulary)`, for all positions of the batch or only for the predicted tokens
    targets: Tensor  # token to predict at each of these positions, or `IGNORED_LABEL`, `(positions,)`
    outputs: Any  # all outputs of the model
    states: dict[str, Tensor]  # hidden states by layer, if they are read


def adds_to_loss(model: PreTrainedModel) -> bool:
    """Return whether a model's own loss has more terms than the mean loss of the labels, by calling it on a few tokens.

    The trial changes neither the model nor the random numbers.
    """
    head_model: Any = find_head_model(model)
    token_ids = make_trial_ids(head_model)[None].to(find_input_device(head_model))
    with preserve_rng_states(token_ids.device), torch.no_grad():
        outputs = head_model.forward(input_ids=token_ids, labels=token_ids)  # without hooks and compilation
    logits = outputs.logits.flatten(0, -2).float()
    # Some causal models, such as XLNet, do not shift the labels themselves.
    shifted_or_not = [_align_labels_with_logits(token_ids, is_causal).flatten() for is_causal in (True, False)]
    mean_losses = torch.stack([F.cross_entropy(logits, targets) for targets in shifted_or_not])
    precision = max(torch.finfo(loss.dtype).eps for loss in (outputs.loss, mean_losses))
    return not torch.isclose(outputs.loss.float(), mean_losses, rtol=8 * precision, atol=0).any()


@contextmanager
def restrict_head_to(model: PreTrainedModel, is_selected: Tensor) -> Iterator[None]:
    """Within the `with` block, compute the head of a model for the tokens in `is_selected`, `(batch, tokens)`, only.

    The head must handle each token separately. The logits are `(1, selected, vocabulary)`, with the selected tokens of
    all texts in order.
    """

    def select_states(module: torch.nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[is_selected].unsqueeze(0)
        return output

    handle = model.base_model.register_forward_hook(select_states)
    try:
        yield
    finally:
        handle.remove()


def _align_labels_with_logits(labels: Tensor, is_causal: bool) -> Tensor:
    """Return the label that the logits at each position predict, `(batch, tokens)`.

    For a causal model, this is the label of the next token, and `IGNORED_LABEL` at the last position.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) if is_causal else labels
