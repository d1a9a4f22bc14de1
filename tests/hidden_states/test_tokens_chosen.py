"""Which tokens are points: the same in all forms of a batch as in a naive choice from each sentence by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close

from istar.errors import UserError
from istar.hidden_states import attach, shrinkage_covariance
from istar.measures.batch_moments import mask_to_indices
from istar.regularizers import CosReg, IStar, Points, special_ids
from istar.regularizers.points import Tokens
from tests.oracles import algorithm_1
from tests.penalties import WEIGHT, WIDTH, ZETA, gradients, sigma

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SPECIAL = (1, 2)
SENTENCES = ([1, 7, 9, 30, 2], [1, 12, 2], [1, 25, 8, 2])
LABELS = ([-100, -100, 9, 30, 2], [1, 12, 2], [-100, -100, -100, 2])
LENGTHS = [len(sentence) for sentence in SENTENCES]
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "vocab_size": 40, "initializer_range": 0.3, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
CHOICES = {
    "all": Points(), "content": Points("content", special_ids=SPECIAL), "labelled": Points("labelled"),
    "first": Points("first"), "last": Points("last"), "completion": Points("completion"),
    "ratio": Points(max_norm_ratio=1.05),
    "content-ratio": Points("content", max_norm_ratio=1.02, special_ids=SPECIAL),
}  # fmt: skip


@torch.no_grad()
def randomize_gains_and_biases(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Add noise to gains and biases, because new normalization layers give all points nearly the same norm."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.5 * torch.randn(parameter.shape)
    return model.double().eval()


def bert() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return randomize_gains_and_biases(hf.BertForMaskedLM(hf.BertConfig(**SHAPE)))


def llama() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SHAPE, num_key_value_heads=1, bos_token_id=1, eos_token_id=2)
    return randomize_gains_and_biases(hf.LlamaForCausalLM(config))


def gpt2() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = hf.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=40, initializer_range=0.3, **ends)
    return randomize_gains_and_biases(hf.GPT2LMHeadModel(config))


MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {"bert": bert, "llama": llama, "gpt2": gpt2}


# Forms of the same batch --------------------------------------------------------------------------------------


def make_padded_batch(side: str) -> dict[str, Tensor]:
    """Return one row for each sentence, padded to the longest one on the right or on the left."""

    def pad_rows(values: Sequence[list[int]], fill: int) -> Tensor:
        paddings = [[fill] * (max(LENGTHS) - len(row)) for row in values]
        return torch.tensor([a + b if side == "right" else b + a for a, b in zip(values, paddings, strict=True)])

    positions = [list(range(length)) for length in LENGTHS]
    return {
        "input_ids": pad_rows(SENTENCES, 0), "attention_mask": pad_rows([[1] * length for length in LENGTHS], 0),
        "position_ids": pad_rows(positions, 0), "labels": pad_rows(LABELS, -100),
    }  # fmt: skip


def make_packed_batch(is_causal: bool) -> dict[str, Tensor]:
    """Return a row of two sentences and a row of one with padding, with a mask of four dimensions."""
    tokens = LENGTHS[0] + LENGTHS[1]
    num_padding_tokens = tokens - LENGTHS[2]
    documents = torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1], [0] * LENGTHS[2] + [-1] * num_padding_tokens])
    allowed = documents[:, :, None] == documents[:, None]
    allowed &= (documents >= 0)[:, :, None]
    if is_causal:
        allowed &= torch.ones(tokens, tokens, dtype=torch.bool).tril()
    # Padding attends to the first token, since a row of attention weights needs one that is not 0.
    allowed[:, :, 0] |= documents < 0
    return {
        "input_ids": torch.tensor([SENTENCES[0] + SENTENCES[1], SENTENCES[2] + [0] * num_padding_tokens]),
        "attention_mask": allowed[:, None],
        "position_ids": torch.tensor(
            [[*range(LENGTHS[0]), *range(LENGTHS[1])], [*range(LENGTHS[2]), *[0] * num_padding_tokens]]
        ),
        "labels": torch.tensor([LABELS[0] + LABELS[1], LABELS[2] + [-100] * num_padding_tokens]),
    }


def make_padding_free_batch() -> dict[str, Any]:
    """Return all sentences in one row without a mask; the positions restart in each sentence."""
    return {
        # With a cache, transformers does not look for documents in the positions.
        "use_cache": False,
        "input_ids": torch.tensor([[token for sentence in SENTENCES for token in sentence]]),
        "position_ids": torch.tensor([[position for length in LENGTHS for position in range(length)]]),
        "labels": torch.tensor([[label for labels in LABELS for label in labels]]),
    }


def make_batch_forms(name: str) -> dict[str, dict[str, Any]]:
    is_causal = name != "bert"
    batches = {
        "right": make_padded_batch("right"),
        "left": make_padded_batch("left"),
        "packed": make_packed_batch(is_causal),
    }
    # Without a mask, only causal models of transformers keep documents apart.
    return batches | ({"padding-free": make_padding_free_batch()} if is_causal else {})


# The naive choice, from each sentence alone -------------------------------------------------------------------


def choose_rows(points_choice: str, sentence_index: int, is_causal: bool) -> list[int]:
    ids, labels = SENTENCES[sentence_index], LABELS[sentence_index]
    if points_choice == "content":
        return [i for i, token in enumerate(ids) if token not in SPECIAL]
    if points_choice == "first":
        return [0]
    if points_choice == "last":
        return [len(ids) - 1]
    if points_choice == "completion" or (points_choice == "labelled" and not is_causal):
        return [i for i, label in enumerate(labels) if label != -100]
    if points_choice == "labelled":
        return [i for i in range(len(ids) - 1) if labels[i + 1] != -100]
    return list(range(len(ids)))


def naive_layers(model: nn.Module, points: Points, is_causal: bool) -> list[Tensor]:
    """Return the points of each layer: sentences pass one by one, and norms are compared one by one."""
    layers: list[list[Tensor]] = [[], []]
    for sentence_index, sentence in enumerate(SENTENCES):
        states = model(input_ids=torch.tensor([sentence]), output_hidden_states=True).hidden_states[1:]
        for layer, state in zip(layers, states, strict=True):
            layer += [state[0, i] for i in choose_rows(points.which, sentence_index, is_causal)]
    if points.max_norm_ratio is not None:
        for i, layer in enumerate(layers):
            norms = [row.norm().item() for row in layer]
            median = sorted(norms)[(len(norms) - 1) // 2]
            layers[i] = [row for row, norm in zip(layer, norms, strict=True) if norm <= points.max_norm_ratio * median]
    return [torch.stack(layer) for layer in layers]


def make_istar() -> IStar:
    penalty = IStar(WEIGHT, ZETA)
    penalty.shrinkage_covariance = sigma()
    return penalty


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *(("bert", choice) for choice in CHOICES),
        *((name, choice) for name in ("llama", "gpt2") for choice in ("labelled", "last")),
        *(
            pytest.param(name, choice, marks=pytest.mark.slow)
            for name in ("llama", "gpt2")
            for choice in CHOICES
            if choice not in ("labelled", "last")
        ),
    ],
)
def test_all_forms_of_a_batch_have_the_statistics_and_gradients_of_the_sentences_alone(name, choice):
    model, points = MODELS[name](), CHOICES[choice]
    layers = naive_layers(model, points, name != "bert")
    all_points = torch.cat(layers)
    score = algorithm_1(all_points, sigma(), ZETA, torch.linalg.eigvalsh)
    expected = [score.detach(), torch.tensor(float(len(all_points))), gradients(model, WEIGHT * (1 - score))]
    assert (points.max_norm_ratio is not None) == (len(all_points) < 2 * sum(
        len(choose_rows(points.which, sentence_index, name != "bert")) for sentence_index in range(3)
    ))  # fmt: skip
    for form, batch in make_batch_forms(name).items():
        penalty = make_istar()
        with attach(model, penalty, points=points) as watch:
            model(**batch)
            loss = watch.loss()
        actual = [penalty.last.score.double(), penalty.last.points.float(), gradients(model, loss)]
        assert_close(actual, expected, **CLOSE, msg=lambda text, form=form: f"{form}: {text}")


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["llama"])
def test_sigma_s_is_computed_from_the_same_points(name, choice):
    model, points = MODELS[name](), CHOICES[choice]
    with torch.no_grad():
        all_points = torch.cat(naive_layers(model, points, name != "bert"))
    expected = torch.cov(all_points.T)
    for batch in make_batch_forms(name).values():
        covariance = shrinkage_covariance(model, [batch], points=points)
        assert_close(covariance.double(), expected, rtol=1e-5, atol=1e-6)
        penalty = IStar(1.0, 0.4)
        with attach(model, penalty, points=points) as watch:
            assert watch.refresh([batch]) == len(all_points)
        assert torch.equal(penalty.shrinkage_covariance, covariance)


def test_the_number_left_out_is_in_the_terms():
    model = llama()
    for points in (Points(max_norm_ratio=1.05), Points(max_norm_ratio=1e6), Points()):
        penalty = CosReg(1.0, layers="all")
        with attach(model, penalty, points=points) as watch:
            for _ in range(2):
                model(**make_padded_batch("left"))
                watch.loss()
        left_out = penalty.last.left_out
        assert penalty.last.points + (0 if left_out is None else left_out) == 2 * sum(LENGTHS)
        assert (left_out is None) == (points.max_norm_ratio is None)
        assert ("points_left_out" in penalty.last.named("score")) == (left_out is not None)
        assert points.max_norm_ratio != 1.05 or left_out > 0


def test_a_norm_that_is_not_a_number_is_not_left_out():
    model = llama()
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            model.get_input_embeddings().weight[9] = value
        with attach(model, CosReg(1.0), points=Points(max_norm_ratio=2.0)) as watch:
            model(**make_padded_batch("right"))
            assert watch.loss().isnan()


# PEFT reads an attribute that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_labels_reach_a_penalty_within_wrappers_that_skip_hooks():
    """LoRA's wrapper calls `forward` of the model with the head."""
    base_model = llama()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    values = []
    for model in (base_model, peft.get_peft_model(llama(), config).double().eval()):
        with attach(model, CosReg(1.0), points=Points("completion")) as watch:
            model(**make_padded_batch("right"))
            values.append(watch.loss().detach())
            with pytest.raises(UserError, match="needs labels, which this call of the model does not have"):
                model(**{**make_padded_batch("right"), "labels": None})
            model(**make_padded_batch("left"))
            values.append(watch.loss().detach())
    assert_close(torch.stack(values), values[0].expand(4), **CLOSE)


def test_labels_of_one_call_are_not_those_of_the_next():
    model = llama()
    with attach(model, CosReg(1.0), points=Points("labelled")) as watch:
        model(**make_padded_batch("right"))
        watch.loss()
        batch = {name: value for name, value in make_padded_batch("right").items() if name != "labels"}
        for called_module in (model, model.model):
            with pytest.raises(UserError, match="needs labels"):
                called_module(**batch)


@pytest.mark.parametrize("which", ["first", "last"])
def test_end_tokens_with_a_gap_in_the_mask_are_one_for_each_row(which):
    """A token that is left out of the attention in the middle of a sentence does not end it."""
    model = llama()
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "attention_mask": torch.tensor([[1, 0, 1, 1]])}
    penalty = CosReg(1.0)
    with attach(model, penalty, points=Points(which)) as watch:
        model(**batch)
        watch.loss()
    assert penalty.last.points == 1


def test_special_ids_are_those_of_the_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]
    tokenizer = hf.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    assert special_ids(tokenizer) == (0, 1, 2, 3, 4)


def forward_batch(points: Points, **changes: Any) -> None:
    model = changes.pop("model", None) or llama()
    batch = {**make_padded_batch("right"), **changes}
    with attach(model, CosReg(1.0), points=points):
        model(**{name: value for name, value in batch.items() if value is not None})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Points("middle"), "points=middle"),
        (lambda: Points("content"), r"special_ids=special_ids\(tokenizer\)"),
        (lambda: Points(max_norm_ratio=1.0), "max_norm_ratio=1"),
        (lambda: Points(max_norm_ratio=float("nan")), "max_norm_ratio=nan"),
        (lambda: attach(llama(), CosReg(1.0, include_padding=True), points=Points("last")), "include_padding"),
        (
            lambda: forward_batch(CHOICES["content"], input_ids=None, inputs_embeds=torch.zeros(3, 5, WIDTH).double()),
            "points='content' needs input_ids, which this call of the model does not have",
        ),
        (lambda: forward_batch(CHOICES["labelled"], labels=None), "points='labelled' needs labels, which this call"),
        (
            lambda: shrinkage_covariance(llama(), [{"input_ids": torch.ones(2, 3).long()}], points=Points("labelled")),
            "points='labelled' needs labels, which this call",
        ),
        (
            lambda: forward_batch(Points("completion"), model=hf.BertForSequenceClassification(hf.BertConfig(**SHAPE)),
                                  labels=torch.tensor([0, 1, 1])),
            r"needs labels of shape \(3, 5\), one for each token; they have shape \(3,\)",
        ),
    ],
    ids=range(9),
)  # fmt: skip
def test_points_that_a_call_does_not_have_are_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_layers_of_different_lengths_have_points_by_their_own_shape(which):
    """As for modules that shorten the sequence between them, without a mask."""
    tokens = Tokens(points=Points(which))
    for batch, length in ((2, 5), (2, 3), (2, 5)):
        rows = torch.arange(batch * length).view(batch, length)
        expected = {"first": rows[:, 0], "last": rows[:, -1], "all": None}[which]
        indices = tokens.indices_of(torch.zeros(batch, length, 4))
        assert indices is expected is None or torch.equal(indices, expected)


def test_rows_that_count_are_found_before_the_first_layer(monkeypatch):
    """On a GPU, finding them waits for all operations in the queue, of which there are few before the first layer."""
    events = []

    def record_search(mask: Tensor) -> Tensor | None:
        events.append("rows")
        return mask_to_indices(mask)

    monkeypatch.setattr("istar.regularizers.points.mask_to_indices", record_search)
    model = bert()
    for number, layer in enumerate(model.bert.encoder.layer, 1):
        layer.register_forward_hook(lambda *_, number=number: events.append(f"layer {number}"))
    with attach(model, CosReg(1.0, layers="all")) as attached:
        model(torch.tensor([[1, 7, 2]]), attention_mask=torch.tensor([[1, 1, 0]]))
        attached.loss()
    assert events == ["rows", "layer 1", "layer 2"]
