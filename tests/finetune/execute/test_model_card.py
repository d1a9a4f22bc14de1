"""The model card of a run and the upload of its model, to a mock server on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from istar.cli.main import main
from istar.errors import UserError
from istar.finetune.config.task_config import find_task_spec
from istar.finetune.execute import model_card
from istar.finetune.execute.model_card import make_model_card
from istar.finetune.execute.run import run
from istar.runs.record import write_result
from istar.runs.tasks import TASKS
from tests.finetune.execute.artifacts import Build, place
from tests.finished_runs import make_finished_record
from tests.mock_hub import MockHub, serving, use


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    """Yield a mock hub, with a token for it."""
    with serving() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_none")
        yield hub


def test_the_card_of_a_run_on_the_hubs_data(small: Build) -> None:
    """The hub's own parser reads the scores, each with the split that it is from."""
    config = small(
        "task=mnli", "task.validation_fraction=0.1", "model=bert", "reg=istar", "reg.lambda=-1", "reg.zeta=0.4"
    )
    scores = {
        "accuracy": 0.8, "accuracy_mismatched": 0.7, "loss": 0.5, "loss_mismatched": 0.6, "accuracy_held_out": 0.9,
    }  # fmt: skip
    record = make_finished_record(
        "run", config, metrics=scores, data_commit="c" * 40, baseline={"accuracy": 0.35},
        selection={"set": "held_out", "metric": "accuracy_held_out", "value": 0.8},
    )  # fmt: skip
    card = ModelCard(make_model_card(record, find_task_spec(config.task), config.reg.make().citation))
    data = card.data
    assert (data.base_model, data.datasets, data.library_name) == (
        "google-bert/bert-base-cased", ["nyu-mll/glue"], "transformers",
    )  # fmt: skip
    assert data.eval_results is not None
    found = {(result.dataset_split, result.metric_type): result.metric_value for result in data.eval_results}
    assert found == {
        ("validation_matched", "accuracy"): 0.8, ("validation_mismatched", "accuracy"): 0.7,
        ("validation_matched", "loss"): 0.5, ("validation_mismatched", "loss"): 0.6, ("held_out", "accuracy"): 0.9,
    }  # fmt: skip
    assert {result.dataset_revision for result in data.eval_results} == {"c" * 40}
    assert "| accuracy, percent | 80.00 | 35.00 |" in card.text
    assert "| `reg.lambda` | -1.0 |" in card.text
    assert "I-STAR λ=-1 ζ=0.4" in card.text
    assert "Rudman" in card.text


def test_the_card_names_no_local_folder(small: Build, tmp_path: Path) -> None:
    config = small(
        "task=rte", f"task.data_dir={tmp_path}", "model=auto", f"model.name={tmp_path}/encoder", "model.lora=true"
    )
    selection = {"set": "validation", "metric": "accuracy", "value": 0.5}
    record = make_finished_record("run", config, selection=selection, data={"train": 2490})
    card = ModelCard(make_model_card(record, TASKS["rte"], ""))
    assert str(tmp_path) not in str(card)
    assert (card.data.base_model, card.data.datasets, card.data.library_name) == (None, None, "peft")
    assert "AutoPeftModelForSequenceClassification.from_pretrained" in card.text
    assert "from `encoder`" in card.text
    assert "2,490 examples" in card.text


def test_a_finished_run_is_uploaded_with_its_card(hub: MockHub, small: Build) -> None:
    config = small("model=tiny", "reg=none", "run.geometry=false", "run.push_to_hub=user/tiny-demo")
    record = run(config)
    repository = hub.repositories["models/user/tiny-demo"]
    files = repository.commits[repository.branches["main"]]
    folder = place(config, record) / "model"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert ModelCard(files["README.md"].decode()).data.eval_results[0].metric_value == record.metrics["accuracy"]
    assert main(["push", str(folder.parent), "user/copy"]) == 0
    assert "models/user/copy" in hub.repositories


def test_a_refused_upload(hub: MockHub, small: Build, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hub.refuses_uploads = True
    config = small("model=tiny", "reg=none", "run.push_to_hub=user/tiny-demo")
    with pytest.raises(UserError, match=r"user/tiny-demo: the hub refuses the upload: .*hf auth login"):
        run(config)
    assert not Path(config.run.root).exists()
    with pytest.raises(UserError, match=r"a b: expected the name of a repository"):
        model_card.check_login("a b")
    with pytest.raises(UserError, match=r"run.push_to_hub=user/x uploads the saved model"):
        small("run.push_to_hub=user/x", "run.save_model=false")
    write_result(make_finished_record("run", small("model=tiny")), tmp_path)
    assert main(["push", str(tmp_path), "user/x"]) == 2
    assert "has no README.md; expected the model of a finished run" in capsys.readouterr().err
