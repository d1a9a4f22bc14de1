import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2LMHeadModel,
)

from istar.errors import UserError
from istar.models import pretrained, tiny
from istar.models.model_source import ModelSource
from istar.texts import demo
from istar.texts.new_tokenizer import train_tokenizer

peft: Any = pytest.importorskip("peft")
# peft, of transformers' newer spelling
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

TEXTS = ["the cat sat on the mat", "a dog barked at the cat"]


def save_base(folder: Path, family: str) -> str:
    """Save a random model in place of a pretrained one, with its tokenizer, and return the folder."""
    torch.manual_seed(0)
    tokenizer: Any = tiny.make_tokenizer(demo.vocabulary())
    model: Any
    if family == "bert":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        model = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes))  # type: ignore[arg-type]
    elif family == "distilbert":
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
        model = DistilBertModel(
            DistilBertConfig(vocab_size=len(tokenizer), dim=16, n_layers=2, n_heads=2, hidden_dim=24)
        )
    else:
        tokenizer = train_tokenizer(TEXTS, 300, "bpe")
        special_ids = {"bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, **special_ids))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load(folder: Path) -> Any:
    source = ModelSource(str(folder))
    return pretrained.load_encoder(source, pretrained.load_tokenizer(source))


def save_adapted(folder: Path, base: str) -> Path:
    """Save new adapters on a BERT model as a training saves them, with the model's tokenizer; return the folder."""
    model = BertForSequenceClassification.from_pretrained(base)
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    pretrained.save(peft.get_peft_model(model, lora), pretrained.load_tokenizer(ModelSource(base)), folder)
    return folder


def test_adapters_without_their_base_are_refused(tmp_path: Path) -> None:
    folder = save_adapted(tmp_path / "saved", save_base(tmp_path / "base", "bert"))
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"model {tmp_path / 'base'}: there is no such folder"):
        load(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UserError, match="names no base model"):
        load(folder)


def test_adapters_of_a_stranger_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ran = save_adapted(tmp_path / "saved", save_base(tmp_path / "base", "bert")), tmp_path / "ran"
    # A module that can be imported, as one of an installed package; peft before 0.20 imported it.
    (tmp_path / "own_module.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    good_text = (folder / "adapter_config.json").read_text()
    settings = json.loads(good_text) | {"megatron_core": "own_module", "megatron_config": {"a": 1}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="megatron_core"):
        load(folder)
    assert not ran.exists()

    class RunsCode:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    (folder / "adapter_config.json").write_text(good_text)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"lora": RunsCode()}, folder / "adapter_model.bin")
    with pytest.raises(UserError, match="pickled weights hold more than tensors"):
        load(folder)
    assert not ran.exists()


@pytest.mark.parametrize("config", [
    peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
])  # fmt: skip
def test_adapters_that_cannot_be_merged_name_their_method(tmp_path: Path, config: Any) -> None:
    model = GPT2LMHeadModel.from_pretrained(save_base(tmp_path / "base", "gpt2"))
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "saved")
    method = config.peft_type.value
    with pytest.raises(UserError, match=f"^{tmp_path / 'saved'} holds adapters by {method}.* expected LoRA"):
        load(tmp_path / "saved")


def test_adapters_without_weights_say_so(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "gpt2")
    (tmp_path / "saved").mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": base}
    (tmp_path / "saved" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no weights in adapter_model"):
        load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("task_type", "adapted"), [("SEQ_CLS", BertForSequenceClassification), ("FEATURE_EXTRACTION", BertModel)]
)
def test_adapters_of_other_heads_saved_by_peft_are_measured(tmp_path: Path, task_type: str, adapted: Any) -> None:
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = adapted.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type=task_type, target_modules=["query"], init_lora_weights=False)
    adapted_model = peft.get_peft_model(model, lora)
    adapted_model.save_pretrained(tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    merged = adapted_model.merge_and_unload()
    expected = getattr(merged, "bert", merged).encoder.layer[1].attention.self.query.weight
    torch.testing.assert_close(loaded.encoder.layer[1].attention.self.query.weight, expected)


@pytest.mark.parametrize("kind", ["deeper base", "DoRA"])
def test_adapters_with_weights_that_the_model_lacks_are_refused(tmp_path: Path, kind: str) -> None:
    base = save_base(tmp_path / "base", "gpt2")
    model = GPT2LMHeadModel.from_pretrained(base)
    if kind == "deeper base":
        model.transformer.h.append(copy.deepcopy(model.transformer.h[1]))
    lora = peft.LoraConfig(task_type="CAUSAL_LM", use_dora=kind == "DoRA", fan_in_fan_out=True)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": False}))
    name = "h.2.attn.c_attn.lora_A" if kind == "deeper base" else "h.0.attn.c_attn.lora_magnitude_vector"
    with pytest.raises(UserError, match=rf": [12] of its weights have no place .*, e\.g\. \S*{name}"):
        load(tmp_path / "saved")
