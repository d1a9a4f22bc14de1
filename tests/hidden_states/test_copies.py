"""Copies and pickles of attached models, of watches and of what contains both."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close

from istar.hidden_states import EmbeddingPenalty, HiddenStatePenalty, PenaltySettings, attach
from istar.regularizers import CosReg, IStar, Points
from tests.penalties import WIDTH, gradients

IDS = torch.arange(24).view(4, 6)
BATCH = {"input_ids": IDS, "labels": IDS}
Copy = Callable[[Any], Any]
COPIES: dict[str, Copy] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: saved_and_loaded(value),
}


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def gpt2() -> hf.GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double().eval()


def expected_loss(model: nn.Module) -> Tensor:
    """Return the penalty of a model that is not attached to, from the states that it returns."""
    return IStar(-1.0, 0)(model(**BATCH, output_hidden_states=True).hidden_states)


class Holder(nn.Module):
    """A module that contains a model and its watch, like a LightningModule."""

    def __init__(self, is_attached_to_itself: bool) -> None:
        super().__init__()
        self.model = gpt2()
        self.watch = attach(self if is_attached_to_itself else self.model, IStar(-1.0, 0), points=Points("labelled"))

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("has_pending_pass", [False, True])
def test_a_copy_of_an_attached_model_has_no_penalty(make_copy, has_pending_pass):
    model = gpt2()
    with attach(model, IStar(-1.0, 0), points=Points("labelled")) as watch:
        model(**BATCH)
        if not has_pending_pass:
            watch.loss()
        copied = make_copy(model)
        # A pass without labels would be refused if the points were read.
        assert torch.equal(copied(input_ids=IDS).logits, model(**BATCH).logits)
        expected = watch.loss()
        model(**BATCH)
        copied(**BATCH)
        assert torch.equal(watch.loss(), expected)
    with attach(copied, IStar(-1.0, 0)) as watch:
        copied(**BATCH)
        assert_close(watch.loss(), expected_loss(copied))


def test_a_pickled_model_does_not_contain_the_penalty():
    model = gpt2()
    size = len(pickle.dumps(model))
    penalty = IStar(-1.0, 0.5)
    penalty.shrinkage_covariance = torch.eye(1000)
    with attach(model.transformer, penalty):
        assert len(pickle.dumps(model)) < size + 10_000


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("is_attached_to_itself", [False, True])
def test_a_copy_of_model_and_watch_is_a_model_with_a_watch(make_copy, is_attached_to_itself):
    original = Holder(is_attached_to_itself)
    original(**BATCH)
    copied = make_copy(original)
    for parameter in copied.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    original.watch.loss()
    original(**BATCH)
    copied(**BATCH)
    losses = {holder: holder.watch.loss() for holder in (original, copied)}
    for holder, loss in losses.items():
        states = holder(**BATCH, output_hidden_states=True).hidden_states
        expected = IStar(-1.0, 0)([state[:, :-1] for state in states])
        assert_close(loss, expected)
        assert_close(gradients(holder, loss), gradients(holder, expected))
        holder.watch.loss()
    copied.watch.remove()
    assert not copied.model.transformer._forward_hooks
    assert original.model.transformer._forward_hooks
    original(**BATCH)
    assert_close(original.watch.loss(), losses[original])


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copied_watch_has_a_copied_model(make_copy):
    watch = attach(gpt2(), IStar(-1.0, 0))
    watch.penalty.weight = -2.0
    copied: HiddenStatePenalty = make_copy(watch)
    model = copied._model
    model(**BATCH)
    assert_close(copied.loss(), 2 * expected_loss(model))


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copied_embedding_watch_reads_the_matrix_of_the_copied_model(make_copy):
    model = gpt2()
    model, watch = make_copy(
        (model, EmbeddingPenalty(model, CosReg(1.0), PenaltySettings(target="output_embeddings", rows=10, seed=3)))
    )
    model.lm_head.weight.data.mul_(torch.rand_like(model.lm_head.weight))
    watch.loss().backward()
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:10]
    assert_close(watch.penalty.last.score, CosReg(1.0)(2 * [model.lm_head.weight[None, rows]]))
    assert model.lm_head.weight.grad is not None


def test_an_averaged_model_follows_an_attached_one():
    model = gpt2()
    with attach(model, IStar(-1.0, 0)) as watch:
        averaged = AveragedModel(model)
        model(**BATCH)
        watch.loss().backward()
        averaged.update_parameters(model)
        assert torch.equal(averaged(**BATCH).logits, model(**BATCH).logits)
