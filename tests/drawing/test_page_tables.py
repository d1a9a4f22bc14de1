"""Tables: their LaTeX, and numbers with intervals."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from istar.drawing import page_tables
from istar.drawing.page_tables import Entry, Sheet
from tests.reports.test_report import balanced


def test_latex_has_right_aligned_numbers_and_groups_in_a_column() -> None:
    rows = {
        "a_1": [[Entry("x"), Entry("1,234", number=True)], [Entry("y"), Entry("2.0 ± 0.1", bold=True, number=True)]],
        "b": [[Entry("z"), Entry("\u2013", number=True)]],
    }
    tex = page_tables.to_latex(Sheet("n", "t", "c", ("h", "v"), rows, pd.DataFrame()))
    balanced(tex)
    assert r"\begin{tabular}{llr}" in tex
    body = tex[tex.index(r"\toprule") : tex.index(r"\bottomrule")].splitlines()
    assert body == [
        r"\toprule", r"model & h & v \\", r"\midrule", r"a\_1 & x & 1,234 \\", r"a\_1 & y & \textbf{2.0 $\pm$ 0.1} \\",
        r"b & z & -- \\",
    ]  # fmt: skip
    plain = page_tables.to_latex(Sheet("n", "t", "c", ("h",), {"": [[Entry("x")]]}, pd.DataFrame()))
    assert r"\begin{tabular}{l}" in plain


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [
        (0.123456, 0.0123, "0.123 ± 0.012"),
        (0.1, 0.00092, "0.10000 ± 0.00092"),
        (16.5, 3.21, "16.5 ± 3.2"),
        (2.0, 1e-12, "2 ± 1e-12"),
        (7.9999998429, 3.7e-9, "8 ± 4e-09"),
        (1234.5, 123.4, "1,234 ± 123"),
        (12.5, 0.0, "12.5 ± 0"),
        (12.5, math.nan, "12.5"),
        (math.nan, 0.1, "\u2013"),
    ],
)
def test_a_number_has_its_half_width(value: float, half_width: float, text: str) -> None:
    assert page_tables.number_entry(value, half_width) == Entry(text, number=True)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("IsoScore", "IsoScore"),
        ("norm of the mean direction", "norm of the\nmean direction"),
        ("I(W),\nboth signs", "I(W),\nboth signs"),
        ("one\ntwo\nthree", "one\ntwo three"),
        ("x" * 30, "x" * 30),
    ],
)
def test_a_header_has_at_most_two_lines(name: str, header: str) -> None:
    assert page_tables.break_header(name) == header


def test_empty_columns_are_left_out_and_constant_descriptions_are_a_note() -> None:
    texts = [["a", "1", "-", "x", "-"], ["b", "1", "\u2013", "x", "2"], ["c", "1", "", "x", "3"]]
    rows = {"g": [list(map(Entry, row)) for row in texts[:2]], "h": [list(map(Entry, texts[2]))]}
    frame = pd.DataFrame(texts)
    sheet = Sheet("n", "t", "c", ("name", "seeds", "p", "chosen\non", "value"), rows, frame, ("Last.",))
    folded = page_tables.fold_columns(replace(sheet, descriptive=("chosen\non", "value")))
    assert folded.header == ("name", "seeds", "value")
    assert [[entry.text for entry in row] for row in folded.rows] == [["a", "1", "-"], ["b", "1", "2"], ["c", "1", "3"]]
    assert list(folded.rows_by_group) == ["g", "h"]
    assert folded.notes == ("In all rows: chosen on x.", "Last.")
    assert folded.frame is frame
    single = replace(sheet, rows_by_group={"": [list(map(Entry, texts[0]))]}, descriptive=("chosen\non",))
    assert page_tables.fold_columns(single).header == ("name", "seeds", "chosen\non")
    without_rows = replace(sheet, rows_by_group={})
    assert page_tables.fold_columns(without_rows).header == ("name",)
