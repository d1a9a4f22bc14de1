"""`attach` for the ways in which models are run, against the naive penalty of the same pass."""

import gc
import inspect
import warnings
import weakref
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from packaging.version import Version
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from istar.errors import UserError
from istar.hidden_states import attach
from istar.hidden_states.model_layers import find_base_model, find_head_model
from istar.regularizers import CosReg, Points, SetPoint
from tests.hidden_states.builders import (
    CLOSE,
    IDS,
    INPUTS,
    MASK,
    SHAPE,
    UNLABELLED,
    bert,
    check_states_and_gradients,
    llama,
    make_istar,
)
from tests.oracles import algorithm_1, stack
from tests.penalties import (
    WEIGHT,
    WIDTH,
    ZETA,
    Recording,
    assert_equal,
    gradients,
    naive_loss,
    received,
    seeded_pass,
    sigma,
)

CACHE = "cache" if "cache" in inspect.signature(hf.LlamaModel.forward).parameters else "past_key_values"
"""The argument for cached positions, which transformers 5.24 has renamed."""


# Wrapped and unusual models -----------------------------------------------------------------------------------


# PEFT reads an attribute that transformers has renamed.
OF_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@OF_PEFT
@pytest.mark.parametrize(("make_model", "layers"), [(bert, "all"), (llama, "with_embeddings")])
def test_lora_on_a_frozen_model(make_model, layers):
    targets = ["query", "value"] if make_model is bert else ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.1)
    model = peft.get_peft_model(make_model(), config).double().train()
    inputs = INPUTS if make_model is bert else {**UNLABELLED, "labels": IDS.masked_fill(MASK == 0, -100)}
    assert not model.base_model.model.get_input_embeddings().weight.requires_grad
    check_states_and_gradients(model, inputs, layers)


@OF_PEFT
@pytest.mark.parametrize("make_model", [bert, llama])
def test_the_tokens_of_prompt_tuning_count(make_model):
    task_type = "SEQ_CLS" if make_model is bert else "CAUSAL_LM"
    model = (
        peft.get_peft_model(make_model(), peft.PromptTuningConfig(task_type=task_type, num_virtual_tokens=2))
        .double()
        .train()
    )
    check_states_and_gradients(
        model, INPUTS if make_model is bert else {**UNLABELLED, "labels": IDS.masked_fill(MASK == 0, -100)}
    )


@OF_PEFT
@pytest.mark.parametrize(
    ("make_model", "points"),
    [*((model, points) for model in (bert, llama) for points in ("all", "first", "last")),
     (llama, "labelled"), (llama, "completion")],
)  # fmt: skip
def test_the_virtual_tokens_of_prefix_tuning_have_no_states(make_model, points):
    """The mask that PEFT passes on covers the prefix, which is in `past_key_values`."""
    if make_model is bert and CACHE == "cache" and Version(peft.__version__) < Version("0.22"):
        pytest.skip("peft 0.21 finds no place for a prefix in the encoders of transformers 5.24")
    task_type = "SEQ_CLS" if make_model is bert else "CAUSAL_LM"
    config = peft.PrefixTuningConfig(task_type=task_type, num_virtual_tokens=4)
    model = peft.get_peft_model(make_model().eval(), config).double()
    model.train()
    labels = IDS.masked_fill((MASK == 0) | (IDS % 3 == 0), -100)
    inputs = INPUTS if make_model is bert else {**UNLABELLED, "labels": labels}
    states: list[Tensor] = []
    layers = model.get_submodule("base_model.bert.encoder.layer" if make_model is bert else "base_model.model.layers")
    handle = layers[0].register_forward_hook(lambda module, args, output: states.append(output))
    expected_loss = seeded_pass(model, inputs, 1).loss
    handle.remove()
    assert states[0].shape == (*IDS.shape, WIDTH)
    mask = {
        "all": MASK, "first": nn.functional.one_hot(MASK.argmax(1), 6),
        "last": nn.functional.one_hot(MASK.sum(1) - 1, 6),
        "labelled": nn.functional.pad(labels[:, 1:] != -100, (0, 1)) * MASK, "completion": (labels != -100) * MASK,
    }[points]  # fmt: skip
    score = algorithm_1(stack(states, mask), sigma(), ZETA, torch.linalg.eigvalsh)
    expected = gradients(model, expected_loss + WEIGHT * (1 - score))
    with attach(model, make_istar([1]), points=Points(points)) as watch:
        loss = seeded_pass(model, inputs, 1).loss + watch.loss()
        assert_close(gradients(model, loss), expected, **CLOSE)
        assert watch.penalty.last.points == mask.sum()
        if points in ("all", "first", "last"):
            assert watch.refresh([inputs]) == mask.sum()
    assert expected["prompt_encoder.default.embedding.weight"].norm() > 0


@pytest.mark.parametrize("has_mask_of_four_dimensions", [False, True])
@pytest.mark.parametrize("how", ["input_ids", "inputs_embeds", "by position"])
def test_the_states_of_a_pass_with_cached_positions_are_those_of_its_tokens(how, has_mask_of_four_dimensions):
    model = llama().eval()
    cache = hf.DynamicCache(config=model.config)
    model.model(input_ids=IDS[:, :4], attention_mask=MASK[:, :4].clone(), use_cache=True, **{CACHE: cache})
    mask = MASK[:, [4, 5, 0, 1, 2, 3]].flip(1)
    if has_mask_of_four_dimensions:
        allowed = (torch.ones(6, 6).tril().bool() & mask[:, None, None].bool() & mask[:, None, :, None].bool())[
            :, :, 4:
        ]
        call_mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(
            ~allowed, torch.finfo(torch.float64).min
        )
    else:
        call_mask = mask
    tokens = IDS[:, 4:]
    arguments: dict[str, Any] = {CACHE: cache, "use_cache": True}
    args: tuple[Any, ...] = ()
    if how == "by position":
        args = (tokens, call_mask)
    else:
        value = tokens if how == "input_ids" else model.get_input_embeddings()(tokens)
        arguments |= {how: value, "attention_mask": call_mask}
    penalty = Recording()
    with attach(model, penalty) as watch:
        model.model(*args, **arguments)
        watch.loss()
    assert [tuple(state.shape) for state in penalty.received] == 3 * [(3, 2, WIDTH)]
    assert penalty.last.points == 3 * mask[:, 4:].sum()


def test_of_several_models_within_a_module_the_user_chooses_one():
    towers = nn.ModuleDict({"query": bert(), "document": bert()})
    message = r"ModuleDict has 2 transformers models, query, document; expected 1: .* for example model\.query$"
    with pytest.raises(UserError, match=message) as error:
        attach(towers, make_istar())
    assert "\n" not in str(error.value)
    check_states_and_gradients(towers.document, INPUTS)
    with pytest.raises(UserError, match=r"has 2 transformers models, 1\.query, 1\.document"):
        attach(nn.Sequential(nn.Identity(), towers), make_istar())


def test_a_model_with_two_names_or_within_another_model_is_one():
    model = bert()
    container = nn.ModuleDict({"encoder": model.bert, "model": model, "again": model})
    assert find_head_model(container) is model
    assert find_base_model(container) is model.bert


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_decoders_are_refused_and_each_stack_can_be_attached_to(name):
    sizes = {
        "T5": {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2},
        "Bart": {"d_model": WIDTH, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    }[name]  # fmt: skip
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**sizes, vocab_size=40, decoder_start_token_id=1)
    model = getattr(hf, f"{name}ForConditionalGeneration")(config).double().train()
    with pytest.raises(UserError, match=r"is an encoder-decoder.*for example model\.get_encoder\(\)$") as error:
        attach(model, make_istar())
    assert "\n" not in str(error.value)

    inputs = {**UNLABELLED, "labels": IDS}
    encoder = model.get_encoder()
    outputs = seeded_pass(model, inputs, 1, output_hidden_states=True)
    expected = gradients(model, naive_loss(outputs, outputs.encoder_hidden_states[1:], MASK))
    penalty = Recording()
    with attach(encoder, penalty) as watch:
        watched_outputs = seeded_pass(model, inputs, 1)
        loss = watch.loss() + watched_outputs.loss
    assert_equal(penalty.received, outputs.encoder_hidden_states[1:])
    assert_close(gradients(model, loss), expected, **CLOSE)
    decoder = model.get_decoder()
    states = seeded_pass(decoder, {"input_ids": IDS}, 1, output_hidden_states=True).hidden_states[1:]
    assert len(states) != len(outputs.encoder_hidden_states[1:])
    assert_equal(received(decoder, {"input_ids": IDS}, "all", 1), states)


def test_the_head_of_a_question_answering_model_is_no_layer():
    """DistilBERT applies dropout to hidden states before its head, which must not be taken for the last layer."""
    torch.manual_seed(0)
    config = hf.DistilBertConfig(dim=WIDTH, n_layers=3, n_heads=2, hidden_dim=24, vocab_size=40, qa_dropout=0.5)
    model = hf.DistilBertForQuestionAnswering(config).double().train()
    states = seeded_pass(model, UNLABELLED, 1, output_hidden_states=True).hidden_states
    assert_equal(received(model, UNLABELLED, "last", 1), states[-1:])
    assert_equal(received(model, UNLABELLED, [1, 3], 1), [states[1], states[3]])
    with attach(model, make_istar("last")) as watch:
        assert watch.refresh([UNLABELLED]) == MASK.sum()
        assert watch.refresh([{**UNLABELLED, "start_positions": torch.zeros(3), "end_positions": torch.ones(3)}]) == 14


# Modules that the user names ----------------------------------------------------------------------------------


class Tower(nn.Module):
    """Linear layers of a model that is not of transformers."""

    def __init__(self, uses_checkpoint: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).double()
        self.uses_checkpoint = uses_checkpoint

    def forward(self, points: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        states = [points]
        for layer in self.layers:
            state = states[-1].tanh()
            states.append(checkpoint(layer, state, use_reentrant=False) if self.uses_checkpoint else layer(state))
        return states


POINTS = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def naive_gradients(model: Tower, points: Tensor, mask: Tensor | None, layer_indices: list[int]) -> dict[str, Tensor]:
    states = model(points)
    score = algorithm_1(stack([states[index] for index in layer_indices], mask), sigma(), ZETA, torch.linalg.eigvalsh)
    return gradients(model, WEIGHT * (1 - score) + states[-1].square().sum())


@pytest.mark.parametrize(
    ("layers", "numbers", "mask", "uses_checkpoint"),
    [("all", [1, 2, 3], MASK, False), ("last", [3], None, True), ([1, -1], [1, 3], MASK, True)],
)
def test_any_module_whose_layers_are_named(mask, layers, numbers, uses_checkpoint):
    expected = naive_gradients(Tower(), POINTS, mask, numbers)
    model = Tower(uses_checkpoint)
    with attach(model, make_istar(layers), modules=model.layers) as watch:
        states = model(POINTS, mask)
        loss = watch.loss() + states[-1].square().sum()
        loss.backward()
    assert_close({name: parameter.grad for name, parameter in model.named_parameters()}, expected, **CLOSE)


def test_states_with_time_first_and_gradients_that_are_not_contiguous():
    expected = naive_gradients(Tower(), POINTS, MASK, [1, 2, 3])
    model = Tower()
    with attach(model, make_istar(), modules=model.layers) as watch:
        states = model(POINTS.transpose(0, 1), MASK.T)
        loss = watch.loss() + states[-1].transpose(0, 1).square().sum()
        assert_close(gradients(model, loss), expected, **CLOSE)


def test_modules_that_cannot_be_layers_are_refused_in_one_line():
    model = Tower()
    with pytest.raises(UserError, match="layer 0, the embeddings, is not among the given modules"):
        attach(model, make_istar("with_embeddings"), modules=model.layers)
    with pytest.raises(UserError, match="named twice"):
        attach(model, make_istar(), modules=[*model.layers, model.layers[0]])
    with pytest.raises(UserError, match="layer 4 does not exist"):
        attach(model, make_istar([4]), modules=model.layers)
    with pytest.raises(UserError, match=r"no transformers model in Tower.*modules=\[\.\.\.\]"):
        attach(model, make_istar())
    with pytest.raises(UserError, match=r"nn\.DataParallel runs copies"):
        attach(nn.DataParallel(bert()), make_istar())
    with pytest.raises(UserError, match="a Linear of modules is not part of Tower; expected its modules"):
        attach(model, make_istar(), modules=[*model.layers, nn.Linear(1, 1)])
    model.unused = nn.Linear(1, 1)
    with (
        attach(model, make_istar(), modules=[*model.layers, model.unused]),
        pytest.raises(UserError, match="Tower called 3 layers; expected a call of all 4"),
    ):
        model(POINTS)


# Masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("is_additive", [False, True])
def test_a_mask_of_four_dimensions_counts_the_tokens_that_attend_to_themselves(is_additive, heads):
    states = [torch.randn(3, 6, WIDTH, dtype=torch.float64) for _ in range(3)]
    mask_4d = (MASK[:, None, None].bool() & MASK[:, None, :, None].bool()).expand(-1, heads, -1, -1)
    mask_4d = (
        torch.zeros(mask_4d.shape).masked_fill(~mask_4d, torch.finfo(torch.float32).min) if is_additive else mask_4d
    )
    penalty = make_istar()
    assert torch.equal(penalty(states, mask_4d), make_istar()(states, MASK))
    assert penalty.last.points == 2 * MASK.sum()


@pytest.mark.parametrize("shape", [(3, 1, 6, 5), (3, 1, 1, 6), (2, 1, 6, 6), (3, 6, 6), (3, 1, 6), (3, 5), (18,)])
def test_masks_of_other_shapes_are_refused_in_one_line(shape):
    with pytest.raises(UserError, match=r"expected a mask of shape|the attention mask has shape") as error:
        make_istar()([torch.randn(3, 6, WIDTH) for _ in range(3)], torch.ones(shape, dtype=torch.bool))
    assert "\n" not in str(error.value)


def test_masks_by_kind_of_attention_are_refused_in_one_line():
    config = hf.Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=8, bos_token_id=1, eos_token_id=2)
    model = hf.Qwen3ForCausalLM(config)
    masks = {"full_attention": torch.zeros(3, 1, 6, 6)}
    with (
        attach(model, make_istar()),
        pytest.raises(UserError, match="attention mask is a dict; expected a tensor") as error,
    ):
        model.model(input_ids=IDS, attention_mask=masks)
    assert "\n" not in str(error.value)


def test_batches_without_padding_have_no_mask_and_all_their_tokens_count():
    model = llama()
    inputs = {"input_ids": IDS[2:], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    states = seeded_pass(model, inputs, 1, output_hidden_states=True).hidden_states
    penalty = Recording()
    with attach(model, penalty) as watch:
        seeded_pass(model, inputs, 1)
        watch.loss()
    assert_equal(penalty.received, states[1:])
    assert penalty.last.points == 3 * 6


# Passes -------------------------------------------------------------------------------------------------------


def test_passes_without_gradients_are_not_read_and_leave_the_training_pass_alone():
    model, penalty = bert(), Recording()
    with attach(model, penalty) as watch:
        with torch.no_grad():
            model(**INPUTS)
        assert penalty.received == []
        with pytest.raises(UserError, match="no forward pass was read since the last loss"):
            watch.loss()
        seeded_pass(model, INPUTS, 1)
        with torch.no_grad():
            model(**INPUTS)
        with torch.inference_mode():
            model(**INPUTS)
        loss = watch.loss()
        assert loss.requires_grad
        with pytest.raises(UserError, match="no forward pass was read since the last loss"):
            watch.loss()
    assert len(penalty.received) == 3
    states = seeded_pass(model, INPUTS, 1, output_hidden_states=True).hidden_states
    assert_close(loss, penalty(states, MASK), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("saved", "resumed", "names"),
    [
        (make_istar(), CosReg(1.0), "shrinkage_covariance"),
        (make_istar(), make_istar(set_point=SetPoint("keep")), "kept_batches, kept_score"),
        (make_istar(set_point=SetPoint("keep")), make_istar(), "kept_batches, kept_score"),
    ],
)
def test_the_state_of_another_penalty_is_refused_in_one_line(saved, resumed, names):
    with attach(bert(), saved) as watch, attach(bert(), resumed) as resumed_watch:
        message = rf"the checkpoint's penalty and {type(resumed).__name__}\(.*\) differ in {names}; expected"
        with pytest.raises(UserError, match=message) as error:
            resumed_watch.load_state_dict(watch.state_dict())
    assert "\n" not in str(error.value)


def test_the_loss_is_that_of_the_latest_pass():
    model = bert()
    with attach(model, make_istar()) as watch:
        seeded_pass(model, INPUTS, 1)
        seeded_pass(model, INPUTS, 2)
        latest_loss = watch.loss()
        seeded_pass(model, INPUTS, 2)
        assert torch.equal(watch.loss(), latest_loss)
        seeded_pass(model, INPUTS, 1)
        assert not torch.equal(watch.loss(), latest_loss)


def test_a_pass_that_fails_leaves_nothing_behind():
    model, penalty = bert(), make_istar()
    state_references: list[weakref.ref[Tensor]] = []

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        state_references.append(weakref.ref(args[0]))
        raise ZeroDivisionError

    with attach(model, penalty) as watch:
        handle = model.bert.encoder.layer[1].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(**INPUTS)
        handle.remove()
        gc.collect()
        assert state_references[0]() is None
        with pytest.raises(UserError, match="no forward pass was read"):
            watch.loss()
        seeded_pass(model, INPUTS, 1)
        loss = watch.loss()
    assert penalty.last.points == 3 * MASK.sum()
    states = seeded_pass(model, INPUTS, 1, output_hidden_states=True).hidden_states
    assert_close(loss, penalty(states, MASK), rtol=1e-12, atol=0)


def test_removed_hooks_leave_the_model_as_it_was():
    model = bert()
    counts_before = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    watch = attach(model, make_istar())
    counts_during = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    watch.remove()
    counts_after = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    assert counts_before == counts_after != counts_during
    assert model(**INPUTS).hidden_states is None


def test_two_penalties_on_one_model_add_up():
    model = bert()
    with attach(model, make_istar()) as istar_watch, attach(model, CosReg(0.3)) as cosreg_watch:
        outputs = seeded_pass(model, INPUTS, 1, output_hidden_states=True)
        loss = istar_watch.loss() + cosreg_watch.loss()
    expected = make_istar()(outputs.hidden_states, MASK) + CosReg(0.3)(outputs.hidden_states, MASK)
    assert_close(loss, expected, rtol=1e-12, atol=0)


def test_weight_0_is_bit_for_bit_no_penalty_and_a_schedule_turns_it_on_and_off():
    model, penalty = bert(), Recording()
    expected_gradients = gradients(model, seeded_pass(model, INPUTS, 1).loss)
    with attach(model, penalty) as watch:
        penalty.weight = 0.0
        outputs = seeded_pass(model, INPUTS, 1)
        loss = watch.loss()
        assert loss == 0
        assert penalty.received == []
        for name, gradient in gradients(model, outputs.loss + loss).items():
            assert torch.equal(gradient, expected_gradients[name])
        for weight in (0.5, -1.0, 0.0, 2.0):
            penalty.weight = weight
            seeded_pass(model, INPUTS, 1)
            loss = watch.loss()
            assert loss == (0 if weight == 0 else weight * penalty.last.value)
        penalty.weight = 1.0
        seeded_pass(model, INPUTS, 1)
        penalty.weight = 0.0
        assert watch.loss() == 0
        penalty.weight = 1.0
        with pytest.raises(UserError, match="no forward pass was read"):
            watch.loss()


def test_a_penalty_without_gradient_is_warned_of_once():
    model = bert()
    model.bert.requires_grad_(False)
    with attach(model, make_istar()) as watch:
        model(**INPUTS)
        with pytest.warns(UserWarning, match="nothing before the chosen layers is trainable") as caught:
            watch.loss()
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**INPUTS)
            watch.loss()


def test_a_hessian_vector_product_through_a_model_is_that_of_the_naive_penalty():
    torch.manual_seed(0)
    config = hf.BertConfig(**SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = hf.BertModel(config).double()
    model.set_attn_implementation("eager")
    weight = model.encoder.layer[0].output.dense.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def hessian_vector_product(loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad((gradient * direction).sum(), weight)[0]

    outputs = model(**UNLABELLED, output_hidden_states=True)
    score = algorithm_1(stack(outputs.hidden_states[1:], MASK), sigma(), ZETA, torch.linalg.eigvalsh)
    expected = hessian_vector_product(WEIGHT * (1 - score))
    with attach(model, make_istar()) as watch:
        model(**UNLABELLED)
        assert_close(hessian_vector_product(watch.loss()), expected, rtol=1e-8, atol=1e-10)
    assert expected.norm() > 1e-4


@pytest.mark.parametrize("tokens", [2, 600])
def test_a_state_that_is_modified_in_place_after_it_was_read_is_refused(tokens):
    class InPlace(Tower):
        def forward(self, points: Tensor) -> Tensor:
            for layer in self.layers:
                points = layer(points).add_(1)
            return points

    model = InPlace()
    with attach(model, make_istar(), modules=model.layers[:2]) as watch:
        # The watch reads the states when the pass has ended, after they were modified.
        model(torch.randn(3, tokens, WIDTH, dtype=torch.float64))
        watch.loss().backward()
    states = [layer(torch.randn(3, tokens, WIDTH, dtype=torch.float64)) for layer in model.layers]
    loss = make_istar()([states[0], *states])
    states[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Precision and compilation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "albert", "llama"])
def test_under_autocast_the_states_are_those_that_the_model_returns(name):
    if name == "albert":
        config = hf.AlbertConfig(**SHAPE, embedding_size=8)
        model = hf.AlbertForSequenceClassification(config).train()
    else:
        model = (bert() if name == "bert" else llama()).float()
    inputs = INPUTS if name != "llama" else UNLABELLED
    with torch.autocast("cpu", torch.bfloat16):
        states = seeded_pass(model, inputs, 1, output_hidden_states=True).hidden_states[1:]
        penalty = Recording()
        with attach(model, penalty) as watch:
            seeded_pass(model, inputs, 1)
            loss = watch.loss()
    assert_equal(penalty.received, states)
    assert loss.dtype == torch.float32
    expected_score = algorithm_1(stack([state.double() for state in states], MASK), sigma(), ZETA)
    assert_close(loss.double(), WEIGHT * (1 - expected_score), rtol=1e-5, atol=0)
    loss.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.fixture
def backend():
    """Return the name of a backend that runs the graphs of Dynamo without compiling them, which would be slow."""
    torch._dynamo.reset()
    yield "eager"
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", ["all", "with_embeddings"])
@pytest.mark.parametrize("make_model", [bert, llama])
def test_a_compiled_model_has_the_value_and_gradient_of_an_eager_one(make_model, layers, backend):
    model = make_model().eval()
    inputs = INPUTS if make_model is bert else {**UNLABELLED, "labels": IDS}
    check_states_and_gradients(model, inputs, layers, called=torch.compile(model, backend=backend))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled_part", ["whole", "base", "layers"])
def test_what_was_compiled_and_called_before_is_refused_or_right(compiled_part, backend):
    """The outcome depends on what torch recompiles for new hooks."""
    model = bert().eval()
    compiled_modules = {"whole": [model], "base": [model.bert], "layers": list(model.bert.encoder.layer)}[compiled_part]
    for module in compiled_modules:
        module.compile(backend=backend)
    states = model(**INPUTS, output_hidden_states=True).hidden_states
    model(**INPUTS)
    refusal = ""
    with attach(model, make_istar()) as watch:
        try:
            model(**INPUTS)
            loss = watch.loss()
        except UserError as error:
            refusal, loss = str(error), make_istar()(states, MASK)
    assert_close(loss, make_istar()(states, MASK), **CLOSE)
    assert not refusal or "compiled" in refusal


def test_layers_whose_hooks_are_not_called_are_refused_by_name():
    """Layers that were compiled before may skip their hooks; a penalty of only some of the layers would be wrong."""
    model = bert()
    model.bert.encoder.layer[1].forward, skipped = (lambda state, *_, **__: state), model.bert.encoder.layer[1]
    with attach(model, make_istar()):
        skipped._forward_hooks.clear()
        with pytest.raises(UserError, match="BertModel called 2 layers; expected a call of all 3") as error:
            model(**INPUTS)
    assert "\n" not in str(error.value)
