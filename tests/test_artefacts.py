"""docs/artefacts.md: the commands for the papers' tables and figures parse, and are executed.

A slow test executes the commands of the third paper, and `test_artefact_commands.py` those of the others.
"""

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from istar.cli.main import main
from istar.cli.options import make_parser
from tests.embeddings.test_embed import TOKENIZER, build

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
TABLE_FORMATS = (".md", ".tex")
"""Formats of tables in which the page does not name their files."""


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
THIRD_PAPER_ROWS = [row for row in ROWS if row.paper == "Too Much in Common"]
COMMANDS = sorted({command for row in ROWS for command in row.commands})


@pytest.mark.parametrize(
    ("paper", "table_count", "figure_count"),
    [
        ("Stable Anisotropic Regularization", 2, 8),
        ("Anisotropy is Not Inherent to Transformers", 4, 13),
        ("Too Much in Common", 3, 6),
    ],
)
def test_every_table_and_figure_has_a_row(paper: str, table_count: int, figure_count: int) -> None:
    numbers_by_kind: dict[str, set[int]] = {"Table": set(), "Figure": set()}
    for row in ROWS:
        match = re.match(r"(Table|Figure)s? (\d+)(?: (?:to|and) (\d+))?", row.artefact)
        if row.paper == paper and match:
            numbers_by_kind[match[1]] |= set(range(int(match[2]), int(match[3] or match[2]) + 1))
    assert numbers_by_kind == {"Table": set(range(1, table_count + 1)), "Figure": set(range(1, figure_count + 1))}


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
        assert make_parser().parse_args([name, *arguments]).name == name
        return
    # Hydra parses the options of `istar train`.
    assert arguments[0] == "-m"
    overrides = {
        override.key_or_group: override for override in OverridesParser.create().parse_overrides(arguments[1:])
    }
    assert overrides.keys() <= {"sweep", "task", "model"}
    assert (REPOSITORY / "sweep" / f"{overrides['sweep'].value()}.yaml").is_file()


def make_inputs(folder: Path) -> None:
    """Write tiny random models, benchmarks and a text with the names that the commands use."""
    names = sorted(
        {
            name
            for row in THIRD_PAPER_ROWS
            for command in row.commands
            for name in re.findall(r" (\w+-?\w*/\S+)", command)
        }
    )
    for index, name in enumerate(names):
        model: Any = build("bert")
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1 + index / 10)
        model.save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    for name, (line, count) in FORMATS.items():
        pairs = itertools.islice(itertools.cycle(PAIRS), count)
        (folder / name).write_text("".join(line.format(*pair) for pair in pairs))
    (folder / "cnn.txt").write_text("the cat the dog\nthe house sees the cat\n")


@pytest.mark.slow
def test_the_commands_of_the_third_paper_make_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in sorted({command for row in THIRD_PAPER_ROWS for command in row.commands}):
        assert main(shlex.split(command)[1:]) == 0, command
    for row in THIRD_PAPER_ROWS:
        [command] = row.commands
        output_folder = tmp_path / make_parser().parse_args(shlex.split(command)[1:]).out
        for name in row.files:
            path = output_folder / name
            formats = TABLE_FORMATS if path.parent.name == "tables" else ()
            for file in (path, *map(path.with_suffix, formats)):
                assert file.stat().st_size > 0, (row.artefact, file.name)
    # Each table has the paper's numbers next to those of the models.
    for folder_name, table, model_count in (("embeddings", 1, 8), ("word-similarity", 2, 6), ("word-similarity", 3, 6)):
        frame = pd.read_csv(tmp_path / folder_name / "tables" / f"table{table}.csv")
        assert frame[frame["source"] == "paper"]["model"].nunique() == model_count


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
