"""Runs with `task.stream=true`: exact resuming within a shard, what identifies them, and what is refused."""

import csv
import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.execute.examples import load_examples
from istar.finetune.execute.identify import identify
from istar.finetune.execute.run import run
from istar.finetune.training.checkpoints import AtomicCheckpointIO
from istar.finetune.training.language_model import LanguageModelTuner
from istar.finetune.training.module import FineTuner
from istar.runs.record import METRICS_FILE, read_result
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.execute.faults import interrupt_and_resume
from tests.mock_hub import Repository, serving, use, wikitext_files
from tests.outcomes import assert_same, only_run

Build = Callable[..., Config]
STREAMED = (
    "task.stream=true", "task.max_length=16", "task.limit_train=null", "task.shuffle_blocks=10", "data.batch_size=4",
    "trainer.accumulate_grad_batches=2", "trainer.max_steps=11", "trainer.max_epochs=9", "optim.lr=3e-3",
    "trainer.checkpoint_every_n_steps=1", "trainer.log_every_n_steps=1", "run.geometry=true", "run.isotropy_zeta=0.2",
)  # fmt: skip
"""Windows have 12 blocks, three batches."""


def write_text(folder: Path, num_shards: int = 3) -> Path:
    """Write shards with some 20 blocks, the first one with 40, and validation data."""
    documents = demo.generate("mlm", "train")["text"][: 7 * num_shards]
    (folder / "train").mkdir(parents=True)
    for shard in range(num_shards):
        texts = documents[shard::num_shards] * (2 if shard == 0 else 1)
        rows = [json.dumps({"text": text}) + "\n" for text in texts]
        with gzip.open(folder / "train" / f"{shard}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(rows)
    validation = demo.generate("mlm", "validation")["text"][:20]
    (folder / "validation.txt").write_text("\n".join(validation), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three compressed shards and validation data."""
    return write_text(tmp_path_factory.mktemp("text"))


def read_steps(folder: Path) -> list[str]:
    with (folder / METRICS_FILE).open(newline="") as file:
        return [row["step"] for row in csv.DictReader(file) if row["train/loss"]]


@pytest.fixture(scope="module")
def undisturbed(composed: Build, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the folder of an uninterrupted run with some overrides."""
    folders: dict[tuple[str, ...], Path] = {}

    def get_folder(*overrides: str) -> Path:
        if overrides not in folders:
            root = tmp_path_factory.mktemp("undisturbed")
            run(composed(*SMALL, *STREAMED, f"task.data_dir={text}", f"run.root={root}", *overrides))
            folders[overrides] = only_run(root)
        return folders[overrides]

    return get_folder


SMALL = ("task.limit_validation=16", "trainer.progress_bar=false", "trainer.accelerator=cpu")
MLM = ("task=mlm", "reg=istar", "reg.num_points=500")
CLM = ("task=clm", "reg=none", "trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=6")
SHORT = ("task=mlm", "reg=none", "trainer.max_steps=4", "run.isotropy_zeta=null")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("overrides", "owner", "name", "counts"),
    [
        pytest.param(SHORT, FineTuner, "training_step", [6], id="within a window"),
        pytest.param(MLM, FineTuner, "training_step", [7, 2, 3, 4, 5, 6], id="often", marks=SLOW),
        pytest.param(MLM, LanguageModelTuner, "validation_step", [2, 2], id="validations", marks=SLOW),
        pytest.param(MLM, AtomicCheckpointIO, "save_checkpoint", [8, 1, 2, 3], id="checkpoints", marks=SLOW),
        pytest.param(MLM, AtomicCheckpointIO, "save_checkpoint", [9, 1, 1], id="other checkpoints", marks=SLOW),
        pytest.param(CLM, FineTuner, "training_step", [9, 4, 5, 3], id="clm", marks=SLOW),
        pytest.param((*CLM, "task.packing=false"), FineTuner, "training_step", [9, 5, 8], id="unpacked", marks=SLOW),
    ],
)
def test_a_broken_run_goes_on_exactly(
    small: Build, text: Path, undisturbed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...], owner: Any, name: str, counts: list[int],
) -> None:  # fmt: skip
    config = small(*STREAMED, f"task.data_dir={text}", *overrides)
    interrupt_and_resume(config, monkeypatch, owner, name, counts)
    assert_same(only_run(Path(config.run.root)), undisturbed(*overrides))


@pytest.mark.slow
def test_epochs_follow_until_the_last_step(undisturbed: Callable[..., Path]) -> None:
    folder = undisturbed(*MLM)
    assert read_steps(folder) == [str(step) for step in range(11)]
    record = read_result(folder)
    epochs = [(entry["epoch"], entry["step"]) for entry in record.epochs]
    assert len(epochs) == 2
    assert epochs[0][1] < epochs[1][1] == 11
    assert record.data.keys() == {"validation"}
    assert record.baseline == {}
    assert record.metrics["loss"] < record.metrics_before["loss"]


@pytest.mark.slow
def test_an_epoch_ends_with_the_text(small: Build, text: Path) -> None:
    config = small(*STREAMED, f"task.data_dir={text}", *MLM, "trainer.max_epochs=1", "trainer.max_steps=99")
    epochs = run(config).epochs
    assert [entry["epoch"] for entry in epochs] == [1]
    assert 5 < epochs[0]["step"] < 11


@pytest.mark.slow
def test_a_new_tokenizer_is_trained_on_the_stream(small: Build, text: Path) -> None:
    model = ("model=small_decoder", "model.config.hidden_size=16", "model.config.num_attention_heads=2",
             "model.config.intermediate_size=32", "model.vocab_size=300")  # fmt: skip
    record = run(small(*STREAMED, f"task.data_dir={text}", *CLM, *model, "trainer.max_steps=2"))
    assert record.status == "finished"


def test_what_identifies_a_streamed_run(small: Build, text: Path, tmp_path: Path) -> None:
    def find_name(*overrides: str, data_dir: Path = text) -> str:
        return identify(small("task=mlm", *STREAMED, f"task.data_dir={data_dir}", *overrides)).folder.name

    copied = write_text(tmp_path / "copied")
    for source in (text / "train").iterdir():  # gzip stores the time
        (copied / "train" / source.name).write_bytes(source.read_bytes())
    assert find_name() == find_name(data_dir=copied)
    assert find_name() == find_name("data.group_by_length=false")
    changed = ("task.stream=false", "task.shuffle_blocks=11", "seed=7")
    assert len({find_name(), *map(find_name, changed)}) == 4
    assert find_name(changed[0]) == find_name(*changed[:2])
    with (copied / "train" / "0.jsonl.gz").open("ab") as file:
        file.write(gzip.compress(b'{"text": "one more"}\n'))
    assert find_name() != find_name(data_dir=copied)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task.limit_train=5",), r"^task\.limit_train=5 does not work with task\.stream=true"),
        (("task.validation_fraction=0.1",), r"^task\.validation_fraction=0\.1 does not work"),
        (("data.num_workers=2",), r"^data\.num_workers=2 does not work"),
        (("trainer.val_check_interval=0.5",), r"^trainer\.val_check_interval=0\.5 does not .*; give a whole number"),
        (("trainer.limit_train_batches=1",), r"^trainer\.limit_train_batches=1 does not work"),
        (("task=rte", "model=tiny"), r"^task\.stream=true needs a task of language modelling, such as clm or mlm"),
        (("task.data_dir=null",), r"^task\.stream=true: the data of mlm are generated; name a text with"),
    ],
)
def test_refused_settings(small: Build, text: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        run(small("task=mlm", *STREAMED, f"task.data_dir={text}", *overrides))
    assert "\n" not in str(error.value)


def test_a_stream_needs_a_number_of_steps(composed: Build) -> None:
    with pytest.raises(UserError, match=r"^task\.stream=true needs trainer\.max_steps, because a stream has no length"):
        composed("task=mlm", "task.stream=true")


VALIDATION = {"validation.txt": "some text\n" * 99}


@pytest.mark.parametrize(
    ("content_by_name", "message"),
    [
        ({"train.txt": "some text"}, r"has no validation data such as validation\.txt; task\.stream=true needs them"),
        ({"train.txt": "", **VALIDATION}, "the text is empty: it has no token"),
        ({"train.txt": "short", **VALIDATION}, "which is less than one block of 16"),
        ({"train.jsonl": '{"id": 1}\n', **VALIDATION}, r"train\.jsonl: there is no column 'text'"),
        ({"train.jsonl.gz": "no gzip", **VALIDATION}, r"train\.jsonl\.gz: cannot be read: "),
    ],
)  # fmt: skip
def test_refused_streams(small: Build, tmp_path: Path, content_by_name: dict[str, str], message: str) -> None:
    for name, content in content_by_name.items():
        (tmp_path / name).write_text(content)
    config = small("task=mlm", *STREAMED, f"task.data_dir={tmp_path}")
    with pytest.raises(UserError, match=message) as error:
        run(config)
    assert "\n" not in str(error.value)
    assert not Path(config.run.root).exists()


@pytest.mark.slow
def test_a_row_that_cannot_be_read_ends_the_run_in_one_line(small: Build, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", num_shards=1)
    with gzip.open(text / "train" / "0.jsonl.gz", "at") as file:
        file.write('{"text": 5}\n')
    # The sample of the stream has the beginning only.
    config = small("task=mlm", *STREAMED, f"task.data_dir={text}", "task.shuffle_blocks=1", "reg=none")
    with pytest.raises(UserError, match=r"0\.jsonl\.gz, line 15: text is 5; expected a string") as error:
        run(config)
    assert "\n" not in str(error.value)


def test_a_training_split_of_the_hub(small: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test set is not downloaded, and the commit identifies the run."""
    files = wikitext_files(rows=2)
    files["wikitext-2-raw-v1/train-00001-of-00002.parquet"] = files["wikitext-2-raw-v1/train-00000-of-00001.parquet"]
    with serving() as hub:
        repository = hub.repositories["datasets/Salesforce/wikitext"] = Repository()
        commits = [repository.push(files), repository.push({**files, "notes.txt": b"new"}, "later")]
        use(hub, tmp_path / "cache", monkeypatch)
        config = small("task=mlm_wikitext2", *STREAMED, "task.limit_validation=null")
        digests = []
        for commit in commits:
            repository.branches["main"] = commit
            examples = load_examples(TASKS["mlm_wikitext2"], config.task, str(tmp_path / "istar"))
            assert examples.stream is not None
            titles_and_lines = [" = Lamps = \n", " The {} lamp number 0 is old . \n", " = Lamps = \n",
                                " The {} lamp number 1 is old . \n"]  # fmt: skip
            expected = [text.format("train") for text in titles_and_lines]
            assert [list(open_shard()) for open_shard in examples.stream.shards] == [expected, expected]
            assert list(examples.validation[0]["text"]) == [text.format("validation") for text in titles_and_lines]
            assert len(examples.train) == 0
            assert examples.commit == commit
            digests.append(examples.stream.digest)
        assert digests[0] != digests[1]
        assert not any("test-00000" in request for request in hub.requests)


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [2, 3])
def test_two_processes_go_on_exactly(start: Any, tmp_path: Path, num_shards: int) -> None:
    """With two shards, each process has its own; with three, both read all."""
    text = write_text(tmp_path / "text", num_shards)
    arguments = ("trainer=ddp", "trainer.devices=2", *SMALL, *STREAMED, *MLM, f"task.data_dir={text}",
                 "trainer.max_steps=30", "trainer.max_epochs=99", "task.shuffle_blocks=5")  # fmt: skip
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    start(tmp_path / "whole", *arguments).wait().well()
    job = start(tmp_path / "broken", *arguments).until_it_trains().send(signal.SIGKILL)
    job.wait()
    job.until_it_is_gone()
    assert "it resumes from step-" in start(tmp_path / "broken", *arguments).wait().well().stderr
    assert_same(only_run(tmp_path / "broken" / "runs"), only_run(tmp_path / "whole" / "runs"))
