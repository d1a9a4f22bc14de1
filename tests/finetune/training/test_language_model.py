"""The loss of language models, whose head is computed only at the tokens to predict."""

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BambaConfig,
    BambaForCausalLM,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from istar.finetune.config import AdamWConfig
from istar.finetune.tasks.language_modelling import LanguageModelEvaluator
from istar.finetune.training.language_model import LanguageModelTuner, adds_to_loss, restrict_head_to
from istar.models import tiny
from istar.regularizers.points import IGNORED_LABEL
from istar.runs.tasks import TASKS

VOCABULARY = 30
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def bert() -> Any:
    config = tiny.make_tiny_config(VOCABULARY)
    config.update(SHAPE)
    return BertForMaskedLM(config)


def albert() -> Any:
    return AlbertForMaskedLM(AlbertConfig(**SHAPE, embedding_size=8, intermediate_size=32))


def distilbert() -> Any:
    return DistilBertForMaskedLM(DistilBertConfig(vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32))


def roberta() -> Any:
    return RobertaForMaskedLM(RobertaConfig(**SHAPE, intermediate_size=32, max_position_embeddings=40))


EXPERTS = {**SHAPE, "intermediate_size": 16, "num_key_value_heads": 2, "output_router_logits": True}
EXPERTS |= {"router_aux_loss_coef": 0.5, "pad_token_id": None}


def olmoe() -> Any:
    model = OlmoeForCausalLM(OlmoeConfig(**EXPERTS, num_experts=4, num_experts_per_tok=2, eos_token_id=1))
    model.set_experts_implementation("eager")  # the default takes no float64
    return model


def mixtral() -> Any:
    model = MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=4))
    model.set_experts_implementation("eager")
    return model


def bamba() -> Any:
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "attn_layer_indices": [1]}
    return BambaForCausalLM(
        BambaConfig(**SHAPE, **sizes, intermediate_size=16, num_key_value_heads=2, z_loss_coefficient=0.5)
    )


class _AddsToTheLoss:
    """Adds a loss in training that the architecture of transformers does not have."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        if outputs.loss is not None:
            outputs.loss = outputs.loss + 0.1 * outputs.logits.square().mean()
        return outputs


class CausalModelThatAdds(_AddsToTheLoss, GPT2LMHeadModel):
    pass


class MaskedModelThatAdds(_AddsToTheLoss, BertForMaskedLM):
    pass


def custom_gpt2() -> Any:
    return CausalModelThatAdds(gpt2().config)


def custom_bert() -> Any:
    return MaskedModelThatAdds(bert().config)


def make_batch(seed: int = 0, is_causal: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, VOCABULARY, (4, 10), generator=generator)
    mask = torch.arange(10) < torch.tensor([[10], [7], [9], [3]])
    is_chosen = mask if is_causal else mask & (torch.rand(4, 10, generator=generator) < 0.3)
    labels = torch.where(is_chosen, torch.randint(5, VOCABULARY, (4, 10), generator=generator), IGNORED_LABEL)
    labels = torch.where(mask, input_ids, IGNORED_LABEL) if is_causal else labels
    return {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "labels": labels,
        "feature_id": torch.tensor([3, 1, 0, 2]),
    }


def make_tuner(model: Any, is_causal: bool, **options: Any) -> LanguageModelTuner:
    spec = TASKS["clm" if is_causal else "mlm"]
    evaluators = {"": LanguageModelEvaluator(spec, 4)}
    return LanguageModelTuner(model.double().eval(), None, AdamWConfig(), evaluators, is_causal=is_causal, **options)


@pytest.mark.parametrize(
    "build", [gpt2, bert, albert, distilbert, roberta, olmoe, mixtral, bamba, custom_gpt2, custom_bert]
)
def test_loss_and_gradient_are_those_of_the_model(build: Any) -> None:
    is_causal = build in (gpt2, olmoe, mixtral, bamba, custom_gpt2)
    torch.manual_seed(1)
    module = make_tuner(build(), is_causal)
    reference = copy.deepcopy(module.model)
    batch = make_batch(is_causal=is_causal)
    inputs = {name: value for name, value in batch.items() if name != "feature_id"}
    loss, expected = module.task_loss(batch), reference(**inputs).loss
    # Losses are computed in float32.
    assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    for (name, parameter), reference_parameter in zip(
        module.model.named_parameters(), reference.parameters(), strict=True
    ):
        if reference_parameter.grad is not None:
            scale = reference_parameter.grad.abs().max().item()
            assert_close(parameter.grad, reference_parameter.grad, rtol=1e-5, atol=1e-6 * scale + 1e-12, msg=name)


def test_labels_that_are_not_shifted_or_selected_by_the_model_add_nothing() -> None:
    config = XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=16)
    assert not adds_to_loss(XLNetLMHeadModel(config))
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    sparse = ModernBertConfig(**SHAPE, **ids, intermediate_size=16, sparse_prediction=True)
    assert not adds_to_loss(ModernBertForMaskedLM(sparse))


@pytest.mark.parametrize("build", [bert, albert, distilbert, roberta])
def test_the_head_at_chosen_tokens_gives_their_logits(build: Any) -> None:
    model, batch = build().double().eval(), make_batch()
    is_chosen = batch["labels"] != IGNORED_LABEL
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with restrict_head_to(model, is_chosen):
        chosen_logits = model(**inputs).logits
    all_logits = model(**inputs).logits
    assert chosen_logits.shape == (1, int(is_chosen.sum()), VOCABULARY)
    assert_close(chosen_logits[0], all_logits[is_chosen], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"restrict_head_to_labels": False}], ids=["head at labels", "whole head"])
@pytest.mark.parametrize("build", [gpt2, bert, olmoe, custom_bert])
def test_validation_counts_each_predicted_token_once(build: Any, options: dict[str, Any]) -> None:
    is_causal = build in (gpt2, olmoe)
    torch.manual_seed(2)
    module, batch = make_tuner(build(), is_causal, **options), make_batch(is_causal=is_causal)
    module.on_validation_epoch_start()
    with torch.no_grad():
        halves = [{name: value[start : start + 2] for name, value in batch.items()} for start in (0, 2)]
        for half in halves:
            outputs = module.validation_step(half, 0)
            assert list(outputs["hidden_states"])[:3] == ["0", "1", "2"]
        logits = module.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    evaluation = module.evaluators[""](module._outputs[0])
    losses, is_correct = [], []
    for row, labels in enumerate(batch["labels"].tolist()):
        for position, label in enumerate(labels):
            source_position = position - 1 if is_causal else position
            if label != IGNORED_LABEL and source_position >= 0:
                losses.append(-logits[row, source_position].log_softmax(-1)[label].item())
                is_correct.append(logits[row, source_position].argmax().item() == label)
    assert evaluation.metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    if not is_causal:
        assert evaluation.metrics["accuracy"] == sum(is_correct) / len(is_correct)


def test_the_states_of_a_validation_begin_with_the_embeddings_even_if_the_model_returns_none() -> None:
    torch.manual_seed(3)
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4))
    module, batch = make_tuner(model, is_causal=True), make_batch(is_causal=True)
    module.on_validation_epoch_start()
    with torch.no_grad():
        states = module.validation_step(batch, 0)["hidden_states"]
        assert list(states) == ["0", "1", "2", "final_norm"]
        embeddings, last = states["0"], states["2"]
        assert_close(embeddings.double(), model.get_input_embeddings()(batch["input_ids"]), rtol=1e-6, atol=1e-7)
        assert_close(module.hidden_states(batch)["0"], embeddings, rtol=0, atol=0)
        expected = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        assert_close(model.lm_head(model.backbone.norm_f(last).double()), expected.double(), rtol=1e-6, atol=1e-7)


def test_a_batch_without_a_token_to_predict_has_the_loss_zero() -> None:
    module, batch = make_tuner(bert(), is_causal=False), make_batch()
    batch["labels"][:] = IGNORED_LABEL
    loss = module.task_loss(batch)
    assert loss.item() == 0
    loss.backward()
