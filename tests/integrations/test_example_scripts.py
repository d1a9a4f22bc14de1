"""The scripts in `examples/` run: those that train lower the isotropy, and all print the right scores."""

import json
import random
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from tests.oracles import algorithm_1

datasets = pytest.importorskip("datasets")

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES_FOLDER = REPOSITORY / "examples"
ROW = re.compile(r"^\| [^|]+ \| \[(\w+\.py)\]\((\w+\.py)\) \| `[a-z ]+ examples/(\w+\.py)` \|$", re.MULTILINE)
WORDS = [f"w{index}" for index in range(40)]
SHAPE: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32
}  # fmt: skip


class Example(NamedTuple):
    """What a script needs: its library, the tiny model and the columns, and for the naive score the model and texts."""

    library: str
    model: str
    columns: tuple[str, ...]
    find_model: Callable[[dict[str, Any]], nn.Module]
    list_texts: Callable[[dict[str, Any]], list[str]]


def make_pair_example(library: str, find_model: Callable[[dict[str, Any]], nn.Module]) -> Example:
    columns = ("sentence1", "sentence2", "label", "idx")
    return Example(library, "encoder", columns, find_model, lambda row: [row["sentence1"], row["sentence2"]])


EXAMPLES = {
    "plain_loop.py": make_pair_example("torch", lambda names: names["model"]),
    "accelerate_loop.py": make_pair_example("accelerate", lambda names: names["model"]),
    "transformers_trainer.py": make_pair_example("accelerate", lambda names: names["trainer"].model),
    "lightning_trainer.py": make_pair_example("lightning", lambda names: names["trainer"].lightning_module.model),
    "sentence_transformers_trainer.py": Example(
        library="sentence_transformers",
        model="encoder",
        columns=("sentence1", "sentence2", "score"),
        find_model=lambda names: names["model"][0].model,
        list_texts=lambda row: [row["sentence1"]],
    ),
    "trl_sft.py": Example(
        library="trl",
        model="decoder",
        columns=("text", "label"),
        find_model=lambda names: names["trainer"].model,
        list_texts=lambda row: [f"{row['text']} </s>"],  # trl adds this token
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the folders of a tiny encoder and a tiny decoder."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    hf.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder / "encoder")
    hf.BertModel(hf.BertConfig(vocab_size=len(words), **SHAPE)).save_pretrained(folder / "encoder")

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["</s>", *WORDS])}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder / "decoder")
    config = hf.GPTNeoXConfig(vocab_size=1 + len(WORDS), bos_token_id=0, eos_token_id=0, **SHAPE)
    hf.GPTNeoXForCausalLM(config).save_pretrained(folder / "decoder")
    return folder


def make_rows(columns: tuple[str, ...], num_rows: int, seed: int) -> list[dict[str, Any]]:
    generator = random.Random(seed)

    def make_text() -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(4, 10)))

    def draw_label() -> int:
        return generator.randrange(2)

    make: dict[str, Callable[[], Any]] = {"label": draw_label, "idx": draw_label, "score": generator.random}
    return [{column: make.get(column, make_text)() for column in columns} for _ in range(num_rows)]


def compute_naive_score(model: nn.Module, tokenizer: Any, rows: list[list[str]]) -> float:
    """Return the IsoScore of the last layer, from one pass for each row of texts."""
    model.eval()
    with torch.no_grad():
        outputs = [model(**tokenizer(*texts, return_tensors="pt"), output_hidden_states=True) for texts in rows]
    return algorithm_1(torch.cat([output.hidden_states[-1][0] for output in outputs]).double()).item()


# The scripts are about the penalty; warnings of libraries about so small a training do not matter.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", EXAMPLES)
def test_a_script_lowers_the_isotropy_and_prints_the_score(script, inputs, tmp_path, monkeypatch, capsys):
    example = EXAMPLES[script]
    pytest.importorskip(example.library)
    rows_by_split = {"train": make_rows(example.columns, 64, 1), "validation": make_rows(example.columns, 16, 2)}
    (tmp_path / "data").mkdir()
    for split, rows in rows_by_split.items():
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run(weight: str) -> float:
        options = ["--model", str(inputs / example.model), "--data", "data", "--epochs", "3", "--learning-rate", "0.02"]
        monkeypatch.setattr(sys, "argv", [script, *options, "--weight", weight])
        torch.manual_seed(0)
        names = runpy.run_path(str(EXAMPLES_FOLDER / script), run_name="__main__")
        last_line = capsys.readouterr().out.splitlines()[-1].strip()
        printed_score = float(last_line.removeprefix("IsoScore of the last layer: "))
        tokenizer = hf.AutoTokenizer.from_pretrained(inputs / example.model)
        rows = [example.list_texts(row) for row in rows_by_split["validation"]]
        naive_score = compute_naive_score(example.find_model(names), tokenizer, rows)
        assert printed_score == pytest.approx(naive_score, abs=1e-4)
        return naive_score

    assert run("-5") < 0.2 * run("0")


def score_vectors(names: dict[str, Any]) -> dict[str, float]:
    return {"points": algorithm_1(torch.from_numpy(names["vectors"]).double()).item()}


@torch.no_grad()
def score_layers(names: dict[str, Any]) -> dict[str, float]:
    states = {"0.0": names["network"][0][0](names["inputs"]), "3": names["network"](names["inputs"])}
    return {name: algorithm_1(points.double()).item() for name, points in states.items()}


@torch.no_grad()
def score_models(names: dict[str, Any]) -> dict[str, float]:
    model = names["tuned"].eval()
    states = model(names["tokens"], output_hidden_states=True).hidden_states
    tap_names = ["embeddings", "layer_1", "layer_2", "layer_3"]
    return {
        name: algorithm_1(state.flatten(0, 1).double()).item() for name, state in zip(tap_names, states, strict=True)
    }


MEASURING = {
    "measure_vectors.py": ("geometry", score_vectors),
    "measure_layers.py": ("after", score_layers),
    "compare_models.py": ("isoscores", score_models),
}
"""By script, the name of its table or geometry, and the IsoScores by state in float64."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", MEASURING)
def test_a_script_measures_what_it_prints(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script])
    names = runpy.run_path(str(EXAMPLES_FOLDER / script), run_name="__main__")
    result, compute_scores = MEASURING[script]
    scores = names[result]["other" if script == "compare_models.py" else "isoscore"]
    output = capsys.readouterr().out
    for state, score in compute_scores(names).items():
        assert scores[state] == pytest.approx(score, rel=1e-5)
        assert f"{score:.3f}" in output or f"{score:.4g}" in output
    assert len((EXAMPLES_FOLDER / script).read_text(encoding="utf-8").splitlines()) < 40


def test_the_tables_of_the_readme_list_every_script():
    rows = ROW.findall((EXAMPLES_FOLDER / "README.md").read_text(encoding="utf-8"))
    assert rows == [(row[0],) * 3 for row in rows]
    names = [path.name for path in EXAMPLES_FOLDER.glob("*.py")]
    assert sorted(row[0] for row in rows) == sorted(names) == sorted([*EXAMPLES, *MEASURING])
