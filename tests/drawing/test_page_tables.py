"""Tables: the alignment of their numbers on the page and in LaTeX."""

import math
import re

import pandas as pd
import pytest

from istar.drawing import page_tables
from istar.drawing.page_tables import Entry, Sheet
from tests.reports.test_report import balanced


def make_number_sheet(*texts: str, bold: bool = False) -> Sheet:
    """Return a table of one column."""
    rows = [[Entry(text, bold, number=True)] for text in texts]
    return Sheet("name", "title", "caption", ("column",), {"": rows}, pd.DataFrame())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("71.67 ± 0.50", ("71", ".67 ± 0.50")),
        ("1,234", ("1,234", "")),
        ("-0.5", ("-0", ".5")),
        ("<0.001", ("<0", ".001")),
        ("1e-05", ("1", "e-05")),
        ("1:02", ("1", ":02")),
        ("-", ("-", "")),
        ("", ("", "")),
    ],
)
def test_a_number_is_cut_behind_its_units(text: str, parts: tuple[str, str]) -> None:
    assert Entry(text).parts == parts
    assert "".join(Entry(text).parts) == text


def test_the_width_behind_the_units_is_the_largest_of_the_column() -> None:
    assert page_tables.rest_widths(make_number_sheet("1", "22.5", "3.125", "-")) == [4]
    assert page_tables.rest_widths(make_number_sheet("1", "1,000")) == [0]
    assert page_tables.rest_widths(make_number_sheet(f"1.{'0' * 50}")) == [30]
    text_sheet = Sheet("n", "t", "c", ("a",), {"": [[Entry("1.5 is a text")]]}, pd.DataFrame())
    assert page_tables.rest_widths(text_sheet) == [0]


def test_a_table_that_is_too_wide_for_paper_is_divided() -> None:
    header = ("layer", *(f"measure\n{number}" for number in range(10)))
    rows = [
        [Entry(f"layer {row}"), *(Entry(f"{row}.{number:05}", number=True) for number in range(10))] for row in "12"
    ]
    sheet = Sheet("name", "title", "caption", header, {"text": rows}, pd.DataFrame())
    assert page_tables.divide(sheet, 9 * 11) == [sheet]
    parts = page_tables.divide(sheet, 9 * 5)
    # Every part has the names of the rows, and every measure is in one part.
    assert [part.header[0] for part in parts] == ["layer"] * 3
    assert [name for part in parts for name in part.header[1:]] == list(header[1:])
    assert [[len(row) for row in part.rows] for part in parts] == [[5, 5], [5, 5], [3, 3]]
    assert parts[2].rows_by_group["text"][1][1].text == "2.00008"
    # Two parts are as wide as each other, though the first has room for eight measures.
    assert [len(part.header) for part in page_tables.divide(sheet, 9 * 9)] == [6, 6]
    # A column that is wider than paper is a part of its own.
    assert len(page_tables.divide(sheet, 4)) == 10


def column_type(*texts: str) -> str:
    tex = page_tables.to_latex(make_number_sheet(*texts))
    balanced(tex)
    return re.findall(r"\\begin\{tabular\}\{(.*)\}\n", tex)[0]


def test_columns_of_numbers_have_the_type_of_siunitx() -> None:
    assert column_type("1", "22.5", "-3.125", "-") == "S[table-format=-2.3]"
    assert column_type("1,234,567", "5") == "S[table-format=7.0]"
    assert column_type("+0.50", "-1.00") == "S[table-format=+1.2]"
    assert column_type("<0.001", "0.0625") == "S[table-format=<1.4]"
    assert column_type("1e-05", "0.25", "2e+12") == "S[table-format=1.2e-2]"
    assert column_type("1.0 ± 0.1", "2.0") == r"S[table-format=1.1, table-space-text-post={~$\pm$ 0.1}]"
    # Columns with other texts, and columns of dashes only, are no columns of numbers.
    assert column_type("1:02", "3") == "r"
    assert column_type("none", "3") == "r"
    assert column_type("-", "\u2013") == "r"


def test_cells_of_siunitx_are_plain_numbers_or_texts_in_braces() -> None:
    tex = page_tables.to_latex(
        make_number_sheet("1,234", "+0.50", "\u22121.5", "3e-07", "-", "2.0 ± 0.1 (collapsed)", "<0.001")
    )
    cells = re.findall(r"(?m)^(.*) \\\\$", tex)
    assert cells[1:] == ["1234", "+0.50", "-1.5", "3e-7", "{-}", r"2.0 {~$\pm$ 0.1 (collapsed)}", "<0.001"]
    bold_tex = page_tables.to_latex(make_number_sheet("1.5", "2.0 ± 0.1", bold=True))
    assert r"\bfseries 1.5 \\" in bold_tex
    assert r"\bfseries 2.0 {~\boldmath$\pm$ 0.1} \\" in bold_tex


def test_groups_are_rows_of_their_own() -> None:
    groups = {"a_1": [[Entry("x"), Entry("1", number=True)]], "b": [[Entry("y"), Entry("2", number=True)]]}
    tex = page_tables.to_latex(Sheet("n", "t", "c", ("h", "v"), groups, pd.DataFrame()))
    balanced(tex)
    body = tex[tex.index(r"\toprule") : tex.index(r"\bottomrule")].splitlines()
    assert body == [
        r"\toprule", r"{h} & {v} \\", r"\midrule", r"\multicolumn{2}{l}{\textbf{a\_1}} \\", r"x & 1 \\",
        r"\midrule", r"\multicolumn{2}{l}{\textbf{b}} \\", r"y & 2 \\",
    ]  # fmt: skip


def test_a_table_without_rows_is_still_one() -> None:
    balanced(page_tables.to_latex(make_number_sheet()))


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [
        (0.123456, 0.0123, "0.123 ± 0.012"),
        (0.1, 0.00092, "0.10000 ± 0.00092"),
        (16.5, 3.21, "16.5 ± 3.2"),
        (2.0, 1e-12, "2 ± 1e-12"),
        (1234.5, 123.4, "1,234 ± 123"),
        (12.5, 0.0, "12.5 ± 0"),
        (12.5, math.nan, "12.5"),
        (math.nan, 0.1, "\u2013"),
    ],
)
def test_a_number_has_its_half_width(value: float, half_width: float, text: str) -> None:
    assert page_tables.number_entry(value, half_width) == Entry(text, number=True)
