"""Masks, ids, positions and labels of a pass that the base model's call does not have, but a call around it has."""

import inspect
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import istar
from istar.errors import UserError
from istar.hidden_states import attach, shrinkage_covariance
from istar.regularizers import CosReg, Points
from tests.hidden_states.test_attach import Tower
from tests.oracles import algorithm_1, stack
from tests.penalties import WEIGHT, WIDTH, ZETA, Recording, gradients, sigma

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
IDS: dict[str, Any] = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE: dict[str, Any] = {**IDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "initializer_range": 0.3}
BERT: dict[str, Any] = {
    **SHAPE, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, "type_vocab_size": 2,
}  # fmt: skip
MASK = (torch.arange(9) < torch.tensor([9, 8, 7, 6, 5, 4])[:, None]).long()
TOKENS = torch.randint(3, 40, (6, 9), generator=torch.Generator().manual_seed(0)) * MASK


def make_rwkv() -> Any:
    """Return a model with a head that takes a mask and does not pass it on, as do the heads of FNet."""
    return hf.RwkvForCausalLM(hf.RwkvConfig(**SHAPE, attention_hidden_size=WIDTH, context_length=32))


def make_fnet(head: str) -> Any:
    # The modes differ in dropout.
    return getattr(hf, f"FNet{head}")(hf.FNetConfig(**BERT, hidden_dropout_prob=0.0))


def make_bert() -> Any:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertModel(hf.BertConfig(**BERT, **dropout))


class Outer(nn.Module):
    """A user's module around a model, which calls it by a function of the model and its own arguments."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:  # fmt: skip
        return self.call(self.model, input_ids, attention_mask)


def drop_all(model: nn.Module, ids: Tensor, mask: Tensor | None) -> Any:
    return model(input_ids=ids)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def find_last_state(model: nn.Module, call: Callable[[], Any]) -> Tensor:
    """Return the last hidden state of the base model in a call, `(batch, tokens, d)`."""
    [base] = [part for part in model.modules() if isinstance(part, hf.RwkvModel | hf.FNetModel | hf.BertModel)]
    states: list[Tensor] = []
    with base.register_forward_hook(lambda module, args, output: states.append(output[0])):
        call()
    return states[0]


def check(model: nn.Module, call: Callable[[], Any], mask: Tensor) -> None:
    """Compare score, gradients and the number of points with the naive ones of the tokens in a mask."""
    state, mask = find_last_state(model, call), mask.reshape(-1, mask.shape[-1])
    score = algorithm_1(stack([state], mask), sigma(), ZETA, torch.linalg.eigvalsh)
    expected = gradients(model, WEIGHT * (1 - score))
    penalty = Recording("last")
    with attach(model, penalty) as attached:
        call()
        assert_close(gradients(model, attached.loss()), expected, **CLOSE)
    assert penalty.last is not None
    assert penalty.last.points == mask.sum()
    assert_close(penalty.last.score, score.detach(), **CLOSE)


# PEFT reads an attribute that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["keyword", "position", "base", "wrapped", "wrapped twice", "forward", "lora"])
def test_a_mask_that_the_head_does_not_pass_on_counts(how: str) -> None:
    head = make_rwkv().double()
    model: Any = head
    if how.startswith("wrapped"):
        model = Outer(head, lambda model, ids, mask: model(ids, mask))
        model = model if how == "wrapped" else Outer(model, drop_all)
    elif how == "forward":
        model = Outer(head, lambda model, ids, mask: model.forward(ids, mask))
    elif how == "lora":
        config = peft.LoraConfig(r=2, target_modules=["key", "value"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(head, config).double()
    calls = {
        "position": lambda: model(TOKENS, MASK),
        "base": lambda: model.rwkv(TOKENS, attention_mask=MASK),
        "wrapped": lambda: model(TOKENS, attention_mask=MASK),
    }
    check(model, calls.get(how, lambda: model(input_ids=TOKENS, attention_mask=MASK)), MASK)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice"])
def test_the_heads_of_fnet_take_a_mask_that_the_model_ignores(head: str) -> None:
    model = make_fnet(head).double()
    shape = (3, 2, 9) if head == "ForMultipleChoice" else (6, 9)
    batch = {"input_ids": TOKENS.view(shape), "attention_mask": MASK.view(shape)}
    check(model, lambda: model(**batch), MASK)
    points = find_last_state(model.eval(), lambda: model(**batch))[MASK.bool()]
    assert_close(
        shrinkage_covariance(model, [batch], layers="last").double(), torch.cov(points.T), rtol=1e-5, atol=1e-6
    )


def make_four_dimensions(mask: Tensor) -> Tensor:
    return (mask[:, None, :, None] * mask[:, None, None]).bool()


def call_by_kind(model: nn.Module, ids: Tensor, mask: Any) -> Any:
    """Call a model with what it takes, and let its hooks see a mask for each kind of attention."""
    return model(input_ids=ids, attention_mask={"full_attention": make_four_dimensions(mask)})


class Kinds(hf.BertModel):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask["full_attention"], **kwargs)


FEWER = MASK * (torch.arange(9) > 0)


@pytest.mark.parametrize(
    ("call", "mask"),
    [
        (drop_all, MASK),
        # The ids of another batch have another mask.
        (lambda model, ids, mask: model(input_ids=ids.flip(1)), torch.ones_like(MASK)),
        (lambda model, ids, mask: model(input_ids=ids[:, :5]), torch.ones_like(MASK)[:, :5]),
        (lambda model, ids, mask: model(input_ids=ids.clone()), MASK),
        # A mask that is changed on the way is that of the base model.
        (lambda model, ids, mask: model(input_ids=ids, attention_mask=FEWER), FEWER),
        (lambda model, ids, mask: model(ids, make_four_dimensions(FEWER)), FEWER),
        (lambda model, ids, mask: model(torch.cat([ids, ids], 1), torch.cat([mask, mask], 1)), MASK.repeat(1, 2)),
        (lambda model, ids, mask: model(inputs_embeds=model.get_input_embeddings()(ids)), MASK),
        (lambda model, ids, mask: model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=FEWER), FEWER),
    ],
)
def test_the_mask_is_the_innermost_that_fits_the_states(call: Callable[..., Any], mask: Tensor) -> None:
    model = Outer(make_bert(), call).double()
    check(model, lambda: model(TOKENS, MASK), mask)


def test_a_mask_for_each_kind_of_attention_gives_way_to_the_one_of_the_head() -> None:
    model = Outer(Kinds(make_bert().config), call_by_kind).double()
    check(model, lambda: model(TOKENS, MASK), MASK)


def test_each_of_several_calls_of_the_model_within_one_call_has_its_own_mask() -> None:
    queries, documents = (TOKENS, MASK), (TOKENS.flip(0), MASK.flip(0) * (TOKENS.flip(0) % 2))

    def call(model: nn.Module, ids: Tensor, mask: Any) -> None:
        model(*queries)
        model(*documents)
        model(documents[0])

    expected = [MASK.sum(), documents[1].sum(), MASK.numel()]
    model, penalty, counts = Outer(make_bert(), call), CosReg(1.0), []
    penalty.summarize = lambda states, tokens: counts.append(tokens.indices_of(states[0])) or []  # type: ignore[method-assign]
    with attach(model, penalty), pytest.warns(UserWarning, match="the penalties of two training passes in a row"):
        model(*queries)
    assert [MASK.numel() if rows is None else len(rows) for rows in counts] == expected


def test_a_mask_around_the_model_that_does_not_fit_is_refused_in_one_line() -> None:
    model = Outer(make_bert(), lambda model, ids, mask: model(inputs_embeds=torch.zeros(6, 11, WIDTH)))
    with (
        attach(model, CosReg(1.0)),
        pytest.raises(UserError, match=r"mask has shape \(6, 9\) and the hidden states have shape \(6, 11, 16\)"),
    ):
        model(TOKENS, MASK)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (Points("content", special_ids=(3, 4, 5)), int((MASK * ~torch.isin(TOKENS, torch.tensor([3, 4, 5]))).sum())),
        (Points("completion"), int((MASK * (TOKENS % 3 == 0)).sum())),
        (Points("last"), 6 * 2),
    ],
)
@pytest.mark.parametrize("is_called_with_embeddings", [False, True])
def test_outer_arguments_choose_points(points: Points, expected: int, is_called_with_embeddings: bool) -> None:
    def call(model: Any, ids: Tensor, mask: Any) -> Any:
        return model(inputs_embeds=model.get_input_embeddings()(ids)) if is_called_with_embeddings else model(ids)

    model, penalty = Outer(make_bert(), call), CosReg(1.0)
    positions = torch.arange(9).remainder(3).expand(1, 9)
    positions = torch.cat([torch.arange(3), torch.arange(6)]).expand(6, 9) if points.which == "last" else positions
    with attach(model, penalty, points=points) as attached:
        model(TOKENS, MASK, position_ids=positions, labels=TOKENS.masked_fill(TOKENS % 3 != 0, -100))
        attached.loss()
    assert penalty.last is not None
    assert penalty.last.points == expected


@pytest.mark.parametrize("points", [Points(), Points("completion")])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_checkpoint_of_the_model_repeats_its_call_with_the_arguments_around_it(points: Points, depth: int) -> None:
    """The calls around the checkpoint have ended when the backward pass repeats the model's call."""

    def call(model: nn.Module, ids: Tensor, mask: Any) -> Any:
        return checkpoint(lambda ids: model(ids), ids, use_reentrant=False)

    results = []
    for function in (drop_all, call):
        torch.manual_seed(0)
        head = make_rwkv().double()
        model = Outer(head if depth == 2 else head.rwkv, function)
        with attach(model, CosReg(1.0), points=points) as attached:
            for ids in (TOKENS, TOKENS.roll(1, 0)):
                output = model(ids, MASK, labels=ids.masked_fill(ids % 3 != 0, -100))[0]
                (output.square().mean() + attached.loss()).backward()
        results.append({name: weight.grad for name, weight in model.named_parameters()})
    assert_close(results[1], results[0], **CLOSE)


@pytest.mark.filterwarnings("ignore")  # those of the compiler
def test_a_positional_mask_of_a_compiled_module_is_the_mask() -> None:
    """The wrapper that torch.compile returns does not name its arguments."""
    model, states = Tower(), torch.randn(6, 9, WIDTH, dtype=torch.float64)
    for module in (model, torch.compile(model, backend="eager")):
        penalty = CosReg(1.0)
        with attach(module, penalty, modules=model.layers) as attached:
            module(states, MASK)
            attached.loss()
        assert penalty.last is not None
        assert penalty.last.points == MASK.sum()


def test_arguments_of_a_call_that_failed_or_ended_are_not_those_of_the_next() -> None:
    head, penalty = make_rwkv(), CosReg(1.0)

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        raise ZeroDivisionError

    with attach(head, penalty) as attached:
        handle = head.rwkv.blocks[0].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            head(TOKENS, MASK)
        handle.remove()
        for ends_with_head in (False, True):
            if ends_with_head:
                head(TOKENS, MASK)
            head.rwkv(TOKENS)
            attached.loss()
            assert penalty.last is not None
            assert penalty.last.points == MASK.numel()


def test_refresh_counts_the_points_of_training() -> None:
    model, batch = make_rwkv().double(), {"input_ids": TOKENS, "attention_mask": MASK}
    for module in (model, Outer(model, drop_all)):
        penalty = istar.IStar(1.0, 0.4, layers="last")
        with attach(module, penalty) as attached:
            assert attached.refresh([batch, {"input_ids": TOKENS}]) == MASK.sum() + MASK.numel()


# Arguments by position ----------------------------------------------------------------------------------------


POSITIONAL: dict[str, Callable[[], Any]] = {
    "cpmant": lambda: hf.CpmAntForCausalLM(hf.CpmAntConfig(
        vocab_size=40, hidden_size=WIDTH, num_attention_heads=2, dim_head=8, dim_ff=24, num_hidden_layers=2,
        prompt_length=2)),
    "xlnet": lambda: hf.XLNetModel(hf.XLNetConfig(**IDS, d_model=WIDTH, n_layer=2, n_head=2, d_inner=24)),
    "xlm": lambda: hf.XLMModel(hf.XLMConfig(**IDS, emb_dim=WIDTH, n_layers=2, n_heads=2, max_position_embeddings=32)),
    "openai": lambda: hf.OpenAIGPTModel(hf.OpenAIGPTConfig(vocab_size=40, n_embd=WIDTH, n_layer=2, n_head=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONAL)
def test_a_model_that_is_asked_for_its_states_may_get_all_arguments_by_position(name: str) -> None:
    model = POSITIONAL[name]().eval()
    parameters = list(inspect.signature(model.forward).parameters.values())
    defaults = [parameter.default for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    state = model(TOKENS, output_hidden_states=True).hidden_states[-1]
    losses = []
    for arguments in ([TOKENS], [TOKENS, *defaults[1:]]):
        penalty = Recording("last")
        with attach(model, penalty) as attached:
            model(*arguments)
            losses.append(attached.loss())
        assert torch.equal(penalty.received[0], state)
    assert torch.equal(*losses)
