"""New models of several architectures, heads for language modelling, and what is refused."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
)

from istar.errors import UserError
from istar.finetune.config import Config, ModelConfig
from istar.finetune.execute.build_config import build_config, make_config, override_config
from istar.finetune.execute.build_model import build_tokenizer
from istar.finetune.execute.identify import identify_model
from istar.finetune.execute.run import run
from istar.models import pretrained, tiny
from istar.models.architectures import find_max_input_length, is_decoder
from istar.models.model_source import ModelSource
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.execute.artifacts import build
from tests.finetune.execute.faults import warnings_in

CLM = replace(TASKS["demo_sentence"], name="clm", kind="causal_lm", labels=())
MLM = replace(CLM, name="mlm", kind="masked_lm")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 80
}  # fmt: skip
EXTRA_SIZES: dict[str, dict[str, Any]] = {"opt": {"word_embed_proj_dim": 32}}
DECODERS, ENCODERS = ("gpt2", "gpt_neox", "llama", "qwen2", "opt"), ("bert", "distilbert", "albert", "roberta")
TEXTS = ["the cat sat on the mat", "a dog barked at the cat, and left."] * 5


def make_new_config(architecture: str, **settings: Any) -> ModelConfig:
    values = {**SIZES, **EXTRA_SIZES.get(architecture, {})}
    settings = {"pretrained": False, "tokenizer": "train", "vocab_size": 400, "config": values, **settings}
    return ModelConfig(name="mine", architecture=architecture, **settings)


def load(config: ModelConfig, spec: Any) -> tuple[Any, Any]:
    return build(config, spec, TEXTS)


@pytest.mark.parametrize("architecture", [*DECODERS, *ENCODERS])
def test_a_new_language_model(architecture: str, tmp_path: Path) -> None:
    """The model has the requested sizes, fits its tokenizer, and is loaded as it was saved."""
    spec = CLM if architecture in DECODERS else MLM
    model, tokenizer = load(make_new_config(architecture), spec)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 2, 2)
    assert (config.max_position_embeddings, config.model_type) == (80, architecture)
    assert config.vocab_size == len(tokenizer) == model.get_input_embeddings().num_embeddings < 400
    assert config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.model_max_length == find_max_input_length(config)
    assert model.training
    pretrained.save(model, tokenizer, tmp_path)
    auto_class: Any = AutoModelForCausalLM if architecture in DECODERS else AutoModelForMaskedLM
    loaded_model, loaded_tokenizer = auto_class.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer("the dog sat", return_tensors="pt")
    assert dict(loaded_tokenizer("the dog sat")) == {name: value[0].tolist() for name, value in batch.items()}
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded_model(**batch).logits, model(**batch).logits)
    # Without a cache in training, and with one for generation.
    if architecture in DECODERS:
        assert (model.config.use_cache, loaded_model.config.use_cache) == (False, True)
        assert is_decoder(config)


@pytest.mark.parametrize(
    ("task", "architecture"),
    [
        pytest.param(*pair, marks=() if pair == ("demo_span", "gpt_neox") else pytest.mark.slow)
        for pair in product(("demo", "demo_regression", "demo_span"), ("bert", "gpt2", "llama", "gpt_neox"))
    ],
)
def test_a_run_with_a_new_model(small: Callable[..., Config], architecture: str, task: str) -> None:
    sizes = SIZES if architecture == "gpt2" else {**SIZES, "intermediate_size": 64}
    values = [f"model.config.{name}={value}" for name, value in sizes.items()]
    config = small(
        f"task={task}", "model=new", f"model.architecture={architecture}", "model.vocab_size=400", "reg=istar", *values
    )
    record = run(config)
    assert record.status == "finished"
    assert record.name.startswith(f"{task}-{architecture}-")
    assert list(record.isotropy["after"]) == ["0", "1", "2", "union"]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        pytest.param("demo", ("model.lora=true", "task.limit_train=16", "task.limit_validation=8"), id="lora"),
        pytest.param("demo_span", (), id="full span"),
        pytest.param("demo_sentence", (), id="full sentence"),
        pytest.param("demo_span", ("model.lora=true",), id="lora span"),
    ],
)
@pytest.mark.slow
def test_runs_of_a_decoder(small: Callable[..., Config], babyllama: Path, task: str, options: tuple[str, ...]) -> None:
    config = small(f"task={task}", "model=auto", f"model.name={babyllama}", "reg=istar", "model.pretrained=true",
                   "task.max_length=128", *options)  # fmt: skip
    record = run(config)
    assert record.isotropy["after"] != record.isotropy["before"]
    # What was saved is loaded again as the start of another run.
    saved_config = ModelConfig(name=str(Path(config.run.root) / record.name / "model"))
    assert load(saved_config, TASKS[task])[0].config.num_hidden_layers == 5


def test_question_answering_has_the_weights_of_the_decoder(babyllama: Path, tmp_path: Path) -> None:
    """transformers names the base model of `LlamaForQuestionAnswering` differently, and gives it random weights."""
    model, tokenizer = load(ModelConfig(name=str(babyllama)), TASKS["demo_span"])
    expected_weights = AutoModelForCausalLM.from_pretrained(babyllama).base_model.state_dict()
    for name, value in model.base_model.state_dict().items():
        assert torch.equal(value, expected_weights[name])
    pretrained.save(model, tokenizer, tmp_path)
    loaded_weights = AutoModelForQuestionAnswering.from_pretrained(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded_weights[name], value)
    encoder_weights = pretrained.load_encoder(ModelSource(str(tmp_path)), tokenizer).state_dict()
    for name, value in encoder_weights.items():
        assert torch.equal(value, expected_weights[name])


def test_a_decoder_without_a_padding_token_pads_with_the_end_of_text(babyllama: Path) -> None:
    model, tokenizer = load(ModelConfig(name=str(babyllama)), TASKS["demo"])
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id == 2
    assert model.get_input_embeddings().num_embeddings == 105
    # In a language model the end-of-text token is no padding, so that its embedding keeps its gradient.
    assert load(ModelConfig(name=str(babyllama)), CLM)[0].config.pad_token_id is None


def test_values_replace_those_of_a_model_without_its_weights(babyllama: Path) -> None:
    config = ModelConfig(name=str(babyllama), pretrained=False, config={"num_hidden_layers": 2, "hidden_size": 64})
    model, tokenizer = load(config, CLM)
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.num_attention_heads) == (2, 64, 8)
    assert model.config.vocab_size == len(tokenizer) == 105
    model_for_new_tokenizer, tokenizer = load(replace(config, tokenizer="train", vocab_size=300), CLM)
    assert model_for_new_tokenizer.config.vocab_size == len(tokenizer) > 256


def test_a_tokenizer_of_another_model(babyllama: Path) -> None:
    model, tokenizer = load(make_new_config("gpt2", tokenizer=str(babyllama), load_in="bf16"), CLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.vocab_size == len(tokenizer) == 105
    with pytest.raises(UserError, match=r"^tokenizer /nowhere: there is no such folder"):
        build_tokenizer(make_new_config("gpt2", tokenizer="/nowhere"))
    with pytest.raises(UserError, match="needs the text of a task"):
        build_tokenizer(make_new_config("gpt2"))


def test_the_files_of_a_tokenizer_identify_a_model(tmp_path: Path) -> None:
    tiny.make_tokenizer(["cat"]).save_pretrained(tmp_path)
    config = make_new_config("bert", tokenizer=str(tmp_path))
    original_identity = identify_model(config)
    tiny.make_tokenizer(["dog"]).save_pretrained(tmp_path)
    assert len({original_identity, identify_model(config), identify_model(make_new_config("bert"))}) == 3


# ---- heads for language modelling


def save_bert(folder: Path, model_class: Any, with_mask_token: bool = True) -> ModelConfig:
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=64, **SIZES)
    model_class(config).save_pretrained(folder)
    if not with_mask_token:
        tokenizer.mask_token = None
    tokenizer.save_pretrained(folder)
    return ModelConfig(name=str(folder))


def test_a_checkpoint_has_its_language_modelling_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = save_bert(tmp_path, BertForMaskedLM)
    with caplog.at_level(logging.WARNING):
        model = load(config, MLM)[0]
    assert warnings_in(caplog) == []
    for name, value in BertForMaskedLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_a_new_language_modelling_head_is_worth_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = save_bert(tmp_path, BertModel)
    with caplog.at_level(logging.WARNING):
        load(config, MLM)
    assert [warning.split(":")[0] for warning in warnings_in(caplog)] == [
        f"model {tmp_path} has no head for language modelling"
    ]


def get_load_error(config: ModelConfig, spec: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(config, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_encoders_are_no_causal_language_models(tmp_path: Path) -> None:
    """transformers could load BERT as one, whose tokens see those that they are to predict."""
    assert get_load_error(save_bert(tmp_path, BertForMaskedLM), CLM).startswith("task=clm needs a decoder")
    for architecture in ENCODERS:
        assert "is an encoder" in get_load_error(make_new_config(architecture), CLM)


def test_decoders_and_tokenizers_without_a_mask_are_no_masked_language_models(tmp_path: Path) -> None:
    for architecture in DECODERS:
        assert get_load_error(make_new_config(architecture), MLM).startswith("task=mlm needs an encoder")
    config = save_bert(tmp_path, BertForMaskedLM, with_mask_token=False)
    # BERT's class of tokenizers adds the mask token when it is loaded.
    tokenizer = build_tokenizer(config)
    tokenizer.mask_token = None
    with pytest.raises(UserError, match="needs a tokenizer with a mask token"):
        build_config(config, MLM, tokenizer)


@pytest.mark.parametrize(
    ("architecture", "settings", "spec", "message"),
    [
        ("phi", {"config": {**SIZES, "intermediate_size": 64}}, TASKS["demo_span"], "has no AutoModelForQuestionAnswe"),
        ("gpt3", {}, CLM, "model.architecture=gpt3 is no model type of transformers; did you mean"),
        ("gpt2", {"config": {"hiden_size": 32}}, CLM, "model.config.hiden_size: gpt2 models have no such value; did"),
        ("llama", {"config": {"hidden_size": "many"}}, CLM, "is not accepted"),
        ("bert", {"config": {**SIZES, "hidden_size": 33}}, MLM, "model.architecture=bert "),
        ("bert", {"config": {"num_labels": 3}}, MLM, "no such value"),
    ],
)
def test_what_a_new_model_cannot_have(architecture: str, settings: Any, spec: Any, message: str) -> None:
    assert message in get_load_error(make_new_config(architecture, **settings), spec)


def test_values_of_a_loaded_configuration(tmp_path: Path) -> None:
    GPT2Config(n_embd=48, n_layer=3, n_head=4, activation_function="relu").save_pretrained(tmp_path)
    config = override_config(AutoConfig.from_pretrained(tmp_path), {"hidden_size": 64, "n_layer": 5}, "model.name=x")
    assert (config.n_embd, config.num_hidden_layers, config.n_head) == (64, 5, 4)
    assert config.activation_function == "relu"
    qwen = override_config(make_config("qwen3", {"num_hidden_layers": 3}), {"num_hidden_layers": 2}, "model.name=x")
    assert len(qwen.layer_types) == 2
