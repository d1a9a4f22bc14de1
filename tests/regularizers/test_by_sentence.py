"""I-STAR with the score from pairs of points of different sentences: naive sums and packed documents."""

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

from istar.errors import UserError
from istar.hidden_states import attach
from istar.measures import isoscore_by_sentence
from istar.regularizers import IStar, Points, RandomDirection
from istar.regularizers.placebos import random_rotation
from istar.regularizers.points import Tokens
from tests.oracles import stack
from tests.regularizers.test_istar import mask, states, value_and_gradients

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def make_penalty(weight=1.0, layers="with_embeddings", **arguments):
    return IStar(weight, 0, layers=layers, estimator="unbiased_by_sentence", **arguments)


def naive_score(points, sentences):
    """Return the score from averages over all tuples of points `(n, d)` of distinct sentences; differentiable."""
    points = points - points.mean(0)
    products = points @ points.T
    norms = products.diagonal()
    distinct_pairs = (sentences[:, None] != sentences).to(points)
    distinct_triples = torch.einsum("ij,jk,ik->ijk", distinct_pairs, distinct_pairs, distinct_pairs)
    distinct_quadruples = torch.einsum(
        "ijk,il,jl,kl->ijkl", distinct_triples, distinct_pairs, distinct_pairs, distinct_pairs
    )
    quadruples = torch.einsum("ijkl,ij,kl->", distinct_quadruples, products, products) / distinct_quadruples.sum()
    squared_norm = (distinct_pairs * products.square()).sum() / distinct_pairs.sum() + quadruples
    squared_norm = (
        squared_norm - 2 * torch.einsum("ijk,ij,jk->", distinct_triples, products, products) / distinct_triples.sum()
    )
    squared_trace = (distinct_pairs * norms[:, None] * norms).sum() / distinct_pairs.sum() + quadruples
    squared_trace = (
        squared_trace - 2 * torch.einsum("ijk,i,jk->", distinct_triples, norms, products) / distinct_triples.sum()
    )
    return (squared_trace / squared_norm - 1) / (points.shape[1] - 1)


def naive_penalty(layers, attention_mask=None):
    attention_mask = torch.ones(layers[0].shape[:2]) if attention_mask is None else attention_mask
    sentence_indices = torch.arange(len(attention_mask))[:, None].expand(attention_mask.shape)[attention_mask.bool()]
    return 1 - naive_score(stack(layers, attention_mask), sentence_indices.repeat(len(layers)))


def make_dependent_states(shape=(5, 4, 6), layers=3, seed=0):
    """Return hidden states whose tokens and layers have a common part in each sentence."""
    common_part = states((shape[0], 1, shape[2]), layers=1, seed=seed + 1)[0]
    return [state + common_part for state in states(shape, layers, seed=seed)]


# Sentences of unequal lengths; the last one is padding only.
LENGTHS = (torch.arange(4) < torch.tensor([1, 4, 2, 3, 0])[:, None]).long()


@pytest.mark.parametrize(("dim", "attention_mask"), [(2, None), (30, LENGTHS)], ids=["all", "masked"])
def test_value_and_gradient_are_those_of_all_tuples_of_points_of_different_sentences(dim, attention_mask):
    layers = make_dependent_states((5, 4, dim))
    penalty = make_penalty()
    value, gradients = value_and_gradients(lambda layers: penalty(layers, attention_mask), layers)
    expected, naive_gradients = value_and_gradients(lambda layers: naive_penalty(layers, attention_mask), layers)
    assert penalty.last.score < 1
    assert_close((value, gradients), (expected, naive_gradients), **CLOSE)
    assert all(gradient.norm() > 1e-6 for gradient in gradients)
    assert penalty.last.points == (60 if attention_mask is None else 30)


@pytest.mark.parametrize("attention_mask", [None, LENGTHS], ids=["all", "masked"])
def test_it_is_the_measure_of_the_union_of_the_layers(attention_mask):
    layers = make_dependent_states()
    repeated_mask = None if attention_mask is None else attention_mask.repeat(1, len(layers))

    def measure(layers):
        return 1 - isoscore_by_sentence(torch.cat(list(layers), 1), repeated_mask)

    penalty = make_penalty()
    actual = value_and_gradients(lambda layers: penalty(layers, attention_mask), layers)
    assert_close(actual, value_and_gradients(measure, layers), **CLOSE)
    assert penalty.measure == "isoscore_by_sentence"


def test_first_and_second_derivatives_are_those_of_finite_differences():
    layers = [state.requires_grad_() for state in make_dependent_states((4, 2, 3), layers=2)]
    attention_mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    assert torch.autograd.gradcheck(lambda *layers: -3 * make_penalty()(layers, attention_mask), layers, fast_mode=True)
    assert torch.autograd.gradgradcheck(
        lambda *layers: -3 * make_penalty()(layers, attention_mask), layers, fast_mode=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_states_have_the_score_of_the_rounded_states(dtype):
    layers = [(state + 30).to(dtype) for state in make_dependent_states((8, 20, 16))]
    penalty = make_penalty(2.0**12)
    value, gradients = value_and_gradients(lambda layers: penalty(layers, mask(8, 20)), layers)
    score = penalty.last.score
    doubles = [state.double() for state in layers]
    _, exact_gradients = value_and_gradients(lambda layers: penalty(layers, mask(8, 20)), doubles)
    assert value.dtype == torch.float32
    assert_close(score.double(), penalty.last.score, rtol=1e-5, atol=0)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        assert error < max(torch.finfo(dtype).eps, 2e-5)


@pytest.mark.parametrize("weight", [-1.0, 1.0])
def test_a_score_above_1_is_measured_but_neither_rewarded_nor_punished(weight):
    points = torch.randn(5, 1, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    penalty = make_penalty(weight, layers="last")
    loss = penalty([points, points])
    assert penalty.last.score > 1
    assert loss == 0
    loss.backward()
    assert not points.grad.any()


def test_the_placebo_rotates_its_gradient():
    layers = make_dependent_states()
    placebo = RandomDirection(1.0, 0, layers="with_embeddings", estimator="unbiased_by_sentence", seed=3)
    value, gradients = value_and_gradients(lambda layers: placebo(layers, LENGTHS), layers)
    expected, istar_gradients = value_and_gradients(lambda layers: make_penalty()(layers, LENGTHS), layers)
    rotation = random_rotation(6, 3)
    assert_close((value, gradients), (expected, [gradient @ rotation.T for gradient in istar_gradients]), **CLOSE)


# Which points belong to the same sentence ---------------------------------------------------------------------


def pack_documents(layers, attention_mask):
    """Return all documents in one row with padding at both ends, their positions, and a mask of four dimensions."""
    is_real = attention_mask.bool()
    packed_states = [torch.nn.functional.pad(state[is_real], (0, 0, 1, 2), value=7.0)[None] for state in layers]
    lengths = attention_mask.sum(1).tolist()
    positions = torch.cat([torch.zeros(1), *(torch.arange(length) for length in lengths), torch.ones(2)]).long()[None]
    documents = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    documents = torch.nn.functional.pad(documents, (1, 2), value=-1)
    may_attend = (documents[:, None] == documents) & (documents >= 0)
    return packed_states, positions, may_attend.tril()[None, None]


@pytest.mark.parametrize("kind", ["positions", "mask"])
def test_packed_documents_are_sentences(kind):
    layers = make_dependent_states()
    packed_states, positions, may_attend = pack_documents(layers, LENGTHS)
    token_mask = (may_attend[:, 0].diagonal(dim1=1, dim2=2)).long()
    tokens = Tokens(may_attend) if kind == "mask" else Tokens(token_mask, position_ids=positions)
    penalty = make_penalty()
    value = penalty.combine(penalty.summarize(packed_states, tokens))
    assert_close(value, naive_penalty(layers, LENGTHS), **CLOSE)


def test_several_passes_have_different_sentences():
    first, second = make_dependent_states((2, 4, 6)), make_dependent_states((3, 2, 6), seed=5)
    penalty = make_penalty()
    summaries = []
    for layers in (first, second):
        tokens = Tokens()
        summaries += penalty.summarize(layers, tokens)
    points = torch.cat([state.flatten(0, 1) for state in (*first, *second)])
    sentence_indices = [torch.arange(2).repeat_interleave(4)] * 3 + [2 + torch.arange(3).repeat_interleave(2)] * 3
    assert_close(penalty.combine(summaries), 1 - naive_score(points, torch.cat(sentence_indices)), **CLOSE)


def test_layers_may_leave_out_different_points():
    layers = make_dependent_states()
    layers[1][2] *= 100
    layers[2][0, 1] *= 100
    tokens = Tokens(LENGTHS, Points(max_norm_ratio=20))
    penalty = make_penalty()
    value = penalty.combine(penalty.summarize(layers, tokens))
    masks = [LENGTHS.bool().clone() for _ in layers]
    masks[1][2] = False
    masks[2][0, 1] = False
    sentence_indices = torch.arange(5)[:, None].expand(5, 4)
    points = torch.cat([state[layer_mask] for state, layer_mask in zip(layers, masks, strict=True)])
    expected = 1 - naive_score(points, torch.cat([sentence_indices[layer_mask] for layer_mask in masks]))
    assert_close(value, expected, **CLOSE)


def gpt2():
    torch.manual_seed(0)
    config = hf.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=30, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0
    return hf.GPT2LMHeadModel(config).double()


def compute_loss_and_gradients(model, batch, points):
    with attach(model, make_penalty(0.7), points=points) as watch:
        model(**batch)
        loss = watch.loss()
    return loss.detach(), torch.autograd.grad(loss, list(model.transformer.h[0].parameters()))


@pytest.mark.parametrize("points", [Points(), Points("content", special_ids=(3,))], ids=["all", "content"])
def test_attached_to_a_model_it_is_that_of_the_returned_hidden_states_packed_or_not(points):
    model = gpt2()
    ids = torch.randint(4, 30, (5, 4), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 3
    lengths = LENGTHS.clone()
    lengths[4, :3] = 1
    unpacked_batch = {"input_ids": ids, "attention_mask": lengths}
    actual = compute_loss_and_gradients(model, unpacked_batch, points)
    points_mask = lengths.bool() & (ids != 3) if points.which == "content" else lengths
    hidden_states = model(**unpacked_batch, output_hidden_states=True).hidden_states
    loss = 0.7 * naive_penalty(hidden_states, points_mask)
    gradients = torch.autograd.grad(loss, list(model.transformer.h[0].parameters()))
    assert_close(actual, (loss.detach(), gradients), **CLOSE)

    [row], positions, may_attend = pack_documents([ids[..., None]], lengths)
    attention = torch.zeros(may_attend.shape, dtype=torch.float64).masked_fill(~may_attend, -1e9)
    attention.diagonal(dim1=2, dim2=3)[..., [0, -2, -1]] = -1e9
    packed_batch = {"input_ids": row[..., 0], "position_ids": positions, "attention_mask": attention}
    assert_close(compute_loss_and_gradients(model, packed_batch, points), actual, rtol=1e-6, atol=1e-8)


# Calls --------------------------------------------------------------------------------------------------------


class Tower(torch.nn.Module):
    """An encoder that returns all its hidden states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(3)).double()

    def forward(self, state, attention_mask, position_ids=None):
        hidden_states = [state]
        for layer in self.layers:
            hidden_states.append(torch.tanh(layer(hidden_states[-1])))
        return hidden_states


def test_positions_of_a_call_divide_a_padding_free_batch():
    layers, values = make_dependent_states((5, 4, 5), layers=1), []
    packed_states, positions, _ = pack_documents(layers, LENGTHS)
    for batch in ((layers[0], LENGTHS), (packed_states[0][:, 1:-2], None, positions[:, 1:-2])):
        model = Tower()
        with attach(model, make_penalty(layers="all"), list(model.layers)) as watch:
            model(*batch)
            values.append(watch.loss())
    assert_close(*values, **CLOSE)
    with attach(model, make_penalty(layers="all"), list(model.layers)) as watch:
        model(packed_states[0], None)
        with pytest.warns(UserWarning, match="have no isoscore_by_sentence"):
            assert watch.loss() == 0


# Bad input ----------------------------------------------------------------------------------------------------


INVALID_CALLS = [
    (
        lambda: IStar(1.0, 0.2, estimator="unbiased_by_sentence"),
        "zeta=0.2",
    ),
    (lambda: IStar(1.0, "auto", estimator="unbiased_by_sentence"), "zeta=auto"),
    (lambda: make_penalty(compute="bf16"), "compute=bf16"),
    (lambda: make_penalty(include_padding=True), "padding, which belongs to no sentence"),
    (lambda: make_penalty()([torch.randn(9, 4)] * 2), r"expected hidden states \(batch, tokens, d\), not \(9, 4\)"),
    (lambda: make_penalty()([torch.randn(5, 2, 4), torch.randn(5, 2, 3)]), r"the layers have \[3, 4\] dimensions"),
    (lambda: make_penalty()([torch.randn(5, 2, 1)] * 2), "isotropy needs at least 2 dimensions"),
]


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS, ids=[str(i) for i in range(len(INVALID_CALLS))])
def test_what_has_no_penalty_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
