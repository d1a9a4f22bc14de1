"""Word similarity: how well a matrix of embeddings orders pairs of words as people do.

*Too Much in Common* (Bis et al., 2021), section 5.2: the correlation of cosine or inner product with human ratings, on
SimLex-999 (Hill et al., 2015), MEN (Bruni et al., 2014), WordSim-353 in two parts (Agirre et al., 2009) and Stanford
Rare Words (Luong et al., 2013). The files are read as their authors ship them.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from istar.errors import UserError, shorten
from istar.measures.rows import check_matrix, unit_vectors, wide_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Policy = Literal["single_token", "mean"]


@dataclass(frozen=True)
class Pair:
    """Two words and how similar people found them, on the benchmark's own scale."""

    first: str
    second: str
    rating: float


@dataclass(frozen=True)
class Benchmark:
    """A file of pairs.

    Attributes:
        name: simlex999, men, rw, wordsim_similarity, wordsim_relatedness, or wordsim353 where neither part is named.
        pairs: in the file's order.
    """

    name: str
    pairs: tuple[Pair, ...]

    def words(self) -> tuple[str, ...]:
        """Each word once, in the file's order."""
        return tuple(dict.fromkeys(word for pair in self.pairs for word in (pair.first, pair.second)))


@dataclass(frozen=True)
class WordVectors:
    """One vector per word that has one.

    Attributes:
        vectors: word -> `(d,)`, float64 (float32 on MPS), on the matrix's device.
        policy: how words became vectors; see `word_vectors`.
    """

    vectors: Mapping[str, Tensor]
    policy: Policy


@dataclass(frozen=True)
class Correlation:
    """In [-1, 1], 0 where either side is constant. The papers print Pearson's, times 100."""

    pearson: float
    spearman: float


@dataclass(frozen=True)
class WordSimilarity:
    """How one benchmark and one matrix agree.

    Attributes:
        benchmark: its name.
        policy: of the words' vectors; other policies keep other pairs and do not compare.
        cosine: correlation of the ratings with the vectors' cosine, 0 with a zero vector.
        inner_product: the same with their inner product.
        kept: the pairs that count.
        left_out: pairs of which a word has no vector.
    """

    benchmark: str
    policy: Policy
    cosine: Correlation
    inner_product: Correlation
    kept: tuple[Pair, ...]
    left_out: tuple[Pair, ...]


@dataclass(frozen=True)
class _Format:
    """How a benchmark's lines look.

    Attributes:
        separator: between columns.
        rating: column of the rating, from 0.
        columns: how many there are, at least and at most.
        scale: smallest and largest rating.
        header: what the first line starts with if it is one.
        fits: whether the first line without header is this format's, from its columns.
        example: a line, for messages.
    """

    separator: str
    rating: int
    columns: tuple[int, int]
    scale: tuple[float, float]
    header: str
    fits: Callable[[list[str]], bool]
    example: str


_LEMMA = re.compile(r"(.+)-[nvj]")
FORMATS = {
    "simlex999": _Format(
        separator="\t",
        rating=3,
        columns=(4, 10),
        scale=(0, 10),
        header="word1\tword2\tPOS",
        fits=lambda columns: columns[2] in ("A", "N", "V"),
        example="old TAB new TAB A TAB 1.58",
    ),
    "men": _Format(
        separator=" ",
        rating=2,
        columns=(3, 3),
        scale=(0, 50),
        header="",
        fits=lambda columns: True,
        example="sun-n sunlight-n 50.0",
    ),
    "wordsim353": _Format(
        separator="\t",
        rating=2,
        columns=(3, 3),
        scale=(0, 10),
        header="Word 1\t",
        fits=lambda columns: True,
        example="tiger TAB cat TAB 7.35",
    ),
    "rw": _Format(
        separator="\t",
        rating=2,
        columns=(4, 13),
        scale=(0, 10),
        header="",
        fits=lambda columns: all(math.isfinite(_number(column)) for column in columns[2:]),
        example="squishing TAB squirt TAB 5.88 TAB 7 TAB 7",
    ),
}
"""The benchmarks that are read, in the order in which their first line is tried."""


def read_benchmark(path: str | Path, format: str | None = None) -> Benchmark:
    """The pairs of a benchmark's file.

    - simlex999: tab-separated, the word class in column 3, the rating (0 to 10) in column 4; with or without header.
    - men: space-separated, the rating (0 to 50) last; words or lemmas (`sun-n`), whose class is dropped.
    - wordsim353: three columns by tabs, the rating (0 to 10) last; with or without header.
    - rw: tab-separated, the mean rating (0 to 10) in column 3, the single ratings behind it.

    Args:
        path: a text file in UTF-8, any line endings. Empty lines are skipped.
        format: one of these names; by default the one that the first line looks like.

    Raises:
        UserError: if there is no such file, it is none of these, or a line is malformed: with file and line.
    """
    path = Path(path)
    lines = list(_lines(path))
    if not lines:
        raise UserError(f"{path}: the file is empty; expected pairs of words with ratings")
    if format is None:
        format = _detect(path, lines)
    elif format not in FORMATS:
        raise UserError(f"format is {format!r}; expected one of {', '.join(FORMATS)}")
    known = FORMATS[format]
    if known.header and lines[0][1].startswith(known.header):
        lines = lines[1:]
    pairs = tuple(_pair(path, number, line, known) for number, line in lines)
    if not pairs:
        raise UserError(f"{path}: there is nothing below the header; expected pairs of words with ratings")
    if format == "men":
        pairs = _without_classes(pairs)
    return Benchmark(_name(path, format), pairs)


def word_vectors(
    words: Sequence[str], tokenizer: "PreTrainedTokenizerBase", embeddings: Tensor, policy: Policy = "single_token"
) -> WordVectors:
    """The vectors of words in an embedding matrix, as they stand inside a sentence.

    Byte-level BPE and SentencePiece have other tokens behind a space than at the beginning of a text. So each word is
    tokenized behind another one, whose tokens are then taken off. The case of the letters is left to the tokenizer.

    Args:
        words: what to look up.
        tokenizer: any of transformers; special tokens are not added.
        embeddings: `(rows, d)`, the row of each token id; any floating dtype and device.
        policy: "single_token", as in the paper: words of several tokens have no vector. "mean": theirs is the mean of
            the tokens' rows, so that other words count.

    Returns:
        Vectors of the words that have one; a word with an unknown token has none under either policy.

    Raises:
        UserError: if the matrix is not one, is not finite or lacks a token's row, or the policy is not one of these.
    """
    if policy not in get_args(Policy):
        raise UserError(f"policy is {policy!r}; expected one of {', '.join(get_args(Policy))}")
    check_matrix(embeddings, "embeddings")
    vectors = {}
    for word, tokens in zip(words, _tokens(words, tokenizer), strict=True):
        if not tokens or tokenizer.unk_token_id in tokens or (policy == "single_token" and len(tokens) > 1):
            continue
        if max(tokens) >= len(embeddings):
            raise UserError(
                f"the embeddings have {len(embeddings)} rows, but the tokenizer makes token {max(tokens)} of {word!r}; "
                "expected the tokenizer of their model"
            )
        rows = embeddings[tokens].detach()
        vectors[word] = rows.to(wide_dtype(rows.device)).mean(0)
    return WordVectors(vectors, policy)


def similarity(vectors: WordVectors, benchmark: Benchmark) -> WordSimilarity:
    """Correlations of a benchmark's ratings with the similarity of the words' vectors.

    Raises:
        UserError: if fewer than 2 pairs have vectors for both words.
    """
    found = vectors.vectors
    kept = tuple(pair for pair in benchmark.pairs if pair.first in found and pair.second in found)
    left_out = tuple(pair for pair in benchmark.pairs if pair.first not in found or pair.second not in found)
    if len(kept) < 2:
        raise UserError(
            f"{benchmark.name}: {len(kept)} of {len(benchmark.pairs)} pairs have vectors for both words "
            f"(policy {vectors.policy}); a correlation needs at least 2"
        )
    first = torch.stack([found[pair.first] for pair in kept])
    second = torch.stack([found[pair.second] for pair in kept])
    ratings = np.array([pair.rating for pair in kept])
    products = (first * second).sum(1)
    cosines = (unit_vectors(first)[0] * unit_vectors(second)[0]).sum(1)
    return WordSimilarity(
        benchmark.name,
        vectors.policy,
        cosine=_correlation(cosines, ratings),
        inner_product=_correlation(products, ratings),
        kept=kept,
        left_out=left_out,
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not empty."""
    try:
        # Not by `splitlines`, which also splits at characters that are no line ends.
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected a word-similarity benchmark") from error
    except UnicodeDecodeError as error:
        place = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {place}: not UTF-8; convert the file") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.rstrip()


def _detect(path: Path, lines: Sequence[tuple[int, str]]) -> str:
    number, first = lines[0]
    for name, known in FORMATS.items():
        if known.header and first.startswith(known.header):
            return name
        columns = first.split(known.separator)
        least, most = known.columns
        if least <= len(columns) <= most and math.isfinite(_number(columns[known.rating])) and known.fits(columns):
            return name
    examples = "; ".join(f"{name}: {known.example}" for name, known in FORMATS.items())
    raise UserError(
        f"{path}, line {number}: {shorten(first, 60)!r} is no line of a known benchmark; expected one of {examples}"
    )


def _pair(path: Path, number: int, line: str, known: _Format) -> Pair:
    place = f"{path}, line {number}"
    columns = line.split(known.separator)
    least, most = known.columns
    if not least <= len(columns) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise UserError(
            f"{place}: {shorten(line, 60)!r} has {len(columns)} columns; expected {wanted}: {known.example}"
        )
    low, high = known.scale
    rating = _number(columns[known.rating])
    if not low <= rating <= high:
        raise UserError(
            f"{place}: the rating is {shorten(columns[known.rating], 60)!r}; expected a number from {low:g} to {high:g}"
        )
    first, second = columns[0].strip(), columns[1].strip()
    if not first or not second:
        raise UserError(f"{place}: a word is empty; expected two words and a rating: {known.example}")
    return Pair(first, second, rating)


def _number(text: str) -> float:
    """NaN for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _without_classes(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """MEN's lemmas without `-n`, `-v`, `-j`; the natural forms, of which not all end so, as they are."""
    matches = [(_LEMMA.fullmatch(pair.first), _LEMMA.fullmatch(pair.second)) for pair in pairs]
    stripped = [
        Pair(first[1], second[1], pair.rating)
        for pair, (first, second) in zip(pairs, matches, strict=True)
        if first and second
    ]
    return tuple(stripped) if len(stripped) == len(pairs) else pairs


def _name(path: Path, format: str) -> str:
    """The two parts of WordSim-353 differ by nothing but what their files are called."""
    for part in ("similarity", "relatedness"):
        if format == "wordsim353" and part in path.name.lower():
            return f"wordsim_{part}"
    return format


def _tokens(words: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """The ids of each word behind another."""
    context = "the"
    texts = [context, *(f"{context} {word}" for word in words)]
    before, *ids = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    for word, tokens in zip(words, ids, strict=True):
        if tokens[: len(before)] != before:
            raise UserError(f"the tokenizer joins {context!r} and {word!r}; expected one that splits at spaces")
    return [tokens[len(before) :] for tokens in ids]


def _correlation(scores: Tensor, ratings: np.ndarray) -> Correlation:
    values = scores.cpu().double().numpy()
    # Scores that differ by rounding alone are constant, as scipy warns.
    spread = np.ptp(values) > 1e-12 * np.abs(values).max()
    if not spread or np.ptp(ratings) == 0:
        return Correlation(0.0, 0.0)
    return Correlation(
        float(scipy.stats.pearsonr(values, ratings).statistic), float(scipy.stats.spearmanr(values, ratings).statistic)
    )
