import copy
import json
from dataclasses import replace
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
from istar.finetune.config import ModelConfig
from istar.hidden_states import attach
from istar.models import pretrained, tiny
from istar.regularizers import IStar
from istar.runs.tasks import TASKS
from istar.texts import demo
from istar.texts.new_tokenizer import train_tokenizer

peft: Any = pytest.importorskip("peft")

CLM = replace(TASKS["demo_sentence"], name="clm", kind="causal_lm", labels=())
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


def load(config: ModelConfig, spec: Any) -> tuple[Any, Any]:
    tokenizer = pretrained.load_tokenizer(config)
    torch.manual_seed(1)
    return pretrained.load_model(config, spec, pretrained.load_config(config, spec, tokenizer), tokenizer), tokenizer


def get_trained_modules(model: Any) -> set[str]:
    """Return the names of the modules with trainable weights, without the numbers of layers."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {next(part for part in name.split(".") if part in MODULE_NAMES) for name in names}


MODULE_NAMES = {"lora_A", "lora_B", "classifier", "pre_classifier", "pooler", "score", "qa_outputs"}


@pytest.mark.parametrize(
    ("family", "spec", "head"),
    [
        ("bert", TASKS["demo"], {"classifier", "pooler"}),
        ("distilbert", TASKS["demo"], {"classifier", "pre_classifier"}),
        ("gpt2", TASKS["demo_regression"], {"score"}),
        ("gpt2", TASKS["demo_span"], {"qa_outputs"}),
        ("gpt2", CLM, set()),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_adapters_and_head_are_trained_and_nothing_else(tmp_path: Path, family: str, spec: Any, head: set[str]) -> None:
    """Two steps with the task loss and a penalty change only these, and the saved model gives the same outputs."""
    base = save_base(tmp_path / "base", family)
    target_modules = ["q_lin", "v_lin"] if family == "distilbert" else None
    config = ModelConfig(base, lora=True, lora_r=2, lora_target_modules=target_modules)
    model, tokenizer = load(config, spec)
    assert model.training
    assert get_trained_modules(model) == {"lora_A", "lora_B", *head}
    initial_weights = {name: value.clone() for name, value in model.state_dict().items()}
    batch = dict(tokenizer(["the cat sat", "a dog barked at"], padding=True, return_tensors="pt"))
    labels: dict[str, Any] = {
        "classification": {"labels": torch.tensor([0, 1])},
        "regression": {"labels": torch.tensor([0.0, 1.0])},
        "span": {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([1, 2])},
        "causal_lm": {"labels": batch["input_ids"]},
    }[spec.kind]
    watch = attach(model, IStar(1.0, zeta=0.0))
    # Adam moves every parameter with a gradient, however small that is.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.01, eps=1e-20)
    for _ in range(2):  # the gradient of `lora_A` is 0 in the first step, in which `lora_B` is 0
        optimizer.zero_grad()
        (model(**batch, **labels).loss + watch.loss()).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
        assert torch.equal(initial_weights[name], parameter) != parameter.requires_grad, name
    watch.remove()
    model.eval()
    pretrained.save(model, tokenizer, tmp_path / "saved")
    reloaded_model = load(ModelConfig(str(tmp_path / "saved")), spec)[0].eval()
    with torch.no_grad():
        torch.testing.assert_close(reloaded_model(**batch)[0], model(**batch)[0], rtol=1e-5, atol=1e-6)
    encoder = pretrained.load_encoder(ModelConfig(str(tmp_path / "saved")), tokenizer, torch.float32)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(encoder(**batch).last_hidden_state, states, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_penalty_reaches_the_adapters(tmp_path: Path) -> None:
    """The gradient is that of the penalty on the merged weights, carried to the adapters by the chain rule."""
    config = ModelConfig(save_base(tmp_path, "gpt2"), lora=True, lora_r=2, lora_alpha=4.0, lora_dropout=0.0)
    model, tokenizer = load(config, TASKS["demo"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.double().eval()
    batch = dict(tokenizer(["the cat sat", "a dog barked at"], padding=True, return_tensors="pt"))
    watch = attach(model, IStar(1.0, zeta=0.0))
    model(**batch)
    watch.loss().backward()
    watch.remove()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradients[name] is None for name in gradients if "score" in name)
    first_attention = model.base_model.model.transformer.h[0].attn.c_attn
    down, up = first_attention.lora_A["default"].weight, first_attention.lora_B["default"].weight
    merged = load(replace(config, lora=False), TASKS["demo"])[0].double().eval()
    with torch.no_grad():
        for layer, adapted in zip(merged.transformer.h, model.base_model.model.transformer.h, strict=True):
            a, b = (getattr(adapted.attn.c_attn, name)["default"].weight for name in ("lora_A", "lora_B"))
            layer.attn.c_attn.weight.add_(2 * (b @ a).T)
    watch = attach(merged, IStar(1.0, zeta=0.0))
    merged(**batch)
    watch.loss().backward()
    merged_gradient = merged.transformer.h[0].attn.c_attn.weight.grad
    torch.testing.assert_close(down.grad, 2 * up.T @ merged_gradient.T, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(up.grad, 2 * merged_gradient.T @ down.T, rtol=1e-6, atol=1e-12)
    assert down.grad.abs().max() > 0


def test_adapters_name_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(tmp_path / "base", "bert")
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load(ModelConfig("base", lora=True, load_in="bf16"), TASKS["demo"])
    pretrained.save(model, tokenizer, tmp_path / "saved")
    values = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(tmp_path / "base")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)


def test_unknown_modules_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path, "distilbert")
    with pytest.raises(UserError, match="peft has no default for distilbert models; name the modules"):
        load(ModelConfig(base, lora=True), TASKS["demo"])
    with pytest.raises(UserError, match=r"model.lora_target_modules=\['querry'\]: "):
        load(ModelConfig(base, lora=True, lora_target_modules=["querry"]), TASKS["demo"])
    model = load(ModelConfig(base, lora=True, lora_target_modules="all-linear"), TASKS["demo"])[0]
    assert get_trained_modules(model) == {"lora_A", "lora_B", "classifier", "pre_classifier"}


def test_adapters_without_their_base_are_refused(tmp_path: Path) -> None:
    model, tokenizer = load(ModelConfig(save_base(tmp_path / "base", "bert"), lora=True), TASKS["demo"])
    pretrained.save(model, tokenizer, tmp_path / "saved")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"model {tmp_path / 'base'}: there is no such folder"):
        load(ModelConfig(str(tmp_path / "saved")), TASKS["demo"])
    path = tmp_path / "saved" / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UserError, match="names no base model"):
        load(ModelConfig(str(tmp_path / "saved")), TASKS["demo"])


def test_adapters_of_a_stranger_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(ModelConfig(save_base(tmp_path / "base", "bert"), lora=True), TASKS["demo"])
    folder, ran = tmp_path / "saved", tmp_path / "ran"
    pretrained.save(model, tokenizer, folder)
    # A module that can be imported, as one of an installed package; peft before 0.20 imported it.
    (tmp_path / "own_module.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    good_text = (folder / "adapter_config.json").read_text()
    settings = json.loads(good_text) | {"megatron_core": "own_module", "megatron_config": {"a": 1}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="megatron_core"):
        load(ModelConfig(str(folder)), TASKS["demo"])
    assert not ran.exists()

    class RunsCode:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    (folder / "adapter_config.json").write_text(good_text)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"lora": RunsCode()}, folder / "adapter_model.bin")
    with pytest.raises(UserError, match="pickled weights hold more than tensors"):
        load(ModelConfig(str(folder)), TASKS["demo"])
    assert not ran.exists()


IGNORED = "ignore:`is_gradient_checkpointing` is deprecated"  # peft, of transformers' newer spelling


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize("config", [
    peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
])  # fmt: skip
def test_adapters_that_cannot_be_merged_name_their_method(tmp_path: Path, config: Any) -> None:
    model = GPT2LMHeadModel.from_pretrained(save_base(tmp_path / "base", "gpt2"))
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "saved")
    method = config.peft_type.value
    with pytest.raises(UserError, match=f"^{tmp_path / 'saved'} holds adapters by {method}.* expected LoRA"):
        load(ModelConfig(str(tmp_path / "saved")), CLM)


def test_adapters_without_weights_say_so(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "gpt2")
    (tmp_path / "saved").mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": base}
    (tmp_path / "saved" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no weights in adapter_model"):
        load(ModelConfig(str(tmp_path / "saved")), CLM)


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.parametrize(
    ("task_type", "adapted"), [("SEQ_CLS", BertForSequenceClassification), ("FEATURE_EXTRACTION", BertModel)]
)
def test_adapters_of_other_heads_that_peft_saved_alone_are_measured(
    tmp_path: Path, task_type: str, adapted: Any
) -> None:
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = adapted.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type=task_type, target_modules=["query"], init_lora_weights=False)
    adapted_model = peft.get_peft_model(model, lora)
    adapted_model.save_pretrained(tmp_path / "saved")
    config = ModelConfig(str(tmp_path / "saved"))
    loaded: Any = pretrained.load_encoder(config, pretrained.load_tokenizer(config), torch.float32)
    merged = adapted_model.merge_and_unload()
    expected = getattr(merged, "bert", merged).encoder.layer[1].attention.self.query.weight
    torch.testing.assert_close(loaded.encoder.layer[1].attention.self.query.weight, expected)


@pytest.mark.parametrize("kind", ["deeper base", "DoRA"])
@pytest.mark.filterwarnings(IGNORED)
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
        load(ModelConfig(str(tmp_path / "saved")), CLM)
