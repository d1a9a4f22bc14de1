"""`istar measure` and `istar embed` on models that are not plain encoders or decoders with a mask and weights."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from istar.cli.main import main
from istar.geometry.collect.measure import measure_texts, open_model, plan_pass
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.models import tiny
from istar.models.model_source import ModelSource
from istar.texts.corpus import Source
from istar.texts.new_tokenizer import train_tokenizer
from tests.geometry.collect.test_architecture_matrix import CASES, EXPERTS, SEQ2SEQ, SHAPE

pytestmark = pytest.mark.usefixtures("blank_figures")

TEXTS = ["the cat sat on the mat", "a dog barked at the cat and it ran", "hello world", "the quick brown fox"] * 3
VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def save(folder: Path, name: str, auto_class: Any = AutoModel, **settings: Any) -> Any:
    """Save a tiny random model with a tokenizer for `TEXTS`; return the model."""
    tokenizer = tiny.make_tokenizer(["the", "cat"])
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    values = {**(CASES[name].settings if name in CASES else {}), **settings}
    if "vocab_size" in values:
        values["vocab_size"] = len(tokenizer)
    torch.manual_seed(0)
    model = auto_class.from_config(AutoConfig.for_model(name, **values)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "text.txt").write_text("\n".join(TEXTS))
    return model


def measure(folder: Path, batch_tokens: int | None = None) -> Measurements:
    """Measure a saved model over `TEXTS` as `istar measure` does, without its page."""
    settings = MeasureSettings(0, batch_tokens=batch_tokens, sample=0, groups=0)
    model = open_model(ModelSource(str(folder)), device="cpu")
    return measure_texts(plan_pass(model, [Source("text", folder / "text.txt")], settings)).measurements


@torch.no_grad()
def mean_norm(model: Any) -> float:
    """Return the mean norm of the last states of `TEXTS`, one text at a time, without special tokens."""
    tokenizer = tiny.make_tokenizer(["the", "cat"])
    batches = [tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in TEXTS]
    return torch.cat([model(**batch)[0][0, 1:-1].double().norm(dim=1) for batch in batches]).mean().item()


def read_refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


# Padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fnet", "convbert", pytest.param("mobilebert", marks=pytest.mark.slow)])
def test_measures_of_models_that_see_padding_do_not_depend_on_the_batches(tmp_path: Path, name: str) -> None:
    """FNet has no attention mask, ConvBERT convolves over padding, and MobileBERT joins neighbouring embeddings."""
    save(tmp_path, name)
    alone, together = (measure(tmp_path, tokens).sources for tokens in (1, 400))
    assert alone["text"].keys() == together["text"].keys()
    for tap, measures in alone["text"].items():
        assert together["text"][tap] == pytest.approx(measures, rel=1e-4, abs=1e-5, nan_ok=True), tap


# Encoder-decoders, and models that are not measured -------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param("bart", marks=pytest.mark.slow), "t5"])
def test_the_encoder_of_an_encoder_decoder(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    model = save(tmp_path, name, AutoModelForSeq2SeqLM)
    measured = measure(tmp_path)
    assert [record.message for record in caplog.records if record.name.startswith("istar")] == [
        f"model {tmp_path} is an encoder-decoder ({name}); only its encoder is read"
    ]
    last = "final_norm" if name == "t5" else "layer_3"
    assert list(measured.sources["text"])[-1] == last
    assert measured.sources["text"][last]["average_norm"] == pytest.approx(mean_norm(model.get_encoder()), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("clip", {"text_config": SHAPE, "vision_config": VISION}, "text alone: a CLIPModel reads pixel_values"),
        ("fsmt", {**SEQ2SEQ, "src_vocab_size": 120, "tgt_vocab_size": 120}, "FSMTEncoder, which has no embeddings"),
        ("funnel", {"block_sizes": [1], "block_repeats": [1]}, ""),
        ("reformer", {}, "ReformerModel returns hidden states of"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_models_that_cannot_be_measured_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, settings: dict[str, Any], line: str
) -> None:
    save(tmp_path, name, **settings)
    arguments = ["measure", str(tmp_path), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert line in read_refusal(capsys, [*arguments, "--device", "cpu"])


def test_a_head_that_names_its_base_model_wrongly_is_measured_without_the_head(tmp_path: Path) -> None:
    """The base model of `Llama4ForCausalLM` is its `model`, but its `base_model_prefix` is `language_model`."""
    model = save(tmp_path, "llama4_text", AutoModelForCausalLM, **EXPERTS, intermediate_size_mlp=24)
    measured = measure(tmp_path)
    assert list(measured.sources["text"]) == ["embeddings", "layer_1", "layer_2", "layer_3", "final_norm"]
    assert measured.sources["text"]["final_norm"]["average_norm"] == pytest.approx(mean_norm(model.model), rel=1e-6)


# Adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save a decoder with untied outputs, and adapters for it as peft alone does.

    Returns the folder of the adapters and the merged model.
    """
    peft = pytest.importorskip("peft")
    tmp_path = tmp_path_factory.mktemp("adapters")
    tokenizer = train_tokenizer(TEXTS, 300, "bpe")
    settings = {**CASES["llama"].settings, "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens", "lm_head"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        adapted = peft.get_peft_model(model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "plain", save_embedding_layers=False)
    (tmp_path / "plain" / "text.txt").write_text("\n".join(TEXTS))
    assert {path.name for path in (tmp_path / "plain").iterdir()}.isdisjoint({"config.json", "tokenizer.json"})
    return tmp_path / "plain", adapted.merge_and_unload()


@pytest.fixture
def adapters(saved_adapters: tuple[Path, Any], tmp_path: Path) -> Any:
    """Copy the adapters to the folder `plain` of the test; return the merged model."""
    folder, merged = saved_adapters
    shutil.copytree(folder, tmp_path / "plain")
    return merged


def check_matrices(folder: Path, merged: Any, embedded_side: str | None = None) -> None:
    """Check the norms of the embedding matrices that the commands measure against those of the merged model."""
    measured = measure(folder)
    for side, layer in (("input", merged.get_input_embeddings()), ("output", merged.get_output_embeddings())):
        expected = pytest.approx(layer.weight.detach().double().norm(dim=1).mean().item(), rel=1e-6)
        assert measured.matrices[side]["raw"]["average_norm"] == expected
        if side == embedded_side:
            assert main(["embed", str(folder), "--matrix", side, "--out", str(folder / side)]) == 0
            embedded = json.loads((folder / side / "embeddings.json").read_text())
            assert embedded["models"][0]["figures"]["raw"]["average_norm"] == expected


def test_a_plain_folder_of_adapters_is_measured_with_its_base(adapters: Any, tmp_path: Path) -> None:
    check_matrices(tmp_path / "plain", adapters, "output")


def test_adapters_with_a_configuration_are_measured_and_saved_as_a_whole_model(adapters: Any, tmp_path: Path) -> None:
    """As in the folder of a run."""
    folder = tmp_path / "plain"
    adapters.config.save_pretrained(folder)
    train_tokenizer(TEXTS, 300, "bpe").save_pretrained(folder)
    check_matrices(folder, adapters)
    assert main(["embed", str(folder), "--form", "centered", "--save", "model", "--out", str(tmp_path / "saved")]) == 0
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "model")
    weight = adapters.get_input_embeddings().weight.detach()
    torch.testing.assert_close(saved.get_input_embeddings().weight, weight - weight.mean(0), rtol=1e-5, atol=1e-6)
    for name, value in adapters.state_dict().items():
        if "embed_tokens" not in name:
            torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-5, atol=1e-6)
