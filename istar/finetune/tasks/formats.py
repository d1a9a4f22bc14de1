"""Readers of SST-5's Penn Treebank trees and of SQuAD's JSON."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from istar.errors import UserError, shorten
from istar.files.parsing import parse_json
from istar.inputs.readers import RawSplit, numbered_lines, read_text
from istar.records.task_specs import TaskSpec

_TREE_TOKEN = re.compile(r"\(\d+(?= )|[()]|[^ ()]+")
_PTB_ESCAPES = {"-LRB-": "(", "-RRB-": ")", r"\/": "/", r"\*": "*"}
_PTB_ESCAPE = re.compile("|".join(map(re.escape, _PTB_ESCAPES)))


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
        ValueError: if the brackets are unbalanced, a node has no label or no content, or text follows the tree.

    >>> parse_tree("(3 (2 Good) (2 -LRB-))")
    ('3', 'Good (')
    """
    tokens = _TREE_TOKEN.findall(text)
    leaves: list[str] = []
    open_nodes: list[str] = []  # content of each open node so far: "", "word" or "nodes"
    for position, token in enumerate(tokens):
        if position and not open_nodes:
            raise ValueError(f"{shorten(token)} follows the end of the tree")
        if token == "(":
            raise ValueError("a node has no label")
        if token == ")":
            if not open_nodes or not open_nodes.pop():
                raise ValueError("a node is empty")
            continue
        content = "nodes" if token[0] == "(" else "word"
        if open_nodes:
            if open_nodes[-1] and "word" in (open_nodes[-1], content):
                raise ValueError(f"{shorten(token)} is in a node that already has a word or other nodes")
            open_nodes[-1] = content
        if content == "nodes":
            open_nodes.append("")
        else:
            leaves.append(token)
    if open_nodes or not leaves or tokens[0][0] != "(":
        raise ValueError("a bracket is not closed" if open_nodes else "the text is not in brackets")
    return tokens[0][1:], _PTB_ESCAPE.sub(lambda match: _PTB_ESCAPES[match[0]], " ".join(leaves))


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
            raise UserError(f"{path}, question {row['id']!r}: has 'is_impossible', so this is SQuAD v2; v1.1 is needed")
    columns = ("id", *spec.text_columns, spec.label_column)
    return RawSplit(str(path), {column: [row[column] for row in rows] for column in columns})


def _iterate_questions(document: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for each question, with `is_impossible`: whether it has this key, which only SQuAD v2 has."""
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = question["answers"]
                yield {
                    "id": question["id"],
                    "question": question["question"],
                    "context": paragraph["context"],
                    "answers": {key: [answer[key] for answer in answers] for key in ("text", "answer_start")},
                    "is_impossible": "is_impossible" in question,
                }
