"""Separators of CSV files, which spreadsheets choose by language."""

from pathlib import Path

import pytest

from istar.errors import UserError
from istar.texts.readers import iterate_csv, read_csv

RECORDS = {
    "commas": ("a,b\n1;x,2\n", [["a", "b"], ["1;x", "2"]]),
    "semicolons": ("a;b\n1,5;2\n", [["a", "b"], ["1,5", "2"]]),
    "tabs": ("a\tb\n1,5\t2;3\n", [["a", "b"], ["1,5", "2;3"]]),
    "one column": ("text\none; two\n", [["text"], ["one; two"]]),
    "a comma decides": ("a,b;c\n1,2;3\n", [["a", "b;c"], ["1", "2;3"]]),
    "quoted header": ('"a, b";"c""d"\n1;2\n', [["a, b", 'c"d'], ["1", "2"]]),
    "quoted header of two lines": ('"a;\nb",c\n1,2\n', [["a;\nb", "c"], ["1", "2"]]),
    "byte-order mark and empty lines": ("\ufeff\r\n\r\na;b\r\n1;2\r\n", [["a", "b"], ["1", "2"]]),
    "Excel's line": ("\ufeffsep=;\r\na,1;b\r\n1;2,5\r\n", [["a,1", "b"], ["1", "2,5"]]),
    "Excel's line, quoted": ('"SEP=,"\na;1,b\n1,2\n', [["a;1", "b"], ["1", "2"]]),
    "Excel's line of another separator": ("sep=|\na|b\n1|2\n", [["a", "b"], ["1", "2"]]),
}


@pytest.mark.parametrize(("text", "expected"), RECORDS.values(), ids=RECORDS)
def test_the_header_tells_the_separator(tmp_path: Path, text: str, expected: list[list[str]]) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    records = list(iterate_csv(path))
    assert [fields for _, fields in records] == expected
    assert records[-1][0] == text.rstrip().count("\n") + 1
    assert read_csv(path).columns == expected[0]


def test_a_line_behind_excels_line_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('sep=;\na;b\n"1;2\n')
    with pytest.raises(UserError, match=r"a\.csv, line 3: not CSV"):
        list(iterate_csv(tmp_path / "a.csv"))
