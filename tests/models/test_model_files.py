"""Which weights of a checkpoint must be there, and which may be left over, in training, measuring and embedding."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from istar.errors import UserError
from istar.finetune.config import ModelConfig
from istar.finetune.execute.build_config import build_config
from istar.finetune.execute.build_model import build_model, build_tokenizer
from istar.models import pretrained, tiny
from istar.models.embedding_matrix import read_matrix
from istar.models.model_source import ModelSource
from istar.runs.tasks import TASKS

VOCABULARY_SIZE = len(tiny.make_tokenizer())
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
STACKS: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 40,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def save(folder: Path, model: Any, weights: dict[str, torch.Tensor] | None = None, **config_values: Any) -> Path:
    """Save a model with a tokenizer, with further weights in its file and other values in its config.json."""
    model.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **(weights or {})}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **config_values}))
    return folder


def measure(folder: Path) -> Any:
    source = ModelSource(str(folder))
    return pretrained.load_encoder(source, pretrained.load_tokenizer(source))


def train(folder: Path, task: str = "demo") -> Any:
    config = ModelConfig(name=str(folder))
    tokenizer = build_tokenizer(config)
    model_config = build_config(config, TASKS[task], tokenizer)
    return build_model(config, TASKS[task], model_config, tokenizer)


def embed(folder: Path) -> Any:
    return read_matrix(ModelSource(str(folder)))


def get_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("istar.")]


def build_bert(head: str = "ForMaskedLM") -> Any:
    return getattr(hf, f"Bert{head}")(hf.BertConfig(**SHAPE))


def build_llama(**values: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, num_key_value_heads=1, **values))


# ---- weights that are left over
BERT_LAYER, LLAMA_LAYER = "bert.encoder.layer.0.output.dense", "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("build", "name", "load"),
    [
        (build_llama, f"{LLAMA_LAYER}.weight_scale", measure),
        (build_llama, f"{LLAMA_LAYER}.weight_scale", lambda folder: train(folder, "clm")),
        (build_llama, f"{LLAMA_LAYER}.bias", measure), (build_llama, f"{LLAMA_LAYER}.weight.absmax", measure),
        (build_llama, "model.norm.bias", measure), (build_llama, "model.norm.masked_bias", measure),
        (build_llama, "lm_head.bias", lambda folder: train(folder, "clm")),
        (build_llama, "model.embed_tokens.weight_scale_inv", measure),
        (build_llama, "model.embed_tokens.weight_scale_inv", embed),
        (build_llama, "model.embed_tokens.weight.absmax", embed),
        (build_bert, f"{BERT_LAYER}.lora_A.weight", measure), (build_bert, f"{BERT_LAYER}.weight_scale", train),
        (build_bert, f"{BERT_LAYER}.weight_scale", lambda folder: train(folder, "mlm")),
        (lambda: build_bert("Model"), "encoder.layer.1.attention.self.query.weight_scale", measure),
        (lambda: build_bert("Model"), "encoder.layer.1.attention.self.query.weight_scale", train),
    ],
)  # fmt: skip
def test_further_weights(tmp_path: Path, build: Callable[[], Any], name: str, load: Callable[[Path], Any]) -> None:
    with pytest.raises(UserError, match=rf"the checkpoint has {name}\b.*not quantized"):
        load(save(tmp_path / "model", build(), {name: torch.ones(3)}))


def test_float8_weights_with_scales_are_refused_under_an_unknown_method(tmp_path: Path) -> None:
    model = build_llama()
    weights = {}
    for name, weight in model.state_dict().items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().max() / 448  # the largest float8_e4m3fn
            weights |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    for quantization in ({}, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}):
        with pytest.raises(UserError, match=r"weight_scale"):
            measure(save(tmp_path / str(len(quantization)), model, weights, **quantization))


def test_a_config_without_the_biases_of_the_file_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", build_llama(attention_bias=True), attention_bias=False)
    with pytest.raises(UserError, match=r"the checkpoint has model\.layers\.0\.self_attn\.k_proj\.bias"):
        measure(folder)


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("bert.encoder.layer.2.output.dense.weight", measure), ("bert.encoder.layer.2.output.dense.weight", train),
        ("bert.projection.weight", measure), ("bert.embeddings.word_embeddings._weight", measure),
    ],
)  # fmt: skip
def test_other_weights_that_are_left_out_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, load: Callable[[Path], Any]
) -> None:
    load(save(tmp_path / "model", build_bert(), {name: torch.ones(3)}))
    [message] = get_messages(caplog)
    assert message.endswith(f"1 of the checkpoint's weights are not used, e.g. {name}")


def test_weights_of_a_replaced_head_and_buffers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(
        tmp_path / "model",
        build_bert("ForPreTraining"),
        {"bert.embeddings.position_ids": torch.arange(512), "embed_out.weight": torch.ones(3)},
    )
    measure(folder)
    train(folder)
    masks = {f"model.layers.0.self_attn.{name}": torch.ones(3) for name in ("attn.bias", "masked_bias")}
    measure(save(tmp_path / "masks", build_llama(), {**masks, "lm_head.weight_scale": torch.ones(3)}))
    llava = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=hf.LlamaConfig(**SHAPE), vision_config=hf.CLIPVisionConfig(**VISION))
    )
    measure(save(tmp_path / "llava", llava))
    with caplog.at_level(logging.WARNING):
        embed(save(tmp_path / "copy", build_bert(), {"bert.embeddings.word_embeddings._weight": torch.ones(3)}))
    assert get_messages(caplog) == []


# ---- weights that are missing
def test_positions_that_marian_computes_are_not_missing(tmp_path: Path) -> None:
    model = hf.MarianMTModel(hf.MarianConfig(**STACKS))
    encoder = measure(save(tmp_path / "model", model))
    position, frequency = np.arange(40)[:, None], 10_000.0 ** (-np.arange(8) / 8)
    expected = np.concatenate([np.sin(position * frequency), np.cos(position * frequency)], axis=1)
    np.testing.assert_allclose(encoder.embed_positions.weight.detach(), expected, atol=1e-6)
    assert torch.equal(encoder.layers[0].fc1.weight, model.model.encoder.layers[0].fc1.weight)


@pytest.mark.parametrize(
    ("build", "find_stack"),
    [
        (lambda: hf.BartForCausalLM(hf.BartConfig(**STACKS)), lambda model: model.model.decoder),
        (lambda: hf.MarianForCausalLM(hf.MarianConfig(**STACKS)), lambda model: model.model.decoder),
        (lambda: hf.T5EncoderModel(hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
                                                vocab_size=VOCABULARY_SIZE)), lambda model: model.encoder),
        # transformers has no class without a head for these configurations.
        (lambda: hf.TrOCRForCausalLM(hf.TrOCRConfig(**{name: STACKS[name] for name in STACKS if "enc" not in name})),
         lambda model: model.model.decoder),
        (lambda: hf.MllamaForCausalLM(hf.MllamaTextConfig(**SHAPE, num_key_value_heads=1, cross_attention_layers=[],
                                                          pad_token_id=0)), lambda model: model.model),
    ],
)  # fmt: skip
def test_a_checkpoint_with_one_stack_of_an_encoder_decoder_is_this_stack(
    tmp_path: Path, build: Callable[[], Any], find_stack: Callable[[Any], Any]
) -> None:
    stack = find_stack(build())
    loaded = measure(save(tmp_path / "model", model := build()))
    assert type(loaded) is type(stack)
    expected = find_stack(model).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())


@pytest.mark.parametrize(("stack", "is_refused"), [("encoder", True), ("decoder", False)])
def test_only_missing_weights_of_the_encoder_count(tmp_path: Path, stack: str, is_refused: bool) -> None:
    folder = save(tmp_path / "model", hf.BartForConditionalGeneration(hf.BartConfig(**STACKS)))
    weights = load_file(folder / "model.safetensors")
    del weights[f"model.{stack}.layers.0.fc1.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if is_refused:
        with pytest.raises(UserError, match=r"lacks 1 of its weights, e\.g\. \S*encoder\.layers\.0\.fc1\.weight"):
            measure(folder)
    else:
        assert torch.equal(measure(folder).layers[0].fc1.weight, weights["model.encoder.layers.0.fc1.weight"])


def test_a_missing_output_matrix_is_not_replaced_by_a_random_one(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", build_llama())
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 of its weights, e\.g\. lm_head\.weight"):
        read_matrix(ModelSource(str(folder)), "output")


# ---- configurations and models that are not of text alone
@pytest.mark.parametrize(
    "values",
    [{"output_attentions": True}, {"return_dict": False}, {"output_hidden_states": True}, {"output_attentions": None}],
)
@pytest.mark.parametrize("task", ["demo", "mlm", "squad"])
def test_what_a_checkpoint_says_about_outputs_is_reset(tmp_path: Path, values: dict[str, Any], task: str) -> None:
    model = train(save(tmp_path / "model", build_bert(), **values), task)
    output = model(**tiny.make_tokenizer()("a b", return_tensors="pt"))
    assert output.attentions is None
    assert output.hidden_states is None
    pretrained.save(model, tiny.make_tokenizer(), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert all(saved.get(name, default) == default for name, default in {
        "output_attentions": False, "output_hidden_states": False, "return_dict": True
    }.items())  # fmt: skip


def test_outputs_are_reset_in_configurations_inside_a_configuration(tmp_path: Path) -> None:
    text = {**SHAPE, "model_type": "llama"}
    config = hf.LlavaConfig(text_config=hf.LlamaConfig(**text), vision_config=hf.CLIPVisionConfig(**VISION))
    folder = save(
        tmp_path / "model", hf.LlavaForConditionalGeneration(config), text_config={**text, "return_dict": False}
    )
    assert measure(folder).config.text_config.return_dict is True


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states", "return_dict"])
def test_outputs_cannot_be_set_for_a_training(tmp_path: Path, name: str) -> None:
    config = ModelConfig(name=str(save(tmp_path / "model", build_bert())), pretrained=False, config={name: True})
    with pytest.raises(UserError, match=rf"model\.config\.{name}"):
        build_config(config, TASKS["demo"], build_tokenizer(config))


def test_a_model_that_needs_images_says_so(tmp_path: Path) -> None:
    config = hf.SiglipConfig(text_config={**SHAPE, "projection_size": 16}, vision_config=VISION)
    with pytest.raises(UserError, match="cannot process text alone: a SiglipModel reads pixel_values; choose"):
        measure(save(tmp_path / "model", hf.SiglipModel(config)))


def test_the_trial_takes_a_token_with_finite_embeddings(tmp_path: Path) -> None:
    """The rows of unused tokens, such as `[unused0]`, may be NaN."""
    model = build_bert("Model")
    tokenizer = tiny.make_tokenizer()
    first_ordinary_id = min(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[first_ordinary_id] = torch.nan
    folder = save(tmp_path / "model", model)
    measure(folder)
    train(folder)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="some are NaN"):
        measure(save(tmp_path / "nan", model))


def test_the_folder_of_a_model_is_no_label_of_a_new_one(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", build_llama())
    with pytest.raises(UserError, match=r"model\.name=\S+ would only be a label.* add model=auto"):
        ModelConfig(name=str(folder), pretrained=False, architecture="llama", tokenizer="train")
    ModelConfig(name="mine", pretrained=False, architecture="llama", tokenizer="train")
