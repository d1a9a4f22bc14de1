"""Readers of two benchmarks' own formats: Penn-Treebank trees of sentiments, and SQuAD's JSON."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from istar.errors import UserError, shorten
from istar.tasks.readers import Rows, numbered_lines, parse_json, whole_text
from istar.tasks.specs import TaskSpec

_TREE_TOKEN = re.compile(r"\(\d+(?= )|[()]|[^ ()]+")
_PTB_ESCAPES = {"-LRB-": "(", "-RRB-": ")", r"\/": "/", r"\*": "*"}
_PTB_ESCAPE = re.compile("|".join(map(re.escape, _PTB_ESCAPES)))


def read_trees(path: Path, spec: TaskSpec, split: str) -> Rows:
    """Penn-Treebank brackets with a label at every node: the root's label and the leaves as a sentence."""
    labels, sentences, lines = [], [], []
    for line, text in numbered_lines(path):
        try:
            label, sentence = parse_tree(text)
        except ValueError as error:
            raise UserError(f"{path}, line {line}: malformed tree: {error}") from error
        labels.append(label)
        sentences.append(sentence)
        lines.append(line)
    return Rows(str(path), {spec.text_columns[0]: sentences, spec.label_column: labels}, lines)


def parse_tree(text: str) -> tuple[str, str]:
    """The root's label and the sentence of one tree: `(3 (2 Good) (2 -LRB-))` is `3`, `Good (`.

    Raises:
        ValueError: brackets out of balance, a node without a label or content, or something behind the tree.
    """
    tokens = _TREE_TOKEN.findall(text)
    leaves: list[str] = []
    open_nodes: list[str] = []  # what each holds so far: nothing, a word or nodes
    for position, token in enumerate(tokens):
        if position and not open_nodes:
            raise ValueError(f"{shorten(token)} does not belong to it")
        if token == "(":
            raise ValueError("a node has no label")
        if token == ")":
            if not open_nodes or not open_nodes.pop():
                raise ValueError("a node is empty")
            continue
        content = "nodes" if token[0] == "(" else "word"
        if open_nodes:
            if open_nodes[-1] and "word" in (open_nodes[-1], content):
                raise ValueError(f"{shorten(token)} stands beside another word or node")
            open_nodes[-1] = content
        if content == "nodes":
            open_nodes.append("")
        else:
            leaves.append(token)
    if open_nodes or not leaves or tokens[0][0] != "(":
        raise ValueError("a bracket is not closed" if open_nodes else "not in brackets")
    return tokens[0][1:], _PTB_ESCAPE.sub(lambda found: _PTB_ESCAPES[found[0]], " ".join(leaves))


def read_squad(path: Path, spec: TaskSpec, split: str) -> Rows:
    """SQuAD's own JSON, version 1.1: articles of paragraphs of questions, one row a question."""
    document = parse_json(whole_text(path), str(path))
    try:
        rows = list(_questions(document))
    except (KeyError, TypeError) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else f"unexpected structure: {error}"
        raise UserError(f"{path}: not SQuAD v1.1: {what}; data > paragraphs > context, qas was expected") from error
    for row in rows:
        if row.pop("is_impossible"):
            raise UserError(f"{path}, question {row['id']!r}: has 'is_impossible', so this is SQuAD v2; v1.1 is needed")
    columns = ("id", *spec.text_columns, spec.label_column)
    return Rows(str(path), {column: [row[column] for row in rows] for column in columns})


def _questions(document: Any) -> Iterator[dict[str, Any]]:
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
