"""Word similarity: the correlation between similarities of word embeddings and human ratings.

Follows section 5.2 of *Too Much in Common* (Biś et al., 2021), on SimLex-999 (Hill et al., 2015), MEN (Bruni et al.,
2014), both parts of WordSim-353 (Agirre et al., 2009) and Stanford Rare Words (Luong et al., 2013). The files are read
in the formats in which their authors distribute them.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from istar.errors import UserError, shorten
from istar.measures.input_checks import accumulation_dtype, check_matrix, unit_vectors
from istar.statistics.arguments import is_constant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Policy = Literal["single_token", "mean"]
"""Treatment of words of several tokens; see `word_vectors`."""


@dataclass(frozen=True)
class Pair:
    """Two words and their similarity as rated by people, on the benchmark's scale."""

    first: str
    second: str
    rating: float


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of rated word pairs, in the file's order."""

    name: str  # simlex999, men, rw, wordsim_similarity, wordsim_relatedness, or wordsim353 if the part is unknown
    pairs: tuple[Pair, ...]

    def words(self) -> tuple[str, ...]:
        """Return each word once, in the file's order."""
        return tuple(dict.fromkeys(word for pair in self.pairs for word in (pair.first, pair.second)))


@dataclass(frozen=True)
class WordVectors:
    """Vectors of words; a word without a vector is absent."""

    vectors: Mapping[str, Tensor]  # vectors `(d,)` by word, float64 (float32 on MPS), on the embeddings' device
    policy: Policy  # treatment of words of several tokens; see `word_vectors`


@dataclass(frozen=True)
class Correlation:
    """Pearson's and Spearman's correlations in [-1, 1]; NaN if either side is constant. Papers print 100 r."""

    pearson: float
    spearman: float
    note: str = ""  # why the correlations are undefined; empty if they are defined


@dataclass(frozen=True)
class WordSimilarity:
    """Agreement of an embedding matrix with a benchmark.

    Policies keep different pairs, so results of different policies are not comparable.
    """

    benchmark: str  # name of the benchmark
    policy: Policy  # policy of the word vectors
    cosine: Correlation  # of the ratings with the cosines of the vectors; the cosine with a zero vector is 0
    inner_product: Correlation  # of the ratings with the inner products of the vectors
    kept: tuple[Pair, ...]  # pairs that were correlated
    left_out: tuple[Pair, ...]  # pairs that have a word without a vector


@dataclass(frozen=True)
class _Format:
    """The line format of a benchmark."""

    separator: str  # separator of the columns
    rating_column: int  # index of the rating's column
    column_range: tuple[int, int]  # smallest and largest number of columns
    max_rating: float  # largest rating; the smallest is 0
    example_line: str  # a line, for error messages
    header: str = ""  # start of the header line; empty if the format has none
    third_column: str = ".*"  # pattern that the third column of the first line matches


FORMATS = {
    "simlex999": _Format(
        "\t",
        rating_column=3,
        column_range=(4, 10),
        max_rating=10,
        example_line="old TAB new TAB A TAB 1.58",
        header="word1\tword2\tPOS",
        third_column="[ANV]",
    ),
    "men": _Format(" ", rating_column=2, column_range=(3, 3), max_rating=50, example_line="sun-n sunlight-n 50.0"),
    "wordsim353": _Format(
        "\t",
        rating_column=2,
        column_range=(3, 3),
        max_rating=10,
        example_line="tiger TAB cat TAB 7.35",
        header="Word 1\t",
    ),
    "rw": _Format(
        "\t",
        rating_column=2,
        column_range=(4, 13),
        max_rating=10,
        example_line="squishing TAB squirt TAB 5.88 TAB 7 TAB 7",
    ),
}
"""Known file formats by name, in the order in which they are tried on the first line of a file."""


def read_benchmark(path: str | Path, format: str | None = None) -> Benchmark:
    """Read the word pairs and ratings of a word similarity benchmark from a file in its authors' format.

    - simlex999: tab-separated, the word class in column 3, the rating (0 to 10) in column 4; with or without header.
    - men: space-separated, the rating (0 to 50) last; words or lemmas (`sun-n`), whose word class is dropped.
    - wordsim353: three tab-separated columns, the rating (0 to 10) last; with or without header.
    - rw: tab-separated, the mean rating (0 to 10) in column 3, followed by the individual ratings.

    The format is by default the one that matches the first line. The file is UTF-8; empty lines are skipped.

    Raises:
        UserError: if the file cannot be read, its format is unknown, or a line is malformed.
    """
    path = Path(path)
    lines = list(_read_lines(path))
    if not lines:
        raise UserError(f"{path}: the file is empty; expected pairs of words with ratings")
    if format is None:
        format = _detect_format(path, lines)
    elif format not in FORMATS:
        raise UserError(f"format is {format!r}; expected one of {', '.join(FORMATS)}")
    line_format = FORMATS[format]
    if line_format.header and lines[0][1].startswith(line_format.header):
        lines = lines[1:]
    pairs = tuple(_parse_pair(path, line_number, line, line_format) for line_number, line in lines)
    if not pairs:
        raise UserError(f"{path}: no lines follow the header; expected pairs of words with ratings")
    if format == "men":
        pairs = _strip_word_classes(pairs)
    # Only the file's name tells the two parts of WordSim-353 apart.
    for part in ("similarity", "relatedness"):
        if format == "wordsim353" and part in path.name.lower():
            return Benchmark(f"wordsim_{part}", pairs)
    return Benchmark(format, pairs)


def word_vectors(
    words: Sequence[str], tokenizer: "PreTrainedTokenizerBase", embeddings: Tensor, policy: Policy = "single_token"
) -> WordVectors:
    """Look up the vectors of words in an embedding matrix, tokenizing each word as it appears inside a sentence.

    Byte-level BPE and SentencePiece tokenize a word after a space differently from the first word of a text. Each word
    is therefore tokenized after another word, whose tokens are then dropped. Letter case is left to the tokenizer.

    Args:
        words: words to look up.
        tokenizer: any tokenizer of transformers; special tokens are not added.
        embeddings: `(rows, d)`, one row per token id, of any floating dtype and on any device.
        policy: "single_token", as in the paper, leaves out words of several tokens. "mean" gives them the mean of their
            tokens' rows. A word with an unknown token has no vector under either policy.

    Returns:
        The vectors of the words that have one.

    Raises:
        UserError: if the policy is unknown, or the embeddings are not a finite matrix with a row for each token.
    """
    if policy not in get_args(Policy):
        raise UserError(f"policy is {policy!r}; expected one of {', '.join(get_args(Policy))}")
    check_matrix(embeddings, "embeddings")
    vectors = {}
    for word, token_ids in zip(words, _tokenize_words(words, tokenizer), strict=True):
        if not token_ids or tokenizer.unk_token_id in token_ids or (policy == "single_token" and len(token_ids) > 1):
            continue
        if max(token_ids) >= len(embeddings):
            raise UserError(
                f"the embeddings have {len(embeddings)} rows, but {word!r} has the token {max(token_ids)}; "
                "expected the tokenizer of the same model"
            )
        token_vectors = embeddings[token_ids].detach()
        vectors[word] = token_vectors.to(accumulation_dtype(token_vectors.device)).mean(0)
    return WordVectors(vectors, policy)


def similarity(vectors: WordVectors, benchmark: Benchmark) -> WordSimilarity:
    """Correlate a benchmark's ratings with the cosines and inner products of the words' vectors.

    Raises:
        UserError: if fewer than 2 pairs have vectors for both words.
    """
    vector_by_word = vectors.vectors
    has_vectors = [pair.first in vector_by_word and pair.second in vector_by_word for pair in benchmark.pairs]
    kept_pairs = tuple(pair for pair, has_both in zip(benchmark.pairs, has_vectors, strict=True) if has_both)
    left_out_pairs = tuple(pair for pair, has_both in zip(benchmark.pairs, has_vectors, strict=True) if not has_both)
    if len(kept_pairs) < 2:
        raise UserError(
            f"{benchmark.name}: {len(kept_pairs)} of {len(benchmark.pairs)} pairs have vectors for both words "
            f"(policy {vectors.policy}); a correlation needs at least 2"
        )
    first_vectors = torch.stack([vector_by_word[pair.first] for pair in kept_pairs])
    second_vectors = torch.stack([vector_by_word[pair.second] for pair in kept_pairs])
    ratings = np.array([pair.rating for pair in kept_pairs])
    cosines = (unit_vectors(first_vectors)[0] * unit_vectors(second_vectors)[0]).sum(1)
    return WordSimilarity(
        benchmark.name,
        vectors.policy,
        cosine=_correlate(cosines, ratings),
        inner_product=_correlate((first_vectors * second_vectors).sum(1), ratings),
        kept=kept_pairs,
        left_out=left_out_pairs,
    )


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each non-empty line of a file.

    Raises:
        UserError: if the file cannot be read or is not UTF-8.
    """
    try:
        # Split at "\n" below: `str.splitlines` also splits at other control characters.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected a word-similarity benchmark") from error
    except UnicodeDecodeError as error:
        line_number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line_number}: not UTF-8; convert the file") from error
    if "\0" in text:  # as in UTF-16 without a byte order mark
        raise UserError(f"{path}: not UTF-8 text: it holds null bytes; convert the file")
    for line_number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield line_number, line.rstrip()


def _detect_format(path: Path, lines: Sequence[tuple[int, str]]) -> str:
    """Return the name of the first known format that fits the first line of a file.

    Raises:
        UserError: if no format fits.
    """
    line_number, first_line = lines[0]
    for name, line_format in FORMATS.items():
        columns = first_line.split(line_format.separator)
        min_columns, max_columns = line_format.column_range
        if line_format.header and first_line.startswith(line_format.header):
            return name
        if (
            min_columns <= len(columns) <= max_columns
            and math.isfinite(_parse_number(columns[line_format.rating_column]))
            and re.fullmatch(line_format.third_column, columns[2])
        ):
            return name
    examples = "; ".join(f"{name}: {line_format.example_line}" for name, line_format in FORMATS.items())
    raise UserError(
        f"{path}, line {line_number}: {shorten(first_line, 60)!r} is not a line of a known benchmark; expected one of "
        f"{examples}"
    )


def _parse_pair(path: Path, line_number: int, line: str, line_format: _Format) -> Pair:
    """Parse a line of a benchmark into two words and their rating.

    Raises:
        UserError: if the line does not have the format, or the rating is out of range.
    """
    location = f"{path}, line {line_number}"
    columns = line.split(line_format.separator)
    min_columns, max_columns = line_format.column_range
    if not min_columns <= len(columns) <= max_columns:
        expected = str(min_columns) if min_columns == max_columns else f"{min_columns} to {max_columns}"
        raise UserError(
            f"{location}: {shorten(line, 60)!r} has {len(columns)} columns; expected {expected}: "
            f"{line_format.example_line}"
        )
    first, second, rating = columns[0].strip(), columns[1].strip(), columns[line_format.rating_column]
    if not 0 <= _parse_number(rating) <= line_format.max_rating:
        raise UserError(
            f"{location}: the rating is {shorten(rating, 60)!r}; expected a number from 0 to {line_format.max_rating:g}"
        )
    if not first or not second:
        raise UserError(f"{location}: a word is empty; expected two words and a rating: {line_format.example_line}")
    return Pair(first, second, _parse_number(rating))


def _parse_number(text: str) -> float:
    """Return the number that a text states, or NaN if it states none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _strip_word_classes(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Return the pairs of MEN without word classes (`-n`, `-v`, `-j`), or unchanged if some word has none."""
    stripped_pairs = []
    for pair in pairs:
        first_match, second_match = (re.fullmatch(r"(.+)-[nvj]", word) for word in (pair.first, pair.second))
        if first_match is None or second_match is None:
            return pairs
        stripped_pairs.append(Pair(first_match[1], second_match[1], pair.rating))
    return tuple(stripped_pairs)


def _tokenize_words(words: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Return the token ids of each word as it is tokenized after another word.

    Raises:
        UserError: if the tokenizer joins the two words.
    """
    context = "the"
    texts = [context, *(f"{context} {word}" for word in words)]
    context_ids, *ids_by_text = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    for word, token_ids in zip(words, ids_by_text, strict=True):
        if token_ids[: len(context_ids)] != context_ids:
            raise UserError(f"the tokenizer joins {context!r} and {word!r}; expected a tokenizer that splits at spaces")
    return [token_ids[len(context_ids) :] for token_ids in ids_by_text]


def _correlate(scores: Tensor, ratings: np.ndarray) -> Correlation:
    """Return Pearson's and Spearman's correlations of scores with ratings; NaN if either are constant."""
    score_values = scores.cpu().double().numpy()
    for name, values in (("score", score_values), ("rating", ratings)):
        if is_constant(values):
            return Correlation(math.nan, math.nan, note=f"the {name} is constant")
    return Correlation(
        pearson=float(scipy.stats.pearsonr(score_values, ratings).statistic),
        spearman=float(scipy.stats.spearmanr(score_values, ratings).statistic),
    )
