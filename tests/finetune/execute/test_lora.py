import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from istar.errors import UserError
from istar.finetune.config import ModelConfig
from istar.hidden_states import attach
from istar.models import pretrained
from istar.models.model_source import ModelSource
from istar.regularizers import IStar
from istar.runs.tasks import TASKS
from tests.finetune.execute.artifacts import build
from tests.models.test_adapters import save_base

peft: Any = pytest.importorskip("peft")

CLM = replace(TASKS["demo_sentence"], name="clm", kind="causal_lm", labels=())


def load(config: ModelConfig, spec: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    return build(config, spec)


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
    encoder = pretrained.load_encoder(ModelSource(str(tmp_path / "saved")), tokenizer)
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
