"""Readers of the files of a split: tables, GLUE's TSV, SST-5's Penn Treebank trees and SQuAD's JSON."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from istar.errors import UserError
from istar.files.parsing import parse_json
from istar.runs.tasks import TaskSpec
from istar.texts.readers import READERS, Table, make_table, numbered_lines, open_saved_dataset, read_text, read_tsv

_log = logging.getLogger(__name__)

MAX_MALFORMED_SHARE = 0.01
"""Largest share of malformed rows to skip with a warning. A file with more is damaged or has another format."""

_LEAF = re.compile(r"\(\d+ ([^ ()]+)\)")
_INNER_NODE = re.compile(r"\(\d+ \0(?: \0)*\)")  # Each child was replaced by a null character.
_PTB_ESCAPES = {"-LRB-": "(", "-RRB-": ")", r"\/": "/", r"\*": "*"}
_PTB_ESCAPE = re.compile("|".join(map(re.escape, _PTB_ESCAPES)))


@dataclass(frozen=True)
class RawSplit:
    """Columns of a split as they are in a file or another source, before they are validated."""

    source: str  # file or other origin, for error messages
    columns: Mapping[str, Sequence[Any]]  # values of each column by its name on the hub
    lines: Sequence[int] = ()  # line number of each row, for error messages; empty if unknown

    def location(self, row: int) -> str:
        """Return the source and the line or row number of a row, counted from 1, for error messages."""
        return f"{self.source}, line {self.lines[row]}" if self.lines else f"{self.source}, row {row + 1}"


def select_columns(table: Table, spec: TaskSpec, split: str, renamed: Mapping[str, str] | None = None) -> RawSplit:
    """Select the columns that a split needs, and skip a few rows with a wrong number of fields with a warning.

    Test sets must be complete, because a submission must have a prediction for each row. They need no labels. `renamed`
    maps names on the hub to names in the table, where they differ. Raises a `UserError` if a column is missing, or too
    many rows are malformed.
    """
    if not table.columns:
        return RawSplit(table.source, {})
    ids = ("id",) if spec.kind == "span" else ()
    names = {name: (renamed or {}).get(name, name) for name in (*ids, *spec.text_columns, spec.label_column)}
    if spec.is_test(split) and names[spec.label_column] not in table.columns:
        del names[spec.label_column]
    for name in names.values():
        if name not in table.columns:
            found = ", ".join(map(repr, table.columns))
            raise UserError(
                f"{table.source}: column {name!r}, which task {spec.name} needs, is missing; found: {found}"
            )
    rows, numbers, malformed_numbers = [], [], []
    for number, values in table.read_rows(list(names.values())):
        if values is None:
            malformed_numbers.append(number)
        else:
            rows.append(values)
            numbers.append(number)
    if malformed_numbers:
        num_rows = len(rows) + len(malformed_numbers)
        problem = (
            f"{len(malformed_numbers)} of {num_rows} rows do not have {len(table.columns)} fields, the first on line "
            f"{malformed_numbers[0]}"
        )
        max_share = 0.0 if spec.is_test(split) else MAX_MALFORMED_SHARE
        if len(malformed_numbers) > max_share * num_rows:
            raise UserError(
                f"{table.source}: {problem}; at most {max_share:.0%} of the rows of this split may be malformed"
            )
        _log.warning("%s: %s; these rows are skipped", table.source, problem)
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}
    return RawSplit(table.source, columns, numbers if table.unit == "line" else ())


def read_table(path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a table with the hub's column names."""
    if spec.files == "squad" and path.suffix == ".json" and re.match(r'\s*\{\s*"(data|version)"', read_text(path)):
        raise UserError(f"{path}: SQuAD's own JSON was expected as train-v1.1.json and dev-v1.1.json; rename the files")
    return select_columns(READERS[path.suffix](path), spec, split)


def read_saved_split(state_path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a split of a folder that `DatasetDict.save_to_disk` wrote, given the path of its `state.json`."""
    return select_columns(make_table(open_saved_dataset(state_path.parent), str(state_path.parent)), spec, split)


def read_glue(path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a TSV file of the GLUE benchmark. Quotes, `NA` and `null` in it are plain text."""
    table = read_tsv(path, () if spec.is_test(split) else spec.tsv_header)
    return select_columns(table, spec, split, spec.tsv_columns)


def read_trees(path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a file with one Penn Treebank tree per line. The leaves form a sentence, and the root has its label."""
    labels, sentences, lines = [], [], []
    for line, text in numbered_lines(path):
        try:
            label, sentence = parse_tree(text)
        except ValueError as error:
            raise UserError(f"{path}, line {line}: malformed tree: {error}") from error
        labels.append(label)
        sentences.append(sentence)
        lines.append(line)
    return RawSplit(str(path), {spec.text_columns[0]: sentences, spec.label_column: labels}, lines)


def parse_tree(text: str) -> tuple[str, str]:
    """Return the root's label and the sentence of a Penn Treebank tree with a label at every node.

    Raises:
        ValueError: if brackets are unbalanced, a node lacks a label or content, or text follows the tree.

    >>> parse_tree("(3 (2 Good) (2 -LRB-))")
    ('3', 'Good (')
    """
    words = _LEAF.findall(text)
    rest, num_nodes = _LEAF.subn("\0", text)
    while num_nodes:
        rest, num_nodes = _INNER_NODE.subn("\0", rest)
    if rest != "\0":
        raise ValueError("expected nested brackets, as in (3 (2 Good) (2 film))")
    label = text[1 : text.index(" ")]
    return label, _PTB_ESCAPE.sub(lambda match: _PTB_ESCAPES[match[0]], " ".join(words))


def read_squad(path: Path, spec: TaskSpec, split: str) -> RawSplit:
    """Read a JSON file of SQuAD v1.1, which nests questions in paragraphs in articles, into one row per question."""
    document = parse_json(read_text(path), str(path))
    try:
        rows = list(_iterate_questions(document))
    except (KeyError, TypeError) as error:
        detail = f"key {error} is missing" if isinstance(error, KeyError) else f"unexpected structure: {error}"
        raise UserError(f"{path}: not SQuAD v1.1: {detail}; data > paragraphs > context, qas was expected") from error
    for row in rows:
        if row.pop("is_impossible"):
            raise UserError(f"{path}, question {row['id']!r}: is_impossible is true, as in SQuAD v2; v1.1 is needed")
    columns = ("id", *spec.text_columns, spec.label_column)
    return RawSplit(str(path), {column: [row[column] for row in rows] for column in columns})


def _iterate_questions(document: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each question; `is_impossible` is true only for unanswerable questions of SQuAD v2."""
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = question["answers"]
                yield {
                    "id": question["id"],
                    "question": question["question"],
                    "context": paragraph["context"],
                    "answers": {key: [answer[key] for answer in answers] for key in ("text", "answer_start")},
                    "is_impossible": question.get("is_impossible", False),
                }
