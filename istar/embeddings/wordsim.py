"""Word similarity: the correlation between similarities of word embeddings and human ratings.

Follows section 5.2 of *Too Much in Common* (Biś et al., 2021), on SimLex-999 (Hill et al., 2015), MEN (Bruni et al.,
2014), both parts of WordSim-353 (Agirre et al., 2009) and Stanford Rare Words (Luong et al., 2013). The files are read
in their authors' formats, and other word pairs in a file of one of these formats.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from istar.errors import UserError, shorten
from istar.measures.numerics import unit_vectors
from istar.statistics.arguments import is_constant
from istar.texts.readers import find_suffix, iterate_csv, numbered_lines
from istar.texts.tokenizing import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Policy = Literal["single_token", "mean"]
"""Treatment of words of several tokens; see `word_vectors`."""


class Pair(NamedTuple):
    """Two words and their similarity as rated by people, on the benchmark's scale."""

    first: str
    second: str
    rating: float


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of rated word pairs, in the file's order."""

    name: str  # simlex999, men, rw, wordsim_similarity or wordsim_relatedness; else a label or the name of the file
    pairs: tuple[Pair, ...]

    def words(self) -> tuple[str, ...]:
        """Return each word once, in the file's order."""
        return tuple(dict.fromkeys(word for pair in self.pairs for word in (pair.first, pair.second)))


class WordSimilarity(NamedTuple):
    """Correlations in [-1, 1] of a benchmark's ratings with the similarities of word vectors; papers print 100 r.

    A correlation is NaN if either side is constant. The cosine with a zero vector is 0.
    """

    kept: int  # number of correlated pairs: both words have vectors
    cosine_pearson: float
    cosine_spearman: float
    inner_product_pearson: float
    inner_product_spearman: float
    note: str  # why correlations are undefined; empty if they are defined


class _Format(NamedTuple):
    pattern: str  # pattern of a line; its groups are the two words, the rating and any individual ratings
    example_line: str  # a line, for error messages
    name_by_count: Mapping[int, str]  # the paper's benchmarks in this format, by number of pairs
    rating_column: int = 2


_WORDS = r"([^\t]+)\t([^\t]+)\t"
_NUMBER = r"\d{1,3}(?:\.\d*)?"
"""Pattern of a rating. No scale reaches 1000, and years are not ratings."""
_RATING_NAME = re.compile(r"sim(?!assoc)|relat|score|rat|mean|human|gold|av|judg", re.IGNORECASE)
"""Beginnings of the names of columns with ratings, in headers."""
FORMATS = {
    "simlex": _Format(
        rf"{_WORDS}[ANV]\t({_NUMBER})(?:\t[^\t\d][^\t]*|(?:\t{_NUMBER}){{6}})?",
        "old TAB new TAB A TAB 1.58",
        {999: "simlex999"},
        rating_column=3,
    ),
    "men": _Format(rf"([^\t ]+) ([^\t ]+) ({_NUMBER})", "sun-n sunlight-n 50.0", {3000: "men"}),
    "wordsim": _Format(
        rf"{_WORDS}({_NUMBER})", "tiger TAB cat TAB 7.35", {203: "wordsim_similarity", 252: "wordsim_relatedness"}
    ),
    "rw": _Format(rf"{_WORDS}({_NUMBER})((?:\t(?:{_NUMBER})?)+)", "undated TAB old TAB 5.83 TAB 7 TAB 4", {2034: "rw"}),
}
"""File formats by name, tried in this order on the first line of a file."""


def read_benchmark(path: Path, label: str = "") -> Benchmark:
    """Read word pairs and their ratings by people, of a known benchmark or of any other file in one of its formats.

    - simlex: tab-separated, the word class in column 3, the rating in column 4; a text or SimLex's columns may follow.
    - men: space-separated, the rating last; words or lemmas (`sun-n`); the word class is dropped.
    - wordsim: three tab-separated columns, the rating last.
    - rw: tab-separated, the mean rating in column 3, followed by the individual ratings.

    The first line determines the format. Empty lines, headers that begin with `word1` or `Word 1`, and comments after
    `#` are skipped. The columns of a `.csv` file are separated as in `iterate_csv`. Format and number of pairs name a
    benchmark of the paper, and any other file has its own name; `label` replaces both. Raises a `UserError` if the file
    cannot be read, its format is unknown, or a line is malformed.
    """
    records = numbered_lines(path)
    if find_suffix(path) == ".csv":
        records = ((number, "\t".join(fields)) for number, fields in iterate_csv(path))
    is_header = re.compile(r"word[ _]?1(?!\d)", re.IGNORECASE).match
    kept = [(number, line.rstrip()) for number, line in records if not re.match(r"\s*$|#", line)]
    headers = [record for record in kept if is_header(record[1])]
    lines = [record for record in kept if not is_header(record[1])]
    if not lines:
        raise UserError(f"{path}: the file is empty, or no lines follow the header; expected word pairs with ratings")
    formats = [name for name, line_format in FORMATS.items() if _parse_line(lines[0][1], line_format)] or list(FORMATS)
    pairs: list[Pair] = []
    for line_number, line in lines:
        pair = _parse_line(line, FORMATS[formats[0]])
        if pair is None:
            examples = "; ".join(f"{name}: {FORMATS[name].example_line}" for name in formats)
            raise UserError(
                f"{path}, line {line_number}: {shorten(line, 60)!r} is not a line of {' or '.join(formats)}; "
                f"expected two words and a rating below 1000, as in {examples}; a header begins with word1"
            )
        pairs.append(pair)
    for line_number, header in headers:
        _check_header(f"{path}, line {line_number}", header, FORMATS[formats[0]].rating_column)
    if formats[0] == "men":
        pairs = _strip_word_classes(pairs)
    return Benchmark(_name_pairs(path, label, len(pairs), FORMATS[formats[0]]), tuple(pairs))


def _check_header(location: str, header: str, rating_column: int) -> None:
    columns = header.split("\t" if "\t" in header else None)
    names = [re.sub(r"[\W_]", "", column) for column in columns[rating_column : rating_column + 1]]
    if not all(map(_RATING_NAME.match, names)):
        raise UserError(
            f"{location}: the rating is read from column {rating_column + 1}, {columns[rating_column]!r}; expected a "
            "name such as score, rating, mean, similarity or SimLex999, or no header"
        )


def _name_pairs(path: Path, label: str, num_pairs: int, line_format: _Format) -> str:
    """Return a benchmark's name, which `label` may write differently, or a name that no benchmark of the paper has."""
    names = [name for known_format in FORMATS.values() for name in known_format.name_by_count.values()]
    letters = "".join(filter(str.isalnum, (label or path.name).lower()))
    known_name = {name.replace("_", ""): name for name in names}.get(letters)
    if label:
        return known_name or label
    return line_format.name_by_count.get(num_pairs, f"{path.name} ({num_pairs} pairs)" if known_name else path.name)


def _parse_line(line: str, line_format: _Format) -> Pair | None:
    """Return the pair in a line; None if the line has another format, or a mean outside of the individual ratings."""
    match = re.fullmatch(line_format.pattern, line)
    if match is None:
        return None
    rating = float(match[3])
    ratings = [float(text) for text in match[match.re.groups].split()]
    return Pair(match[1].strip(), match[2].strip(), rating) if min(ratings) <= rating <= max(ratings) else None


def _strip_word_classes(pairs: list[Pair]) -> list[Pair]:
    """Return MEN's pairs without word classes (`-n`, `-v`, `-j`), or unchanged if some word lacks one."""
    if not all(re.fullmatch(r".+-[nvj]", word) for pair in pairs for word in (pair.first, pair.second)):
        return pairs
    return [Pair(pair.first[:-2], pair.second[:-2], pair.rating) for pair in pairs]


def word_vectors(
    words: Sequence[str], tokenizer: "PreTrainedTokenizerBase", embeddings: Tensor, policy: Policy = "single_token"
) -> dict[str, Tensor]:
    """Look up the vectors of words in an embedding matrix, tokenizing each word as it appears inside a sentence.

    Byte-level BPE and SentencePiece tokenize a word after a space differently from the first word of a text. Each word
    is therefore tokenized after another word, and that word's tokens are dropped. Letter case is left to the tokenizer.

    Args:
        words: words to look up.
        tokenizer: any tokenizer of transformers; special tokens are not added.
        embeddings: `(rows, d)`, one row per token id, of any floating dtype.
        policy: "single_token", as in the paper, leaves out words of several tokens. "mean" gives them the mean of their
            tokens' rows. Words with an unknown token are left out under either policy.

    Returns:
        The vectors `(d,)` of the words that have one, float64.
    """
    vectors = {}
    for word, token_ids in zip(words, _tokenize_words(words, tokenizer), strict=True):
        if not token_ids or tokenizer.unk_token_id in token_ids or (policy == "single_token" and len(token_ids) > 1):
            continue
        vectors[word] = embeddings[token_ids].detach().double().mean(0)
    return vectors


def _tokenize_words(words: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    context = "the"
    texts = [context, *(f"{context} {word}" for word in words)]
    context_ids, *ids_by_text = tokenize(texts, tokenizer)
    for word, token_ids in zip(words, ids_by_text, strict=True):
        if token_ids[: len(context_ids)] != context_ids:
            raise UserError(f"the tokenizer joins {context!r} and {word!r}; expected a tokenizer that splits at spaces")
    return [token_ids[len(context_ids) :] for token_ids in ids_by_text]


def measure_similarity(vectors: Mapping[str, Tensor], benchmark: Benchmark) -> WordSimilarity:
    """Correlate a benchmark's ratings with the cosines and inner products of the words' vectors.

    `vectors` is the result of `word_vectors`; pairs with a missing word are left out. Results of different policies are
    not comparable, because they keep different pairs. Raises a `UserError` if fewer than 2 pairs have vectors for both
    words.
    """
    pairs = [pair for pair in benchmark.pairs if pair.first in vectors and pair.second in vectors]
    if len(pairs) < 2:
        raise UserError(
            f"{benchmark.name}: {len(pairs)} of {len(benchmark.pairs)} pairs have vectors for both words; a "
            "correlation needs at least 2"
        )
    ratings = np.array([pair.rating for pair in pairs])
    first_vectors = torch.stack([vectors[pair.first] for pair in pairs])
    second_vectors = torch.stack([vectors[pair.second] for pair in pairs])
    cosines = (unit_vectors(first_vectors)[0] * unit_vectors(second_vectors)[0]).sum(1)
    correlations: dict[str, float] = {}
    notes = []
    for name, scores in (("cosine", cosines), ("inner_product", (first_vectors * second_vectors).sum(1))):
        values = scores.cpu().numpy()
        constant = [side for side, numbers in (("score", values), ("rating", ratings)) if is_constant(numbers)]
        notes += [f"{name.replace('_', ' ')}: the {side} is constant" for side in constant[:1]]
        for method, function in (("pearson", scipy.stats.pearsonr), ("spearman", scipy.stats.spearmanr)):
            correlation = math.nan if constant else float(function(values, ratings).statistic)
            correlations[f"{name}_{method}"] = correlation
    return WordSimilarity(len(pairs), **correlations, note="; ".join(notes))
