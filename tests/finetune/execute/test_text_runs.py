"""Runs of `task=clm` and `task=mlm`: generated text, files, resuming, and what is refused."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.execute.examples import TaskExamples, load_examples
from istar.finetune.execute.identify import identify
from istar.finetune.execute.prepare import prepare
from istar.finetune.execute.run import run
from istar.finetune.training.module import FineTuner
from istar.models import tiny
from istar.runs.tasks import TASKS
from istar.texts import demo
from tests.finetune.execute.faults import interrupt_and_resume
from tests.outcomes import assert_same, only_run

Build = Callable[..., Config]
TEXT = ("task.limit_train=60", "task.limit_validation=20", "task.max_length=32")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny GPT-2 whose tokenizer knows the words of the generated text."""
    folder = tmp_path_factory.mktemp("decoder")
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    tokenizer.save_pretrained(folder)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def make_overrides(task: str, decoder: Path) -> tuple[str, ...]:
    """Return the overrides for a small run of `task=clm` or `task=mlm`."""
    model = ("model=auto", f"model.name={decoder}") if task == "clm" else ()
    return (f"task={task}", *TEXT, *model, "optim.lr=3e-3")


@pytest.mark.parametrize(("task", "epochs"), [("clm", 1), ("mlm", 5)])
@pytest.mark.slow
def test_perplexity_falls_below_that_of_single_words(small: Build, decoder: Path, task: str, epochs: int) -> None:
    learning = ("task.limit_train=300", "optim.lr=1e-2", "run.geometry=false", f"trainer.max_epochs={epochs}")
    record = run(small(*make_overrides(task, decoder), *learning))
    before, after = record.metrics_before["perplexity"], record.metrics["perplexity"]
    assert after < record.baseline["perplexity"] < before
    assert record.headline["metric"] == "perplexity"
    assert ("accuracy" in record.metrics) == (task == "mlm")
    assert set(record.isotropy["after"]) == {"0", "1", "2", "union"}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "reg"), [("mlm", "reg=istar"), ("clm", "reg=cosreg")])
def test_a_broken_run_goes_on_exactly(
    small: Build, decoder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str, reg: str
) -> None:
    overrides = (*make_overrides(task, decoder), reg, "trainer.max_epochs=2", "trainer.checkpoint_every_n_steps=2",
                 "run.geometry=true", *(["reg.num_points=500"] if reg == "reg=istar" else []))  # fmt: skip
    whole, broken = (small(*overrides, f"run.root={tmp_path / name}") for name in ("whole", "broken"))
    run(whole)
    interrupt_and_resume(broken, monkeypatch, FineTuner, "training_step", [5])
    assert_same(only_run(tmp_path / "broken"), only_run(tmp_path / "whole"))


def load_text_examples(small: Build, path: Path) -> TaskExamples:
    """Return the documents of `task=mlm` from a file or folder."""
    config = small("task=mlm", "task.limit_train=null", "task.limit_validation=null", f"task.data_dir={path}")
    return load_examples(TASKS["mlm"], config.task)


def test_a_text_file_holds_documents_out(small: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    documents = demo.generate("mlm", "train")["text"][:100]
    (tmp_path / "letters.txt").write_text("\n".join(documents), encoding="utf-8")
    examples = load_text_examples(small, tmp_path / "letters.txt")
    assert "5 of its 100 documents, chosen at random, are held out for validation" in caplog.text
    assert (len(examples.train), [len(split) for split in examples.validation]) == (95, [5])


def test_names_of_files_say_which_split_they_are(small: Build, tmp_path: Path) -> None:
    documents = demo.generate("mlm", "train")["text"][:60]
    (tmp_path / "books-train.txt").write_text("\n".join(documents[:32]), encoding="utf-8")
    rows = [json.dumps({"text": text}) for text in documents[32:48]]
    (tmp_path / "books-dev.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("\n".join(documents[48:]), encoding="utf-8")
    examples = load_text_examples(small, tmp_path)
    assert (len(examples.train), [len(split) for split in examples.validation]) == (32, [16])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the text is empty"), (b"\n \n", "the text is empty"), (b"caf\xe9\n" * 9, "line 1: not UTF-8"),
        (b"too short\n", "less than one block of 32"), (b"a\n" * 3, "less than one block of 32"),
    ],
)  # fmt: skip
def test_texts_that_are_refused_in_one_line(small: Build, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.txt").write_bytes(content)
    (tmp_path / "validation.txt").write_bytes(content)
    config = small("task=mlm", "task.max_length=32", f"task.data_dir={tmp_path}")
    with pytest.raises(UserError, match=message) as error:
        run(config)
    assert "\n" not in str(error.value)
    assert not Path(config.run.root).exists()


def test_a_path_without_a_text_is_refused_in_one_line(small: Build, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^task\.data_dir=.* does not exist; name a text file"):
        run(small("task=mlm", f"task.data_dir={tmp_path / 'nowhere.txt'}"))
    (tmp_path / "validation.txt").write_text("Only this.")
    with pytest.raises(UserError, match=r"no training data such as train\.txt"):
        run(small("task=mlm", f"task.data_dir={tmp_path}"))


EXPERTS = "num_local_experts:4,hidden_size:16,intermediate_size:16,num_hidden_layers:2,num_attention_heads:2"


def expert_overrides(decoder: Path, architecture: str, values: str) -> tuple[str, ...]:
    model = ("model=auto", "model.name=experts", f"model.architecture={architecture}", "model.pretrained=false")
    return (*model, f"model.tokenizer={decoder}", f"model.config={{{values},num_key_value_heads:2}}")


def test_the_router_loss_counts_for_the_task_loss_alone(small: Build, decoder: Path, tmp_path: Path) -> None:
    # The load-balancing loss of a balanced router is `num_experts_per_tok`, here 2.
    steps, perplexities = [], []
    for is_added in ("false", "true"):
        values = f"{EXPERTS},router_aux_loss_coef:10.0,output_router_logits:{is_added}"
        model = expert_overrides(decoder, "mixtral", values)
        root = tmp_path / is_added
        record = run(small("task=clm", *TEXT, *model, "reg=none", "optim.lr=1e-30", f"run.root={root}"))
        with (only_run(root) / "metrics.csv").open() as file:
            [step, *_] = [row for row in csv.DictReader(file) if row["train/task_loss"]]
        steps.append(float(step["train/task_loss"]))
        perplexities.append(record.metrics["perplexity"])
    assert 10 * 1.9 < steps[1] - steps[0] < 10 * 2.3
    assert perplexities[0] == perplexities[1]


@pytest.mark.parametrize(
    ("task", "architecture", "values"),
    [
        ("demo", "mixtral", EXPERTS),
        ("clm", "exaone_moe", f"{EXPERTS.replace('_local', '')},num_experts_per_tok:2"),
        ("clm", "mixtral", f"{EXPERTS},router_aux_loss_coef:0.0"),
    ],
    ids=["head without it", "architecture without it", "coefficient 0"],
)
def test_a_missing_router_loss(small: Build, decoder: Path, task: str, architecture: str, values: str) -> None:
    model = expert_overrides(decoder, architecture, f"{values},output_router_logits:true")
    with pytest.raises(UserError, match="its loss lacks the load-balancing loss of its routers") as error:
        run(small(f"task={task}", *(TEXT if task == "clm" else ()), *model))
    assert "\n" not in str(error.value)


def test_a_new_tokenizer_fits_the_present_configuration_of_a_local_model(small: Build, tmp_path: Path) -> None:
    model = ("model=auto", f"model.name={tmp_path}", "model.pretrained=false", "model.tokenizer=train")
    config = small("task=clm", *TEXT, *model, "model.vocab_size=300")
    for length in (64, 32):
        GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=length).save_pretrained(tmp_path)
        assert prepare(identify(config)).tokenizer.model_max_length == length
