"""docs/artefacts.md: the commands for the papers' tables and figures parse, and slow tests execute them.

The models are tiny and have the names of the papers' models, so that the commands are those of the page. A mock hub has
the models and the data of the first two papers, whose trainings are made shorter by additional options.
"""

import html
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as hf
from hydra.core.override_parser.overrides_parser import OverridesParser

from istar.cli.main import main
from istar.cli.options import make_parser
from istar.models import tiny
from istar.texts import demo
from tests.embeddings.builders import TOKENIZER, build
from tests.geometry.correlation.test_score_files import make_harness_results, write_file
from tests.jobs import starting
from tests.mock_hub import MockHub, Repository, glue_files, join_files, serving, use

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "artefacts.md").read_text(encoding="utf-8")
PAIRS = [("cat", "dog", 8), ("house", "garden", 7), ("cat", "garden", 1), ("house", "dog", 3)]
FORMATS = {
    "SimLex-999.txt": ("{}\t{}\tN\t{}\n", 999),
    "MEN_dataset_lemma_form_full": ("{}-n {}-n {}\n", 3000),
    "rw.txt": ("{}\t{}\t{}\t0\t9\n", 2034),
    "wordsim_similarity_goldstandard.txt": ("{}\t{}\t{}\n", 203),
    "wordsim_relatedness_goldstandard.txt": ("{}\t{}\t{}\n", 252),
}
"""Line and number of lines of each benchmark's file."""


@dataclass(frozen=True)
class Row:
    """A row of one of the tables of docs/artefacts.md."""

    paper: str
    artefact: str
    commands: tuple[str, ...]
    files: tuple[str, ...]
    differences: str


def read_rows() -> list[Row]:
    """Return the rows of all tables of docs/artefacts.md."""
    rows = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        paper = section.partition("\n")[0]
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if line.startswith("| ") and len(cells) == 5 and not cells[0].startswith(("---", "artefact")):
                commands, files = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[2:4])
                rows.append(Row(paper, cells[0], commands, files, cells[4]))
    return rows


ROWS = read_rows()
FIRST_PAPER, SECOND_PAPER = "Stable Anisotropic Regularization", "Anisotropy is Not Inherent to Transformers"
THIRD_PAPER = "Too Much in Common"
COMMANDS = sorted({command for row in ROWS for command in row.commands})


@pytest.mark.parametrize(
    ("paper", "table_count", "figure_count"), [(FIRST_PAPER, 2, 8), (SECOND_PAPER, 4, 13), (THIRD_PAPER, 3, 6)]
)
def test_every_table_and_figure_has_a_row(paper: str, table_count: int, figure_count: int) -> None:
    numbers_by_kind: dict[str, set[int]] = {"Table": set(), "Figure": set()}
    for row in ROWS:
        match = re.match(r"(Table|Figure)s? (\d+)(?: (?:to|and) (\d+))?", row.artefact)
        assert bool(row.commands) == bool(row.files) or row.artefact == "Figure 1"
        if row.paper == paper and match:
            numbers_by_kind[match[1]] |= set(range(int(match[2]), int(match[3] or match[2]) + 1))
    assert numbers_by_kind == {"Table": set(range(1, table_count + 1)), "Figure": set(range(1, figure_count + 1))}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_parses(command: str) -> None:
    program, name, *arguments = shlex.split(command)
    assert program == "istar"
    if name != "train":
        assert make_parser().parse_args([name, *arguments]).name == name
        return
    # Hydra parses the options of `istar train`.
    assert arguments[0] == "-m"
    overrides = {
        override.key_or_group: override for override in OverridesParser.create().parse_overrides(arguments[1:])
    }
    assert overrides.keys() <= {"sweep", "task", "model"}
    assert (REPOSITORY / "sweep" / f"{overrides['sweep'].value()}.yaml").is_file()


STEPS = ("step0", "step1000", "step71000", "step143000")
SHORT = (
    "data.batch_size=8",
    "optim.lr=1e-3",
    "trainer.max_epochs=1",
    "trainer.accelerator=cpu",
    "trainer.progress_bar=false",
    "run.save_model=false",
)
"""Options that make a training of a tiny model take about a second."""
FEWER_RUNS = {
    "table1": ("reg.lambda=-1,1", "sweep.seeds=[1,2]"),
    "table2": ("reg.lambda=-1,1", "reg.zeta=0.4"),
    "figure3": ("seed=1,2",),
    "figure7": ("seed=1,2",),
    "figure8": ("seed=1,2", "reg.layers=[1],[2],all"),
}
"""Options that leave out trainings of a sweep: seeds, hyperparameters, and layers that tiny models do not have."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    """Yield an empty mock hub that the libraries use, in this process and in those that it starts."""
    with serving() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield hub


def push_model(hub: MockHub, name: str, model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerBase,
               branch: str = "main") -> None:  # fmt: skip
    """Add a commit with a model to a branch of a repository of the hub."""
    folder = Path("pushed", name, branch)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    repository = hub.repositories.setdefault(f"models/{name}", Repository())
    repository.push({path.name: path.read_bytes() for path in folder.iterdir()}, branch)


def push_glue(hub: MockHub) -> None:
    """Add the tasks of GLUE that the commands of the first paper name to the hub."""
    columns_and_labels = {
        "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
        "qnli": (("question", "sentence"), ("entailment", "not_entailment")),
        "sst2": (("sentence",), ("negative", "positive")),
        "cola": (("sentence",), ("unacceptable", "acceptable")),
    }
    tasks = [
        glue_files(
            {name: ("train", "validation", "test")},
            dict.fromkeys(columns, "the {split} lamp number {row} is old"),
            labels,
            rows=24,
        )
        for name, (columns, labels) in columns_and_labels.items()
    ]
    hub.repositories["datasets/nyu-mll/glue"] = Repository()
    hub.repositories["datasets/nyu-mll/glue"].push(join_files(*tasks))


def list_commands(paper: str) -> list[list[str]]:
    """Return the arguments of the commands of a paper after `istar`, in the order of the page, without repetitions."""
    commands = dict.fromkeys(command for row in ROWS if row.paper == paper for command in row.commands)
    return [shlex.split(command)[1:] for command in commands]


def check_files(paper: str, find_folder: Callable[[tuple[str, ...]], Path]) -> None:
    """Assert that the files of all rows of a paper exist, in the folder of the row's commands."""
    for row in ROWS:
        for name in row.files if row.paper == paper else ():
            assert (find_folder(row.commands) / name).stat().st_size > 0, (row.artefact, name)


def find_output_folder(commands: tuple[str, ...]) -> Path:
    """Return the folder that the last command writes to."""
    return Path(make_parser().parse_args(shlex.split(commands[-1])[1:]).out)


@pytest.mark.slow
@pytest.mark.usefixtures("svg_only")
def test_first_paper(hub: MockHub, own_cache: Path, tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(demo.vocabulary())
    shape = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    for name, model in (
        ("google-bert/bert-base-cased", hf.BertModel(tiny.make_tiny_config(len(tokenizer)))),
        ("albert/albert-base-v2", hf.AlbertModel(hf.AlbertConfig(**shape, hidden_size=32, intermediate_size=64))),
        ("distilbert/distilbert-base-cased", hf.DistilBertModel(hf.DistilBertConfig(
            vocab_size=len(tokenizer), n_layers=2, n_heads=2, dim=32, hidden_dim=64))),
    ):  # fmt: skip
        push_model(hub, name, model, tokenizer)
    push_glue(hub)
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    reports = []
    with starting(own_cache) as start:
        for name, *arguments in list_commands(FIRST_PAPER):
            if name == "report":
                reports.append([name, *arguments])
                continue
            [sweep] = [argument.partition("=")[2] for argument in arguments if argument.startswith("+sweep=")]
            done = start(tmp_path, *arguments, *SHORT, *FEWER_RUNS.get(sweep, ()), **environment).wait()
            assert done.code == 0, (sweep, done.stderr, done.stdout[-2000:])
    [report] = reports
    assert main(report) == 0
    check_files(FIRST_PAPER, lambda commands: Path("report"))
    # The paper's numbers, from its Tables 1 and 2, stand beside those of the tiny models.
    table1, table2 = (pd.read_csv(Path("report", "tables", f"table{number}.csv")) for number in (1, 2))
    rte = table1[(table1["model"] == "bert-base-cased") & (table1["task"] == "rte")].set_index("method")
    assert rte["paper_mean"].to_dict() == {"Base": 62.24, "CosReg": 61.52, "I-STAR": 62.53}
    averages = table2[table2["task"].str.startswith("average")]
    assert set(averages["model"]) == {"albert-base-v2", "bert-base-cased", "distilbert-base-cased"}
    assert averages["paper_lambda"].notna().all()
    # Figures 3 and 6 have the paper's IsoScore*, and Figure 4 is over all validation texts.
    page = html.unescape(Path("report", "index.html").read_text(encoding="utf-8"))
    assert page.count("IsoScore* with the paper's ζ = 0.2 over all tokens of the validation set") == 2
    assert "over the tokens of 24 validation texts" in page


@pytest.mark.slow
@pytest.mark.usefixtures("svg_only")
def test_second_paper(hub: MockHub) -> None:
    for name in ("EleutherAI/pythia-70m", "EleutherAI/pythia-160m", "EleutherAI/pythia-410m", "tiiuae/falcon-7b"):
        for number, branch in enumerate((*STEPS, "main")):
            model = build("neox")
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(1 + number / 10)
            push_model(hub, name, model, TOKENIZER, branch)
    shape = {"vocab_size": len(TOKENIZER), "n_embd": 24, "n_layer": 2, "n_head": 2}
    push_model(hub, "openai-community/gpt2", hf.GPT2LMHeadModel(hf.GPT2Config(**shape)), TOKENIZER)
    for name in ("enron", "hackernews"):
        Path(f"{name}.jsonl").write_text('{"text": "the cat sees the dog"}\n{"text": "the house the garden"}\n' * 10)
    for number, step in enumerate(STEPS):
        results = make_harness_results("EleutherAI/pythia-70m", step, 0.3 + number / 10)
        write_file(Path("harness-results") / f"results_{number}.json", results)
    pd.DataFrame({"revision": STEPS, "MR": [0.3, 0.4, 0.6, 0.5]}).to_csv("scores.csv", index=False)
    for arguments in list_commands(SECOND_PAPER):
        assert main(arguments) == 0, arguments
    check_files(SECOND_PAPER, find_output_folder)

    def read_figure(folder: str, name: str) -> str:
        return Path(folder, "figures", f"{name}.svg").read_text(encoding="utf-8")

    # Figures 1, 2 and 8 are of three models, with a mark for the final normalization.
    for name in ("directions", "final_norm"):
        assert all(f">pythia-{size}<" in read_figure("comparison", name) for size in ("70m", "160m", "410m"))
    assert all(f">{word}<" in read_figure("comparison", "directions") for word in ("final", "norm"))
    # Figures 5 and 6 have bars of both sign conventions.
    matrices = read_figure("matrices", "partition")
    assert all(f">{label}<" in matrices for label in ("I(W), signs as computed", "I(W), both signs", "gpt2"))
    # Figures 3, 4, 7 and 9 are over the training.
    for name in ("directions", "partition", "final_norm"):
        assert all(
            f">{text}<" in read_figure("trainings", name)
            for text in ("step (logarithmic)", "pythia-70m", "pythia-160m")
        )
    # Table 1 has the paper's correlations.
    correlations = pd.read_csv(Path("correlation", "tables", "correlations.csv"))
    assert correlations.loc[correlations["layer"] == "output_embeddings", "paper_pearson"].tolist() == [0.99]


@pytest.mark.slow
def test_third_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = list_commands(THIRD_PAPER)
    names = sorted(
        {argument for command in commands for argument in command if re.fullmatch(r"\w+-?\w*/\S+", argument)}
    )
    for index, name in enumerate(names):
        model: Any = build("bert")
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1 + index / 10)
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save_pretrained(tmp_path / name)
    for name, (line, count) in FORMATS.items():
        pairs = itertools.islice(itertools.cycle(PAIRS), count)
        (tmp_path / name).write_text("".join(line.format(*pair) for pair in pairs))
    (tmp_path / "cnn.txt").write_text("the cat the dog\nthe house sees the cat\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in commands:
        assert main(command) == 0, command
    check_files(THIRD_PAPER, find_output_folder)
    # Each table has the paper's numbers next to those of the models, and is also a Markdown and a LaTeX file.
    for folder_name, table, model_count in (("embeddings", 1, 8), ("word-similarity", 2, 6), ("word-similarity", 3, 6)):
        path = tmp_path / folder_name / "tables" / f"table{table}.csv"
        frame = pd.read_csv(path)
        assert frame[frame["source"] == "paper"]["model"].nunique() == model_count
        assert all(path.with_suffix(suffix).stat().st_size > 0 for suffix in (".md", ".tex"))


@pytest.mark.slow
def test_a_real_encoder_and_decoder(tmp_path: Path, real_data: Path, minilm: Path, babyllama: Path) -> None:
    """MiniLM agrees with human ratings; the decoder, which has only one token per letter, has no row in Table 2."""
    benchmarks = [option for file in sorted((real_data / "wordsim").iterdir()) for option in ("--wordsim", str(file))]
    output_folder = tmp_path / "out"
    assert main(["embed", f"minilm={minilm}", str(babyllama), *benchmarks, "--out", str(output_folder)]) == 0
    averages = pd.read_csv(output_folder / "tables" / "table2.csv")
    assert set(averages["model"]) == {"minilm"}
    assert averages["cosine"].between(55, 80).all()
    isotropy = pd.read_csv(output_folder / "tables" / "table1.csv")
    both_signs = isotropy[isotropy["source"] == "both signs"].set_index("model")
    assert (both_signs["isotropy_raw"] < both_signs["isotropy_centered"]).all()
    assert (both_signs["isotropy_centered"] < both_signs["isotropy_post_processed"]).all()
