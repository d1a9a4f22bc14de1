"""Runs with a model and a data set from the hub, which is a mock server on this machine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from istar.errors import UserError
from istar.finetune.config import ModelConfig, TaskConfig
from istar.finetune.config.task_config import find_task_spec
from istar.finetune.execute import execute as execute_module
from istar.finetune.execute.examples import load_examples
from istar.finetune.execute.identify import identify, identify_model, resolve_model
from istar.finetune.execute.run import run
from istar.finetune.processes import launch
from istar.finetune.tasks.loading import find_source
from istar.models import hub as hub_module
from istar.models import pretrained
from istar.models.model_source import ModelSource
from istar.runs.record import RunRecord, read_result
from istar.runs.tasks import TASKS
from tests.conftest import SMALL
from tests.finetune.execute.artifacts import Build, build
from tests.finetune.execute.faults import warnings_in
from tests.finetune.tasks.builders import load_splits
from tests.finished_runs import NO_KEY
from tests.mock_hub import (
    MockHub,
    Repository,
    mnli_files,
    model_files,
    rte_files,
    serving,
    set_offline,
    use,
    wikitext_files,
)
from tests.outcomes import only_run

MODEL = ("task=rte", "model=auto", "model.name=org/tiny", "reg=none", "run.geometry=false")


@pytest.fixture(scope="module")
def model_versions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """Return the files of two models that differ only in their weights."""
    return [model_files(tmp_path_factory.mktemp("model"), seed) for seed in (0, 1)]


@pytest.fixture
def hub(tmp_path: Path, model_versions: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    """Yield a mock hub with the model org/tiny and GLUE's RTE, which the libraries use with an empty cache."""
    with serving() as hub:
        for name, files in (("models/org/tiny", model_versions[0]), ("datasets/nyu-mll/glue", rte_files())):
            hub.repositories[name] = Repository()
            hub.repositories[name].push(files)
        use(hub, tmp_path / "cache", monkeypatch)
        yield hub


def test_a_run_belongs_to_the_commit_that_its_branch_stands_for(
    hub: MockHub, small: Build, model_versions: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_repository, data_repository = hub.repositories["models/org/tiny"], hub.repositories["datasets/nyu-mll/glue"]
    first_commit = model_repository.branches["main"]
    first = run(small(*MODEL))
    assert first.key.model == f"org/tiny@{first_commit}"
    assert first.data_commit == data_repository.branches["main"]
    assert first.config["model"]["revision"] == first_commit
    assert all(f"/{first_commit}" in request for request in hub.requests if "/org/tiny/resolve/" in request)

    with monkeypatch.context() as patch:
        patch.setattr(execute_module, "assemble", None)  # nothing is trained
        assert run(small(*MODEL)) == first
        assert run(small(*MODEL, "model.revision=main")) == first

    second_commit = model_repository.push(model_versions[1])
    second = identify(small(*MODEL))
    assert second.folder.name != first.name
    assert second.config.model.revision == second_commit

    with monkeypatch.context() as patch:
        patch.setattr(execute_module, "assemble", None)
        set_offline(True, patch)
        assert identify(small(*MODEL)).folder == second.folder
        assert run(small(*MODEL, f"model.revision={first_commit}")) == first


@pytest.mark.slow
def test_train_py_asks_the_hub_and_is_quiet_about_it(hub: MockHub, start: Any, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    done = start(tmp_path / "call", *SMALL, *MODEL, **environment).wait()
    assert done.code == 0, done.stderr
    assert "HTTP Request" not in done.stdout + done.stderr
    record = read_result(only_run(tmp_path / "call" / "runs"))
    assert record.key.model == f"org/tiny@{hub.repositories['models/org/tiny'].branches['main']}"
    assert record.data_commit == hub.repositories["datasets/nyu-mll/glue"].branches["main"]


def test_all_processes_of_a_run_load_one_commit(hub: MockHub, small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is resolved before the processes are started."""
    revisions = []

    class EndedProcesses:
        def __init__(self, config: Any, *_: Any) -> None:
            revisions.append(config.model.revision)

        def has_ended(self) -> bool:
            return True

        def read_record(self, signals: Any) -> RunRecord:
            return RunRecord("name", "finished", {}, NO_KEY)

    monkeypatch.setattr(launch, "RunProcesses", EndedProcesses)
    launch.launch(small(*MODEL, "trainer.devices=2"), 2)
    assert revisions == [hub.repositories["models/org/tiny"].branches["main"]]


def test_a_complete_commit_and_a_folder_need_no_question(hub: MockHub, tmp_path: Path) -> None:
    commit, folder = hub.repositories["models/org/tiny"].branches["main"], tmp_path / "me@home"
    folder.mkdir()
    assert resolve_model(ModelConfig("org/tiny", revision=commit)).revision == commit
    for config in (
        ModelConfig(str(folder)),
        ModelConfig(str(folder), pretrained=False),
        ModelConfig("tiny", pretrained=False),
        ModelConfig("mine", architecture="gpt2", pretrained=False, tokenizer=str(folder)),
    ):
        assert resolve_model(config) == config
    assert hub.requests == []


def test_a_branch_and_the_main_branch_have_their_commits(hub: MockHub, model_versions: list[dict[str, bytes]]) -> None:
    repository = hub.repositories["models/org/tiny"]
    branch_commit = repository.push(model_versions[1], branch="step 1/2")
    assert resolve_model(ModelConfig("org/tiny", revision="step 1/2")).revision == branch_commit
    assert resolve_model(ModelConfig("org/tiny")).revision == repository.branches["main"] != branch_commit


def test_the_commit_of_a_data_set_is_known_offline(hub: MockHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the commit is that of the data set which was prepared last, since this one is loaded."""
    repository = hub.repositories["datasets/nyu-mll/glue"]
    assert find_source(TASKS["rte"], None, ["train"]).commit == repository.branches["main"]
    latest_commit = repository.push(rte_files(rows=20))
    assert len(load_splits(TASKS["rte"], None, ["train"])["train"]) == 20
    set_offline(True, monkeypatch)
    assert find_source(TASKS["rte"], None, ["train"]).commit == latest_commit


def test_the_diagnostic_set_is_another_configuration_of_the_same_commit(hub: MockHub) -> None:
    hub.repositories["datasets/nyu-mll/glue"].push(mnli_files())
    config = TaskConfig(name="mnli", submission=True)
    examples = load_examples(find_task_spec(config), config)
    assert [split.submission for split in examples.test_sets] == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"]
    assert examples.test[2]["premise"][3] == "the test lamp number 3 is old"
    assert examples.commit == hub.repositories["datasets/nyu-mll/glue"].branches["main"]


def test_wikitext_is_text_without_its_empty_lines(hub: MockHub) -> None:
    hub.repositories["datasets/Salesforce/wikitext"] = Repository()
    commit = hub.repositories["datasets/Salesforce/wikitext"].push(wikitext_files())
    config = TaskConfig(name="mlm_wikitext2")
    examples = load_examples(find_task_spec(config), config)
    assert (len(examples.train), [len(split) for split in examples.validation]) == (24, [24])
    assert examples.commit == commit


def test_random_weights_need_no_file_with_weights(hub: MockHub) -> None:
    """The architecture and the tokenizer are those of the model on the hub."""
    config = resolve_model(ModelConfig("org/tiny", pretrained=False))
    assert type(build(config, TASKS["rte"])[0]).__name__ == "BertForSequenceClassification"
    assert identify_model(config) == f"org/tiny@{hub.repositories['models/org/tiny'].branches['main']}"
    assert not [request for request in hub.requests if request.endswith("model.safetensors")]


def test_a_tokenizer_of_the_hub_is_loaded_by_its_commit(hub: MockHub) -> None:
    commit = hub.repositories["models/org/tiny"].branches["main"]
    config = ModelConfig("mine", architecture="gpt2", pretrained=False, tokenizer="org/tiny")
    resolved = resolve_model(config)
    assert resolved == replace(config, tokenizer=f"org/tiny@{commit}") == resolve_model(resolved)
    assert identify_model(resolved) == f"new tokenizer org/tiny@{commit}"
    assert (
        pretrained.load_tokenizer(resolved.source()).get_vocab()
        == pretrained.load_tokenizer(ModelSource("org/tiny")).get_vocab()
    )
    assert not [request for request in hub.requests if "mine" in request]


# ---- requests that the hub refuses

MODEL_COPY = "; name the folder of a local copy instead, as save_pretrained writes it"
DATA_COPY = "; name a local copy instead: task.data_dir=<folder> to train, --text <file or folder> to measure"
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def read_model_error(revision: str | None = None) -> str:
    """Return the message of the error with which the model org/tiny is refused."""
    with pytest.raises(UserError) as error:
        pretrained.load_tokenizer(resolve_model(ModelConfig("org/tiny", revision=revision)).source())
    return str(error.value)


def read_data_error() -> str:
    """Return the message of the error with which RTE is refused."""
    with pytest.raises(UserError) as error:
        load_splits(TASKS["rte"], None, ["train"])
    return str(error.value)


def test_what_the_hub_refuses(hub: MockHub) -> None:
    """The message says what the model or the data set lacks, and how to mend it."""
    message = read_model_error("mian")
    assert message.startswith("model org/tiny at revision mian: the hub has no such revision; expected a branch, a tag")
    assert message.endswith(f"{hub.url}/org/tiny{MODEL_COPY}")
    hub.repositories["models/org/tiny"].status = 403
    assert "the hub refuses access (HTTP status 403): log in with `hf auth login`" in read_model_error()
    for status in (401, 403):
        for repository in hub.repositories.values():
            repository.status, repository.error = status, "GatedRepo"
        consent = f"access needs consent to its conditions: accept them at {hub.url}"
        assert read_model_error() == f"model org/tiny: {consent}/org/tiny, then {LOG_IN}{MODEL_COPY}"
        assert read_data_error() == f"nyu-mll/glue rte: {consent}/datasets/nyu-mll/glue, then {LOG_IN}{DATA_COPY}"
    hub.repositories.clear()
    assert "model org/tiny: the hub has no model of this name, or a private one" in read_model_error()
    assert "data set nyu-mll/glue: the hub has no data set of this name, or a private one" in read_data_error()


def test_a_silent_hub(hub: MockHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A run does not wait for the hub; it uses the last commit that is known, with a warning."""
    commit = resolve_model(ModelConfig("org/tiny")).revision
    hub.silent = True
    monkeypatch.setattr(hub_module, "COMMIT_TIMEOUT_SECONDS", 0.1)
    no_answer = f"the hub {hub.url} gave no answer within 0.1 s"
    assert resolve_model(ModelConfig("org/tiny")).revision == commit
    assert warnings_in(caplog) == [f"model org/tiny: {no_answer}; using commit {commit}, the latest that is known"]
    assert (
        read_model_error("other")
        == f"model org/tiny at revision other: not in the local cache, and {no_answer}{MODEL_COPY}"
    )
