import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from istar.errors import UserError
from istar.finetune.config import Config, ModelConfig
from istar.finetune.execute.identify import identify_model
from istar.finetune.execute.run import run
from istar.hidden_states import attach
from istar.models import pretrained, tiny
from istar.models.model_source import ModelSource
from istar.regularizers import IStar
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.files.test_folders import write_files
from tests.finetune.execute.artifacts import build
from tests.models.test_pretrained import FAMILIES, save_encoder

Build = Callable[..., Config]


def load(folder: Path | str, task: str = "demo", **settings: Any) -> Any:
    return build(ModelConfig(name=str(folder), **settings), TASKS[task])[0]


# ---- what is loaded


@pytest.mark.parametrize(
    ("family", "task"),
    [
        *(("bert", task) for task in ("demo", "demo_regression", "demo_span", "mnli")),
        *(("albert", "demo_span"), ("roberta", "demo"), ("distilbert", "demo_regression")),
    ],
)
def test_families_and_heads(tmp_path: Path, family: str, task: str) -> None:
    spec = TASKS[task]
    folder = save_encoder(tmp_path, family)
    model = load(folder, task)
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p > 0]
    assert dropouts or family == "albert"
    assert all(module.training for module in model.modules())
    if spec.kind != "span":
        assert list(model.config.id2label.values()) == list(spec.labels or ["score"])
        assert model.config.num_labels == (len(spec.labels) or 1)
    # The encoder is the saved one; only the head is new.
    encoder = AutoModel.from_pretrained(folder).state_dict()
    loaded = model.base_model.state_dict()
    shared = [name for name in encoder if name in loaded]
    assert len(shared) >= 10
    for name in shared:
        torch.testing.assert_close(loaded[name], encoder[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("albert", "demo"),
        pytest.param("roberta", "demo", marks=pytest.mark.slow),
        pytest.param("bert", "demo", marks=pytest.mark.slow),
        pytest.param("albert", "demo_span", marks=pytest.mark.slow),
        pytest.param("distilbert", "demo_span", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_each_family(small: Build, tmp_path: Path, family: str, task: str) -> None:
    folder = save_encoder(tmp_path / "saved", family)
    config = small(
        f"task={task}", "model=auto", f"model.name={folder}", "reg=istar", "reg.layers=with_embeddings",
        "task.max_length=64", "run.geometry=false",
    )  # fmt: skip
    record = run(config)
    assert record.status == "finished"
    assert list(record.isotropy["after"]) == ["0", "1", "2", "3", "union"]
    assert record.isotropy["after"] != record.isotropy["before"]
    model = AutoModel.from_pretrained(Path(config.run.root) / record.name / "model")
    assert type(model) is type(AutoModel.from_pretrained(folder))
    tokens = AutoTokenizer.from_pretrained(Path(config.run.root) / record.name / "model")("a b", return_tensors="pt")
    model.eval()
    assert len(model(**tokens, output_hidden_states=True).hidden_states) == 4


def test_bfloat16_checkpoints_are_loaded_as_float32(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, dtype=torch.bfloat16)
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    model = load(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    pretrained.save(model, pretrained.load_tokenizer(ModelSource(str(folder))), tmp_path / "again")
    assert {value.dtype for value in load_file(tmp_path / "again" / "model.safetensors").values()} == {torch.float32}
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "again").dtype == torch.float32


def test_a_model_for_another_number_of_labels_gets_a_new_head(tmp_path: Path) -> None:
    """A finished MNLI model is a usual start for RTE."""
    first = load(save_encoder(tmp_path / "encoder"), "mnli")
    pretrained.save(first, tiny.make_tokenizer(demo.vocabulary()), tmp_path / "mnli")
    second = load(tmp_path / "mnli", "rte")
    assert second.classifier.weight.shape[0] == 2
    assert second.config.id2label == {0: "entailment", 1: "not_entailment"}
    for name, value in first.base_model.state_dict().items():
        torch.testing.assert_close(second.base_model.state_dict()[name], value, rtol=0, atol=0)


def save_classifier(folder: Path, *names: str, family: str = "bert", problem_type: str | None = None) -> Any:
    """Save a random classifier whose outputs have these names, as another author did, and return it."""
    save_encoder(folder, family)
    config = AutoConfig.from_pretrained(folder)
    config.id2label, config.label2id = dict(enumerate(names)), {name: id_ for id_, name in enumerate(names)}
    config.problem_type = problem_type
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    return model.eval()


def compute_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[2, 7, 9, 3], [2, 8, 11, 3]])).logits  # type: ignore[no-any-return]


def own_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what istar logged; threads of other libraries may log at any time."""
    return [record.getMessage() for record in caplog.records if record.name.partition(".")[0] == "istar"]


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_in_the_order_of_the_task(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = save_classifier(tmp_path, "CONTRADICTION", "Neutral", "entailment", family=family)
    model = load(tmp_path, "mnli")
    assert model.config.id2label == {0: "entailment", 1: "neutral", 2: "contradiction"}
    torch.testing.assert_close(compute_logits(model), compute_logits(checkpoint)[:, [2, 1, 0]])
    assert own_messages(caplog) == []


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("mnli", ("LABEL_0", "LABEL_1", "LABEL_2")), ("sst2", ("0", "1")), ("rte", ("Entailment", "not entailment")),
        ("sst5", ("very_negative", "Negative", "neutral", "positive", "VERY POSITIVE")), ("stsb", ("LABEL_0",)),
        ("stsb", ("similarity",)),
    ],
)  # fmt: skip
def test_a_head_with_the_names_of_the_task_or_numbers_is_kept(
    tmp_path: Path, task: str, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save_classifier(tmp_path, *names)
    torch.testing.assert_close(compute_logits(load(tmp_path, task)), compute_logits(checkpoint))
    assert own_messages(caplog) == []


@pytest.mark.parametrize(
    ("task", "names", "problem_type"),
    [
        ("sst2", ("entailment", "not_entailment"), None),
        ("sst5", ("1 star", "2 stars", "3 stars", "4 stars", "5 stars"), None),
        ("stsb", ("toxic",), "multi_label_classification"),
        ("sst2", ("LABEL_0", "LABEL_1"), "regression"),
        ("rte", ("entailment", "neutral", "contradiction"), None),
    ],
)
def test_a_head_for_other_labels_is_replaced_with_one_line(
    tmp_path: Path, task: str, names: tuple[str, ...], problem_type: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save_classifier(tmp_path, *names, problem_type=problem_type)
    model = load(tmp_path, task)
    [message] = own_messages(caplog)
    assert f"for the labels {', '.join(names)} is replaced by a new one, as task {task} has" in message
    if len(names) == model.config.num_labels:
        assert not torch.equal(model.classifier.weight, checkpoint.classifier.weight)
    assert 0.01 < model.classifier.weight.std() < 0.03
    torch.testing.assert_close(model.base_model.state_dict(), checkpoint.base_model.state_dict())


def make_random_model(folder: Path, seed: int = 0, task: str = "demo") -> Any:
    torch.manual_seed(seed)
    model, tokenizer = build(ModelConfig(name=str(folder), pretrained=False), TASKS[task])
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    return model


@pytest.mark.parametrize(
    ("family", "task"), [("bert", "demo"), ("albert", "demo_span"), ("roberta", "demo"), ("distilbert", "demo_span")]
)
def test_random_weights_have_architecture_and_tokenizer_of_the_model(tmp_path: Path, family: str, task: str) -> None:
    """No file with weights is needed; the seed decides the weights."""
    folder = save_encoder(tmp_path, family, dtype=torch.bfloat16)
    pretrained_model = load(folder, task)
    (folder / "model.safetensors").unlink()
    first, repeated, other_seed = (make_random_model(folder, seed, task) for seed in (0, 0, 1))
    shapes = {name: value.shape for name, value in first.state_dict().items()}
    assert shapes == {name: value.shape for name, value in pretrained_model.state_dict().items()}
    assert type(first) is type(pretrained_model)
    assert first.training
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}
    weights = [torch.cat([value.flatten() for value in model.parameters()]) for model in (first, repeated, other_seed)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_random_weights_for_another_tokenizer(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    tiny.make_tokenizer([*demo.vocabulary(), "zeugma"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"tokens, but its embedding has only \d+ rows; they belong"):
        make_random_model(tmp_path)


def test_code_of_a_model_with_random_weights_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded without a question at the terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = save_encoder(tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoModelForSequenceClassification": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    assert type(make_random_model(folder)).__name__ == "BertForSequenceClassification"
    assert not (tmp_path / "ran").exists()


def test_the_identity_of_random_weights_is_that_of_configuration_and_tokenizer(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path)

    def compute_identities() -> tuple[str, str]:
        configs = [ModelConfig(name=str(folder), pretrained=is_pretrained) for is_pretrained in (True, False)]
        return identify_model(configs[0]), identify_model(configs[1])

    first = compute_identities()
    save_file({"other": torch.zeros(3)}, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    other_weights = compute_identities()
    assert other_weights[0] != first[0]
    assert other_weights[1] == first[1]
    for name in ("config.json", "tokenizer.json"):
        identities_before = compute_identities()
        (folder / name).write_text((folder / name).read_text() + " ")
        assert compute_identities()[1] != identities_before[1]
    identities_before = compute_identities()
    write_files(folder, "._config.json", "._model.safetensors", ".cache/config.json")
    assert compute_identities() == identities_before


# ---- options that change how it is computed, not what


def train_and_read_metrics(small: Build, folder: Path, *options: str, reg: str = "istar") -> list[str]:
    """Train with these options and return all values in metrics.csv except durations."""
    config = small(
        "model=auto", f"model.name={folder}", "run.geometry=false", "run.save_model=false", f"reg={reg}", *options
    )
    record = run(config)
    text = (Path(config.run.root) / record.name / "metrics.csv").read_text()
    rows = csv.DictReader(text.splitlines())
    return [value for row in rows for name, value in row.items() if value and "second" not in name]


def compute_gradients(folder: Path, gradient_checkpointing: bool, weight: float) -> list[torch.Tensor]:
    """Return the gradients of a training step with dropout, whose loss may have a penalty."""
    torch.manual_seed(0)
    model = load(folder, gradient_checkpointing=gradient_checkpointing)
    is_on = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert is_on == gradient_checkpointing
    penalty = attach(model, IStar(weight, zeta=0.0))
    torch.manual_seed(1)
    ids = torch.arange(5, 37).reshape(4, 8)
    loss = model(input_ids=ids, labels=torch.tensor([0, 1, 1, 0])).loss
    (loss + penalty.loss() if weight else loss).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("is_pretrained", [True, False])
def test_eager_attention_differs_by_rounding(tmp_path: Path, is_pretrained: bool) -> None:
    folder, spec = save_encoder(tmp_path / "model"), TASKS["demo"]
    outputs = []
    for implementation in ("eager", "sdpa"):
        config = ModelConfig(name=str(folder), pretrained=is_pretrained, attn_implementation=implementation)
        torch.manual_seed(0)
        model, tokenizer = build(config, spec)
        model.eval()
        texts = tokenizer(demo.vocabulary()[:3], padding=True, return_tensors="pt")
        outputs.append(torch.stack(model(**texts, output_hidden_states=True).hidden_states))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(*outputs)  # The two are different computations.


@pytest.mark.parametrize(("family", "weight", "tolerance"), [("distilbert", 0.0, 0), ("bert", 1.0, 1e-4)])
def test_checkpointing_changes_no_gradient(tmp_path: Path, family: str, weight: float, tolerance: float) -> None:
    """The penalty's share of the gradient is added at another place in the sum, which changes the rounding."""
    folder = save_encoder(tmp_path / "model", family)
    expected, checkpointed = (compute_gradients(folder, is_on, weight) for is_on in (False, True))
    torch.testing.assert_close(checkpointed, expected, rtol=tolerance, atol=tolerance / 10)


def test_gradient_checkpointing_of_a_model_that_has_none(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "model", "albert")
    with pytest.raises(UserError, match=r"^model.gradient_checkpointing=true: .*does not support"):
        load(folder, gradient_checkpointing=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("options", [(), ("task=demo_span", "trainer.precision=bf16-mixed")], ids=" ".join)
def test_compiled_losses_are_the_same(small: Build, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Dropout included: the compiler's own random numbers would differ."""
    folder = save_encoder(tmp_path / "model")
    expected, compiled = (
        [float(value) for value in train_and_read_metrics(small, folder, *options, *compile_options)]
        for compile_options in ((), ("model.compile=true",))
    )
    assert compiled == pytest.approx(expected, rel=2e-2 if options else 1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_model_that_cannot_be_compiled(small: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of the machine is missing, which torch notices when it has translated the whole model."""
    torch.compiler.reset()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/g++",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    with pytest.raises(RuntimeError, match="No working C\\+\\+ compiler") as error:
        train_and_read_metrics(small, save_encoder(tmp_path / "model"), "model.compile=true")
    assert "model.compile=false trains without compiling the model" in error.value.__notes__
