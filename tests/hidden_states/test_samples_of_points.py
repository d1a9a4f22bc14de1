"""`PenaltySettings.sample`: a random part of the points, the same tokens in all layers, and resumable."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close

from istar import CosReg, IStar, PenaltySettings
from istar.errors import OptionError
from istar.hidden_states.attach import attach_with_settings
from istar.regularizers.points import PointSample
from tests.oracles import algorithm_1

NUM_TOKENS = [9, 4, 11]
SHAPE: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40,
}  # fmt: skip


def make_model() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.BertModel(hf.BertConfig(**SHAPE)).double().eval()


def make_batch() -> dict[str, Tensor]:
    mask = torch.tensor([[1] * length + [0] * (max(NUM_TOKENS) - length) for length in NUM_TOKENS])
    return {"input_ids": torch.randint(3, 40, mask.shape, generator=torch.Generator().manual_seed(1)) * mask,
            "attention_mask": mask}  # fmt: skip


@pytest.mark.parametrize("zeta", [0.0, 0.4])
def test_the_penalty_is_that_of_the_same_quarter_of_the_tokens_in_all_layers(zeta: float) -> None:
    model, batch = make_model(), make_batch()
    sigma = torch.diag(torch.arange(1, 17).double())
    penalty = IStar(weight=1.0, zeta=zeta)
    penalty.shrinkage_covariance = sigma
    attached = attach_with_settings(model, penalty, PenaltySettings(sample=0.25))
    states = model(**batch, output_hidden_states=True).hidden_states[1:]
    loss = attached.loss()
    # The gradient in the last layer shows which tokens count.
    [gradient] = torch.autograd.grad(loss, [states[-1]], retain_graph=True)
    is_chosen = gradient.abs().sum(-1) != 0
    assert is_chosen.sum() == round(0.25 * sum(NUM_TOKENS))
    assert not (is_chosen & (batch["attention_mask"] == 0)).any()
    union = torch.cat([state[is_chosen] for state in states]).detach()
    assert_close(loss.detach(), 1 - algorithm_1(union, sigma, zeta), rtol=1e-9, atol=0)
    assert penalty.last is not None
    assert penalty.last.points == len(union)


def test_samples_differ_from_pass_to_pass_and_resume_exactly() -> None:
    model, batch = make_model(), make_batch()
    settings = PenaltySettings(sample=0.25, seed=3)

    def losses(attached: Any, count: int) -> list[float]:
        return [(model(**batch), attached.loss().item())[1] for _ in range(count)]

    with attach_with_settings(model, CosReg(weight=1.0), settings) as attached:
        first = losses(attached, 2)
        state = attached.state_dict()
        rest = losses(attached, 3)
    assert len({*first, *rest}) == 5
    with attach_with_settings(model, CosReg(weight=1.0), settings) as resumed:
        resumed.load_state_dict(state)
        assert losses(resumed, 3) == rest
    with attach_with_settings(model, CosReg(weight=1.0), settings) as again:
        assert losses(again, 2) == first
    with attach_with_settings(model, CosReg(weight=1.0), PenaltySettings(sample=0.25, seed=4)) as other:
        assert losses(other, 1) != first[:1]


def test_sigma_s_is_computed_from_all_points() -> None:
    model, batch = make_model(), make_batch()
    with attach_with_settings(model, IStar(zeta=0.4), PenaltySettings(sample=0.25)) as attached:
        assert attached.refresh([batch], None) == 3 * sum(NUM_TOKENS)
        copied = copy.deepcopy(attached)
        assert copied.penalty.last is None


@pytest.mark.parametrize("indices", [None, torch.tensor([3, 5, 8, 9, 11, 30])])
def test_every_point_is_as_likely_as_any_other(indices: Tensor | None) -> None:
    """Each of 6 points is in a sample of 2 with probability 1/3: 1,000 of 3,000 times, with a deviation of 26."""
    samples = [PointSample(0.4, seed).choose(indices, 6, torch.device("cpu")) for seed in range(3000)]
    assert all(len(rows) == 2 and rows[0] < rows[1] for rows in samples)
    counts = torch.cat(samples).unique(return_counts=True)
    assert counts[0].tolist() == list(range(6) if indices is None else indices.tolist())
    assert ((counts[1] - 1000).abs() < 6 * 26).all()
    assert len(PointSample(0.01, 0).choose(indices, 6, torch.device("cpu"))) == 1
    assert len(PointSample(0.5, 0).choose(torch.tensor([], dtype=torch.int64), 6, torch.device("cpu"))) == 0


def test_samples_that_cannot_be_are_refused() -> None:
    for fraction in (0.0, 1.0, 25.0):
        with pytest.raises(OptionError, match=r"sample=.*between 0 and 1"):
            PenaltySettings(sample=fraction)
    with pytest.raises(OptionError, match=r"sample choose tokens"):
        PenaltySettings(sample=0.25, target="input_embeddings")
    with pytest.raises(OptionError, match=r"sample=0\.25 leaves out tokens"):
        attach_with_settings(make_model(), CosReg(include_padding=True), PenaltySettings(sample=0.25))
