"""Word similarity: the correlation between similarities of word embeddings and human ratings.

Follows section 5.2 of *Too Much in Common* (Biś et al., 2021), on SimLex-999 (Hill et al., 2015), MEN (Bruni et al.,
2014), both parts of WordSim-353 (Agirre et al., 2009) and Stanford Rare Words (Luong et al., 2013). The files are read
in their authors' formats.
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
from istar.inputs.readers import numbered_lines
from istar.inputs.tokenizing import convert_tokenizer_errors
from istar.measures.numerics import unit_vectors
from istar.statistics.arguments import is_constant

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

    name: str  # simlex999, men, rw, wordsim_similarity, wordsim_relatedness, or wordsim353 if the part is unknown
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
    pattern: str  # pattern of a line; its groups are the two words and the rating
    example_line: str  # a line, for error messages
    header: str = "\n"  # start of the header line; the default starts no line


_NUMBER = r"(\d+(?:\.\d*)?)"
FORMATS = {
    "simlex999": _Format(
        rf"([^\t]+)\t([^\t]+)\t[ANV]\t{_NUMBER}(?:\t.*)?",
        example_line="old TAB new TAB A TAB 1.58",
        header="word1\tword2\tPOS",
    ),
    "men": _Format(rf"([^\t ]+) ([^\t ]+) {_NUMBER}", example_line="sun-n sunlight-n 50.0"),
    "wordsim353": _Format(
        rf"([^\t]+)\t([^\t]+)\t{_NUMBER}",
        example_line="tiger TAB cat TAB 7.35",
        header="Word 1\t",
    ),
    "rw": _Format(
        rf"([^\t]+)\t([^\t]+)\t{_NUMBER}\t.*",
        example_line="squishing TAB squirt TAB 5.88 TAB 7 TAB 7",
    ),
}
"""Known file formats by name, tried in this order on the first line of a file."""


def read_benchmark(path: Path) -> Benchmark:
    """Read the word pairs and ratings of a word similarity benchmark from a file in its authors' format.

    - simlex999: tab-separated, the word class in column 3, the rating (0 to 10) in column 4; with or without header.
    - men: space-separated, the rating (0 to 50) last; words or lemmas (`sun-n`); the word class is dropped.
    - wordsim353: three tab-separated columns, the rating (0 to 10) last; with or without header.
    - rw: tab-separated, the mean rating (0 to 10) in column 3, followed by the individual ratings.

    The first line determines the format. The file is UTF-8; empty lines are skipped. Raises a `UserError` if the file
    cannot be read, its format is unknown, or a line is malformed.
    """
    lines = {number: line.rstrip() for number, line in numbered_lines(path) if line.strip()}
    if not lines:
        raise UserError(f"{path}: the file is empty; expected pairs of words with ratings")
    name = _detect_format(path, lines)
    line_format = FORMATS[name]
    pairs: list[Pair] = []
    for line_number, line in lines.items():
        if not pairs and line.startswith(line_format.header):
            continue
        match = re.fullmatch(line_format.pattern, line)
        if match is None:
            raise UserError(
                f"{path}, line {line_number}: {shorten(line, 60)!r} is not a line of {name}; expected two words and a "
                f"rating, as in {line_format.example_line}"
            )
        pairs.append(Pair(match[1].strip(), match[2].strip(), float(match[3])))
    if not pairs:
        raise UserError(f"{path}: no lines follow the header; expected pairs of words with ratings")
    if name == "men":
        pairs = _strip_word_classes(pairs)
    # Only the file's name tells the two parts of WordSim-353 apart.
    part = next((part for part in ("similarity", "relatedness") if part in path.name.lower()), "")
    return Benchmark(f"wordsim_{part}" if name == "wordsim353" and part else name, tuple(pairs))


def _detect_format(path: Path, lines: Mapping[int, str]) -> str:
    """Return the name of the first known format that fits the first line of a file."""
    line_number, first_line = next(iter(lines.items()))
    for name, line_format in FORMATS.items():
        if first_line.startswith(line_format.header) or re.fullmatch(line_format.pattern, first_line):
            return name
    examples = "; ".join(f"{name}: {line_format.example_line}" for name, line_format in FORMATS.items())
    raise UserError(
        f"{path}, line {line_number}: {shorten(first_line, 60)!r} is not a line of a known benchmark; expected one of "
        f"{examples}"
    )


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
    """Return the token ids of each word, tokenized after another word."""
    context = "the"
    texts = [context, *(f"{context} {word}" for word in words)]
    with convert_tokenizer_errors():
        all_ids = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    context_ids, *ids_by_text = all_ids
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
