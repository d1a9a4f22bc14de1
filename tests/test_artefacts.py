"""docs/artefacts.md: the commands of the papers' tables and figures parse, and those of the third paper and of some
figures of the second work."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from istar.cli.main import _make_parser, main
from istar.geometry import measures_file, model_page
from tests.geometry.test_embed import TOKENIZER, build

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "artefacts.md").read_text(encoding="utf-8")
PAIRS = [("cat", "dog", 8), ("house", "garden", 7), ("cat", "garden", 1), ("house", "dog", 3)]
FORMATS = {
    "SimLex-999.txt": "{}\t{}\tN\t{}\n",
    "MEN_dataset_lemma_form_full": "{}-n {}-n {}\n",
    "rw.txt": "{}\t{}\t{}\t7\t7\n",
    "wordsim_similarity_goldstandard.txt": "{}\t{}\t{}\n",
    "wordsim_relatedness_goldstandard.txt": "{}\t{}\t{}\n",
}


@dataclass(frozen=True)
class Row:
    """A row of a table of the page."""

    paper: str
    artefact: str
    commands: tuple[str, ...]
    files: tuple[str, ...]
    differences: str


def rows() -> list[Row]:
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        paper = section.partition("\n")[0]
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if line.startswith("| ") and len(cells) == 5 and not cells[0].startswith(("---", "artefact")):
                commands, files = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[2:4])
                found.append(Row(paper, cells[0], commands, files, cells[4]))
    return found


ROWS = rows()
FIGURES_OF_THE_SECOND = ("Figure 1", "Figure 2", "Figure 5", "Figure 6")
"""Figures of the second paper whose commands a test executes."""
THIRD = [row for row in ROWS if row.paper == "Too Much in Common"]
COMMANDS = sorted({command for row in ROWS for command in row.commands})


@pytest.mark.parametrize(
    ("paper", "tables", "figures"),
    [
        ("Stable Anisotropic Regularization", 2, 8),
        ("Anisotropy is Not Inherent to Transformers", 4, 13),
        ("Too Much in Common", 3, 6),
    ],
)
def test_every_table_and_figure_has_a_row(paper: str, tables: int, figures: int) -> None:
    named: dict[str, set[int]] = {"Table": set(), "Figure": set()}
    for row in ROWS:
        match = re.match(r"(Table|Figure)s? (\d+)(?: (?:to|and) (\d+))?", row.artefact)
        if row.paper == paper and match:
            named[match[1]] |= set(range(int(match[2]), int(match[3] or match[2]) + 1))
    assert named == {"Table": set(range(1, tables + 1)), "Figure": set(range(1, figures + 1))}


def test_a_row_has_a_command_and_its_files_or_says_what_is_missing() -> None:
    for row in ROWS:
        if row.commands:
            assert row.files, row
        else:
            assert row.paper != "Too Much in Common"
            assert row.artefact == "Figure 1", row


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_parses(command: str) -> None:
    program, name, *arguments = shlex.split(command)
    assert program == "istar"
    if name != "train":
        assert _make_parser().parse_args([name, *arguments]).name == name
        return
    # Hydra parses the options of `istar train`.
    assert arguments[0] == "-m"
    overrides = {one.key_or_group: one for one in OverridesParser.create().parse_overrides(arguments[1:])}
    assert overrides.keys() <= {"sweep", "task", "model"}
    assert (REPOSITORY / "sweep" / f"{overrides['sweep'].value()}.yaml").is_file()


def make_inputs(folder: Path) -> None:
    """Make tiny random models, benchmarks and a text under the names that the commands have."""
    names = sorted(
        {name for row in THIRD for command in row.commands for name in re.findall(r" (\w+-?\w*/\S+)", command)}
    )
    for number, name in enumerate(names):
        model: Any = build("bert")
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1 + number / 10)
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    for name, line in FORMATS.items():
        (folder / name).write_text("".join(line.format(*pair) for pair in PAIRS))
    (folder / "cnn.txt").write_text("the cat the dog\nthe house sees the cat\n")


@pytest.mark.slow
def test_the_commands_of_the_third_paper_make_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in sorted({command for row in THIRD for command in row.commands}):
        assert main(shlex.split(command)[1:]) == 0, command
    for row in THIRD:
        [command] = row.commands
        out = tmp_path / _make_parser().parse_args(shlex.split(command)[1:]).out
        for name in row.files:
            assert (out / name).stat().st_size > 0, (row.artefact, name)
    # The paper's numbers stand beside those of its models, in each table.
    for folder, table, models in (("embeddings", 1, 8), ("word-similarity", 2, 6), ("word-similarity", 3, 6)):
        frame = pd.read_csv(tmp_path / folder / "tables" / f"table{table}.csv")
        assert frame[frame["source"] == "paper"]["model"].nunique() == models


@pytest.mark.slow
def test_the_commands_of_figures_of_the_second_paper_make_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures 1 and 2 have the final LayerNorm, Figures 5 and 6 bars of I(W) with the signs as computed."""
    figures = [
        row
        for row in ROWS
        if row.paper == "Anisotropy is Not Inherent to Transformers" and row.artefact in FIGURES_OF_THE_SECOND
    ]
    assert len(figures) == len(FIGURES_OF_THE_SECOND)
    [options] = {
        (options.name, tuple(options.text), str(options.out))
        for options in (_make_parser().parse_args(shlex.split(row.commands[0])[1:]) for row in figures)
    }
    assert options == ("compare", ("enron.jsonl",), "comparison")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("enron.jsonl").write_text('{"text": "the cat sees the dog"}\n{"text": "the house the garden"}\n' * 10)
    # The commands differ in their models only, of which two are enough.
    models = ("EleutherAI/pythia-70m", "EleutherAI/pythia-160m")
    for model in models:
        build("neox").save_pretrained(model)
        TOKENIZER.save_pretrained(model)
    # The pages of the single models are not what the rows are about.
    monkeypatch.setattr(model_page, "write", measures_file.write)
    assert main(["compare", *models, "--text", "enron.jsonl", "--documents", "0"]) == 0
    for row in figures:
        [name] = row.files
        drawn = Path("comparison", name).read_text(encoding="utf-8")
        is_by_layer = name == "figures/directions.svg"
        labels = ("final", "norm") if is_by_layer else ("I(W), signs as computed", "I(W), both signs")
        for text in (*labels, "pythia-70m", "pythia-160m"):
            assert f">{text}<" in drawn, (row.artefact, text)


@pytest.mark.slow
def test_a_real_encoder_and_decoder(tmp_path: Path, real_data: Path, minilm: Path, babyllama: Path) -> None:
    """MiniLM agrees with people; the decoder has a token for each letter only, and so no row in Table 2."""
    benchmarks = [option for file in sorted((real_data / "wordsim").iterdir()) for option in ("--wordsim", str(file))]
    out = tmp_path / "out"
    assert main(["embed", f"minilm={minilm}", str(babyllama), *benchmarks, "--out", str(out)]) == 0
    averages = pd.read_csv(out / "tables" / "table2.csv")
    assert set(averages["model"]) == {"minilm"}
    assert averages["cosine"].between(55, 80).all()
    isotropy = pd.read_csv(out / "tables" / "table1.csv")
    both = isotropy[isotropy["source"] == "both signs"].set_index("model")
    assert (both["isotropy_raw"] < both["isotropy_centered"]).all()
    assert (both["isotropy_centered"] < both["isotropy_post_processed"]).all()
