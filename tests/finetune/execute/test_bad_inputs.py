"""Bad inputs are refused with one line that says what is wrong, and leave no files behind; odd ones work."""

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import HydraException
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification

from istar.errors import UserError
from istar.finetune.config import Config, schema
from istar.finetune.execute.run import run
from istar.models import pretrained, tiny
from istar.texts import demo
from tests.permissions import ignores_permissions

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL = (
    "task.limit_train=8", "task.limit_validation=4", "data.batch_size=8", "trainer.max_epochs=1",
    "trainer.accumulate_grad_batches=1", "trainer.progress_bar=false", "trainer.accelerator=cpu",
)  # fmt: skip
Prepare = Callable[[Path], object]
Change = Callable[[Path], object]


def read_files(folder: Path) -> dict[str, bytes | None]:
    """Return the content of each file below a folder by its path; None for folders and unreadable files."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    readable = (name for name, path in paths.items() if path.is_file() and os.access(path, os.R_OK))
    return {**dict.fromkeys(paths), **{name: paths[name].read_bytes() for name in readable}}


# ---- functions that make the inputs


def nothing(folder: Path) -> None:
    """Leave the folder as it is."""


def put(**contents: str | bytes) -> Prepare:
    """Return a function that writes files to data/: `put(train_tsv=...)` writes data/train.tsv."""

    def prepare(folder: Path) -> None:
        for name, content in contents.items():
            path = folder / "data" / name.replace("_v1_1", "-v1.1").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


def a_folder_at(name: str, before: Prepare = nothing) -> Prepare:
    return lambda folder: (before(folder), (folder / name).mkdir(parents=True))


def a_file_at(name: str) -> Prepare:
    return lambda folder: (folder / name).write_text("mine")


def without_permission(name: str, before: Prepare = nothing, mode: int = 0) -> Prepare:
    """Return a function that calls `before` and then sets the permissions of a file or folder."""
    return lambda folder: (before(folder), (folder / name).chmod(mode))


HEADER = "index\tsentence1\tsentence2\tlabel\n"


def rte(count: int, noun: str = "lamp") -> str:
    names = ("entailment", "not_entailment")
    return HEADER + "".join(f"{n}\tThe {noun} {n} is old .\tIt is old .\t{names[n % 2]}\n" for n in range(count))


def sts(*scores: object) -> str:
    lines = (f"{n}\tA lamp {n} .\tA lamp .\t{score}\n" for n, score in enumerate(scores))
    return HEADER.replace("label", "score") + "".join(lines)


def table(**columns: Any) -> dict[str, list[Any]]:
    return {
        "sentence1": [f"The lamp {n}" for n in range(8)], "sentence2": ["It is old ."] * 8, "label": [0, 1] * 4,
        **columns,
    }  # fmt: skip


def jsonl(**columns: Any) -> str:
    all_columns = table(**columns)
    return "".join(
        json.dumps(dict(zip(all_columns, row, strict=True))) + "\n" for row in zip(*all_columns.values(), strict=True)
    )


def squad(*answers: tuple[str, Any], **change: Any) -> str:
    questions = [
        {"id": f"q{n}", "question": "Who took it?", "answers": [{"text": text, "answer_start": start}], **change}
        for n, (text, start) in enumerate(answers)
    ]
    paragraphs = [{"context": "Anna took the lamp to the garden.", "qas": questions}]
    return json.dumps({"version": "1.1", "data": [{"title": "x", "paragraphs": paragraphs}]})


ANNA = ("Anna", 0)
# Hydra composes the options of a single task, which takes a quarter of a second.
RTE, STSB, SQUAD = (f"task=rte task.name={name} model=tiny task.data_dir=data " for name in ("rte", "stsb", "squad"))
MODEL = "model=auto model.name=model "


def put_tsv(dev: str, train: str = rte(8)) -> Prepare:
    """Return a function that writes data/train.tsv and data/dev.tsv."""
    return put(train_tsv=train, dev_tsv=dev)


def model(change: Change = nothing, **settings: Any) -> Prepare:
    """Return a function that saves a valid model in model/ and then changes it."""

    def prepare(folder: Path) -> None:
        for name, content in model_files(**settings).items():
            path = folder / "model" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        change(folder / "model")

    return prepare


@functools.cache
def model_files(**settings: Any) -> dict[str, bytes]:
    """Return the content of each file of a model whose config has these values."""
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    config = tiny.make_tiny_config(len(tokenizer))
    for key, value in settings.items():
        setattr(config, key, value)
    with tempfile.TemporaryDirectory() as folder:
        pretrained.save(BertForSequenceClassification(config), tokenizer, Path(folder) / "model")
        return {path.name: path.read_bytes() for path in (Path(folder) / "model").iterdir()}


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def with_text(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def with_settings(name: str = "config.json", **settings: Any) -> Change:
    def change(folder: Path) -> None:
        original_settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(original_settings | settings))

    return change


def with_weights(convert: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        converted = {name: convert(name, tensor) for name, tensor in load_file(path).items()}
        save_file({name: tensor for name, tensor in converted.items() if tensor is not None}, path, {"format": "pt"})

    return change


def an_id_beyond_the_embedding(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["lamp"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


CODE_RAN = "ran"
"""The file that code from the model would create next to the model's folder."""


def code_of_its_own() -> Change:
    def change(folder: Path) -> None:
        class_names = {"AutoConfig": "own.Own", "AutoModelForSequenceClassification": "own.Own"}
        with_settings(auto_map=class_names | {"AutoTokenizer": ["own.Own", "own.Own"]})(folder)
        with_settings("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})(folder)
        (folder / "own.py").write_text(f"open({str(folder.with_name(CODE_RAN))!r}, 'w')\nclass Own: pass\n")

    return change


# ---- inputs that are refused


not_root = pytest.mark.skipif(ignores_permissions(), reason="root may read and write everything")


def case(arguments: str, message: str, prepare: Prepare = nothing, *, id: str = "", marks: Any = ()) -> Any:
    """Return a test case: the arguments of train.py, a part of its output, and a function that prepares the input."""
    return pytest.param(arguments, message, prepare, id=id or arguments, marks=marks)


CONFIGS = [
    case("learning_rate=1e-3", "learning_rate: there is no such key"),
    case("reg.points=first reg.layers=last data.batch_size=1", "1 sequences with points=first in 1 layers has no iso"),
    case("reg.layers=last_two", "reg.layers=last_two is not known"),
    case("reg.layers=[-7]", "layer -7 does not exist"),
    case("task.data_dir=~/glue_data", "task.data_dir=~/glue_data: not understood; expected key=value, where a value"),
    case("run.root=runs", "run.root", a_file_at("runs")),
    case("run.root=runs/mine", "run.root", a_file_at("runs"), id="run.root below a file"),
    case(f"run.root={'x' * 300}", "run.root", id="run.root too long"),
    case("run.root=runs", "run.root", without_permission("runs", a_folder_at("runs"), 0o500),
        id="run.root not writable", marks=not_root),
]  # fmt: skip

DATA = [
    # folders and files
    case(f"{RTE} task.data_dir={'x' * 300}", "cannot be read (File name too long)", id="too long a name"),
    case(RTE, "task.data_dir=data cannot be read", without_permission("data", a_folder_at("data")),
        id="a closed folder", marks=not_root),
    case(RTE, "data/dev.tsv: cannot be read: Permission denied", without_permission("data/dev.tsv", put_tsv(rte(4))),
        id="an unreadable file", marks=not_root),
    # encodings
    case(RTE, "data/dev.tsv, line 1: not UTF-8 text: it holds null bytes",
        put(train_tsv=rte(8), dev_tsv=rte(4).encode("utf-16-le")), id="utf-16 without a mark"),
    case(RTE, "data/dev.json: not JSON", put(train_jsonl=jsonl(), dev_json="[" * 100_000), id="deep JSON"),
    case(RTE, "data/dev.jsonl, line 8: not JSON",
        put(train_jsonl=jsonl(), dev_jsonl=jsonl()[:-3] + "1" * 5000 + "}"), id="endless digits"),
    case(STSB, "data/dev.jsonl, line 8: not JSON: a number of",
        put(train_jsonl=jsonl(), dev_jsonl=jsonl()[:-3] + "1" * 400 + "}"), id="a score beyond all floats"),
    # SQuAD
    case(SQUAD, "question q1: the answer 'Anna' is not at character 3000",
        put(train_v1_1_json=squad(ANNA, ("Anna", 3000)), dev_v1_1_json=squad(ANNA)), id="answer behind the context"),
    *(case(SQUAD, "row 2: answers is", put(train_v1_1_json=squad(ANNA), dev_v1_1_json=squad(ANNA, ("Anna", start))),
          id=f"answer at {start!r}") for start in (-1, 10**30)),
]  # fmt: skip

MODELS = [
    case("model=auto model.name=model", "model model is a file", a_file_at("model"), id="a file for a folder"),
    case(f"model=auto model.name={'x' * 300}", "model xxx", id="too long a name"),
    case(MODEL, "has no vocabulary", model(without("tokenizer.json")), id="no tokenizer"),
    case(MODEL, "model/config.json: a JSON object was expected", model(with_text("config.json", "[]")),
        id="a list as config"),
    case(MODEL, "Field 'hidden_size' expected int", model(with_settings(hidden_size="big")), id="a word as size"),
    case(MODEL, "clip models are not text encoders", model(with_text("config.json", '{"model_type": "clip"}')),
        id="another kind of model"),
    case(MODEL, "bart models are encoder-decoders", model(with_text("config.json", '{"model_type": "bart"}')),
        id="an encoder-decoder"),
    case(MODEL, "is not a folder that can be loaded", model(with_settings(quantization_config={"quant_method": "awq"})),
        id="quantized"),
    case(MODEL, "its weights are damaged", model(with_weights(lambda name, tensor: tensor * torch.nan)),
        id="nan weights"),
    case(MODEL, "its tokenizer has 5001 tokens", model(an_id_beyond_the_embedding), id="an id beyond the embedding"),
    case(MODEL, "cannot process the output of", model(type_vocab_size=1), id="token types it does not know"),
    case(MODEL, "has no padding token", model(with_settings("tokenizer_config.json", pad_token=None)),
        id="no padding token"),
    case(MODEL, "accepts at most 6 tokens", model(max_position_embeddings=6), id="too few positions"),
    case(MODEL, "model.safetensors", model(lambda folder: (without("model.safetensors")(folder),
        (folder / "model.safetensors").mkdir())),
        id="a folder for weights"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message", "prepare"), [*CONFIGS, *DATA, *MODELS])
def test_refused_in_one_line(
    composed: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str,
    prepare: Prepare,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    files_before = read_files(tmp_path)
    with pytest.raises((UserError, HydraException)) as error:
        run(composed(*SMALL, *arguments.split()))
    explanation = str(error.value) if isinstance(error.value, UserError) else schema.explain(error.value)
    assert message in explanation
    assert "\n" not in explanation
    assert read_files(tmp_path) == files_before


# ---- unusual inputs that work

ODD = [
    case(STSB, "", put_tsv(sts(2), train=sts(1)), id="one score each"),
    case(SQUAD, "", put(train_v1_1_json=squad(ANNA), dev_v1_1_json=squad(ANNA)), id="one question each",
        marks=pytest.mark.slow),
    case("task.name=demo_span model=auto model.name=model", "", model(max_position_embeddings=12), id="few positions",
        marks=pytest.mark.slow),
    case(f"{RTE} data.cache_dir=data/dev.tsv/cache", "features stay in memory",
        put_tsv(f"{HEADER}0\t\t\tentailment\n", train=f"{HEADER}0\t\t\tentailment\n"),
        id="empty texts, and no place for a cache"),
    case(RTE, "1 of 200 rows do not have 4 fields", put_tsv(rte(4), train=rte(199) + "A lamp\n"),
        id="one short row of many", marks=pytest.mark.slow),
    case(MODEL, "", model(code_of_its_own()), id="code that is not needed"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message", "prepare"), ODD)
def test_odd_inputs_that_work(
    composed: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    arguments: str, message: str, prepare: Prepare,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    files_before = read_files(tmp_path)
    config = composed(*SMALL, "run.geometry=false", "run.isotropy_zeta=null", *arguments.split())
    assert run(config).status == "finished"
    assert message in caplog.text
    files_after = read_files(tmp_path)
    assert {name: files_after[name] for name in files_before} == files_before
    assert {name.split("/")[0] for name in set(files_after) - set(files_before)} == {"runs"}
