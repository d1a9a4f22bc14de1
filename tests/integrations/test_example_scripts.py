"""The scripts in `examples/` run: they lower the isotropy, print the right scores, or say that a training collapses."""

import csv
import json
import random
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from tests.oracles import algorithm_1, mean_pair_cosine

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


WATCHING = {"watch_loop.py", "watch_trainer.py"}


def run_watching(script, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *options])
    assert len((EXAMPLES_FOLDER / script).read_text(encoding="utf-8").splitlines()) < 40
    return runpy.run_path(str(EXAMPLES_FOLDER / script), run_name="__main__")


def list_inter_sims(state):
    with Path("monitor.csv").open(encoding="utf-8") as file:
        return {int(row["step"]): float(row["inter_sim"]) for row in csv.DictReader(file) if row["layer"] == state}


def test_a_loop_with_negatives_is_watched_without_an_alarm(tmp_path, monkeypatch, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_watching("watch_loop.py", [], tmp_path, monkeypatch)
    assert float(capsys.readouterr().out.split("step 200: ")[1].split("%")[0].split()[-1]) > 90
    assert list_inter_sims("layer_3")[200] < 0.1


def test_a_loop_without_negatives_collapses_and_says_so(tmp_path, monkeypatch, capsys):
    with pytest.warns(UserWarning, match="layer_3 may have collapsed") as caught:
        run_watching("watch_loop.py", ["--without-negatives"], tmp_path, monkeypatch)
    inter_sims = list_inter_sims("layer_3")
    steps, distances = list(inter_sims), [1 - value for value in inter_sims.values()]
    is_near = [distance < 0.1 * distances[0] for distance in distances]
    [first, *_] = [
        steps[last]
        for last in range(2, len(steps))
        if all(is_near[last - 2 : last + 1]) and not distances[last - 2] < distances[last - 1] < distances[last]
    ]
    assert [str(warning.message).split(":")[0] for warning in caught] == [f"step {first}"]
    assert Path(caught[0].filename).name == "watch_loop.py"
    output = capsys.readouterr().out
    loss, found = re.search(r"step 200: loss ([\d.]+), (\d+)% found", output).groups()
    assert float(loss) < 0.01
    assert int(found) < 10


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_is_watched(tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    names = run_watching("watch_trainer.py", [], tmp_path, monkeypatch)
    model = names["trainer"].model.eval()
    tokens = torch.stack([row["input_ids"] for row in names["data"][400:408]])  # the first batch
    with torch.no_grad():
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states[3].flatten(0, 1)
    inter_sim = mean_pair_cosine(states.numpy())
    assert f"on the probe: {inter_sim:.3f}" in capsys.readouterr().out
    assert names["metrics"]["eval_layer_3_inter_sim"] == pytest.approx(inter_sim, rel=1e-5)
    assert list(list_inter_sims("layer_3")) == [0, 20, 40, 60, 80, 100]


def test_the_tables_of_the_readme_list_every_script():
    rows = ROW.findall((EXAMPLES_FOLDER / "README.md").read_text(encoding="utf-8"))
    assert rows == [(row[0],) * 3 for row in rows]
    names = [path.name for path in EXAMPLES_FOLDER.glob("*.py")]
    assert sorted(row[0] for row in rows) == sorted(names) == sorted([*EXAMPLES, *MEASURING, *WATCHING])
