"""A pass over a corpus, checked against naive computations from all hidden states at once."""

import copy
import io
import math
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed as dist
import transformers as hf
from rich.console import Console
from transformers import PreTrainedModel

from istar.errors import UserError
from istar.geometry import corpus, stream
from istar.geometry.corpus import Block, Source
from istar.geometry.stream import Pass, Statistics, Stream
from istar.measures import SentenceMoments, isoscore_by_sentence
from istar.models import tiny
from istar.tasks import demo
from tests import oracles
from tests.forks import run_in_processes

WORDS = ["the cat sees a dog", "a dog", "does the old dog see a cat ?", "anna likes the small house and the garden"]
TOKENIZER = tiny.make_tokenizer(demo.vocabulary())


def bert() -> PreTrainedModel:
    torch.manual_seed(0)
    config = hf.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=len(TOKENIZER)
    )
    return hf.BertModel(config).double().eval()


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    return (
        hf.GPT2Model(hf.GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=len(TOKENIZER), **ends)).double().eval()
    )


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "text.txt"
    random = np.random.default_rng(0)
    words = " ".join(WORDS).split()
    path.write_text("\n".join(" ".join(random.choice(words, random.integers(1, 25))) for _ in range(60)))
    return Source("text", path)


def inputs(source: Source, length: int, documents: str) -> list[list[int]]:
    """Return the token ids of each input of the model without special tokens at its ends."""
    lines = source.path.read_text().splitlines()
    texts = [TOKENIZER(line, add_special_tokens=False)["input_ids"] for line in lines]
    if documents == "packed":
        texts = [[token for text in texts for token in [*text, TOKENIZER.sep_token_id]]]
    return [text[start : start + length - 2] for text in texts for start in range(0, len(text), length - 2)]


def all_states(
    model: PreTrainedModel, source: Source, length: int, documents: str = "separate", special_tokens: str = "exclude"
) -> tuple[dict[str, Any], Any]:
    """Return the hidden states by tap and their tokens, from one forward pass for each input, without padding."""
    states: dict[str, list[Any]] = {}
    tokens: list[int] = []
    cls, sep = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
    for ids in inputs(source, length, documents):
        with torch.no_grad():
            found = stream.Taps(model)({"input_ids": torch.tensor([[cls, *ids, sep]])})
        block = np.array([cls, *ids, sep])
        # The text itself contains no special token.
        kept = np.full(len(block), fill_value=True) if special_tokens == "include" else ~np.isin(block, [cls, sep])
        for name, state in found.items():
            states.setdefault(name, []).append(state[0].numpy()[kept])
        tokens += block[kept].tolist()
    return {name: np.concatenate(parts) for name, parts in states.items()}, np.array(tokens)


def read(model: PreTrainedModel, settings: Pass, *sources: Source) -> Any:
    """Return copies of the statistics of a pass by source; those of the only source by themselves."""
    found = Stream(model, TOKENIZER, settings)(sources, copy.deepcopy)
    return found if len(sources) > 1 else found[sources[0].name]


def naive(points: Any, tokens: Any) -> dict[str, float]:
    """Compute the papers' measures by their definitions."""
    covariance = np.cov(points.T)
    eigenvalues = np.linalg.eigvalsh(covariance)
    d = len(eigenvalues)
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    cosines = unit @ unit.T
    n = len(points)
    types = []
    for token in np.unique(tokens):
        own = cosines[np.ix_(tokens == token, tokens == token)]
        if len(own) > 1:
            types.append((own.sum() - np.trace(own)) / (len(own) * (len(own) - 1)))
    # Steps 5 to 9 of Algorithm 1.
    normed = np.sqrt(d) * eigenvalues / np.linalg.norm(eigenvalues)
    delta = np.linalg.norm(normed - 1) / np.sqrt(2 * (d - np.sqrt(d)))
    phi = (d - delta**2 * (d - np.sqrt(d))) ** 2 / d**2
    centered = points - points.mean(0)
    singular = np.linalg.svd(centered, compute_uv=False)
    raw = np.linalg.svd(points, compute_uv=False)
    raw_shares = raw / raw.sum() + 1e-7
    contributions = np.sort((unit.sum(0) ** 2 - (unit**2).sum(0)) / (n * (n - 1)))[::-1]
    variances = np.sort(points.var(0))[::-1]
    shares = singular / singular.sum()
    return {
        "tokens": n,
        "isoscore": (d * phi - 1) / (d - 1),
        "inter_sim": (cosines.sum() - n) / (n * (n - 1)),
        "intra_sim": float(np.mean(types)),
        "average_norm": np.linalg.norm(points, axis=1).mean(),
        "mean_vector_norm": np.linalg.norm(points.mean(0)),
        "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
        "participation_ratio": eigenvalues.sum() ** 2 / (eigenvalues**2).sum(),
        "largest_variance_share": points.var(0, ddof=1).max() / points.var(0, ddof=1).sum(),
        "largest_kurtosis": ((centered**4).mean(0) / (centered**2).mean(0) ** 2 - 3).max(),
        "rank_me": np.exp(-(raw_shares * np.log(raw_shares)).sum()),
        "nesum": eigenvalues.sum() / eigenvalues.max(),
        "top_5_variance_share": variances[:5].sum() / variances.sum(),
        "top_1_cosine_share": contributions[0] / contributions.sum(),
        "top_5_cosine_share": contributions[:5].sum() / contributions.sum(),
        "adjusted_intra_sim": float(np.mean(types)) - (cosines.sum() - n) / (n * (n - 1)),
        "token_kurtosis": scipy.stats.kurtosis(points, axis=1).mean(),
        "largest_token_kurtosis": scipy.stats.kurtosis(points, axis=1).max(),
        "massive_activations": (np.abs(points) > max(100, 1000 * np.median(np.abs(points)))).sum(),
        "mean_kurtosis": ((centered**4).mean(0) / (centered**2).mean(0) ** 2 - 3).mean(),
    }


def tolerance(key: str) -> float:
    # Layer normalization removes the variance of one direction, whose singular value is a rounding error.
    return {"effective_rank": 1e-6, "rank_me": 1e-6, "effective_rank_error": 1e-3}.get(key, 1e-9)


@pytest.mark.parametrize("special_tokens", ["include", "exclude"])
@pytest.mark.parametrize("documents", ["separate", "packed"])
@pytest.mark.parametrize("make", [bert, gpt2])
def test_every_figure_of_every_tap(
    make: Callable[[], PreTrainedModel], source: Source, documents: Any, special_tokens: Any
) -> None:
    model = make()
    states, tokens = all_states(model, source, 16, documents, special_tokens)
    settings = Pass(
        16, batch_tokens=112, sample=0, documents=documents, special_tokens=special_tokens, measures="all", groups=3
    )
    found = read(model, settings, source).compute_measures()
    assert list(found) == list(states)
    assert ("final_norm" in found) == (make is gpt2)
    for name, points in states.items():
        for key, expected in naive(points, tokens).items():
            assert found[name][key] == pytest.approx(expected, rel=tolerance(key), abs=1e-12), (name, key)


def test_batches_hold_documents_of_like_length(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "WINDOW_SIZE", 20)
    seen: list[list[int]] = []
    pass_over = Stream(bert(), TOKENIZER, Pass(32, batch_tokens=6 * 16, sample=0))

    def watched(statistics: Statistics, blocks: list[Block], keys: Any) -> None:
        seen.append([len(block.tokens) for block in blocks])

    monkeypatch.setattr(pass_over, "_update_statistics", watched)
    pass_over([source], lambda statistics: None)
    lengths = [2 + len(ids) for ids in inputs(source, 32, "separate")]
    expected = []
    for start in range(0, len(lengths), 20):
        window = sorted(lengths[start : start + 20], reverse=True)
        while window:
            # The first is the longest.
            size = max(1, 6 * 16 // window[0])
            expected.append(window[:size])
            window = window[size:]
    assert seen == expected


def test_batches_and_windows_do_not_matter(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    first, *others = (
        read(model, Pass(16, batch_tokens=16 * size, sample=12, measures="all"), source) for size in (1, 5, 64)
    )
    monkeypatch.setattr(corpus, "WINDOW_SIZE", 11)
    others.append(read(model, Pass(16, batch_tokens=64, sample=12, measures="all"), source))
    for other in others:
        assert torch.equal(first.sample.random_numbers, other.sample.random_numbers)
        assert torch.equal(first.sample.types, other.sample.types)
        measures = other.compute_measures()
        for name, figures in first.compute_measures().items():
            for key, value in figures.items():
                assert measures[name][key] == pytest.approx(value, rel=tolerance(key), nan_ok=True), (name, key)


def test_the_sample_is_of_the_points(source: Source) -> None:
    model = bert()
    states, tokens = all_states(model, source, 16)
    sample = read(model, Pass(16, sample=12), source).sample
    again = read(model, Pass(16, sample=12, seed=1), source).sample
    assert len(sample.types.unique()) == len(sample.types) == 12 < len(np.unique(tokens))
    for name, points in states.items():
        for token, sampled in zip(sample.types.tolist(), sample.points[name].numpy(), strict=True):
            assert np.abs(points[tokens == token] - sampled).max(1).min() < 1e-10
        expected = oracles.two_nn(sample.points[name].numpy())
        assert sample.estimate_two_nn(name).value == pytest.approx(expected, rel=1e-9)
    assert not torch.equal(sample.random_numbers, again.random_numbers)
    whole = read(model, Pass(16), source).sample
    assert sorted(whole.types.tolist()) == np.unique(tokens).tolist()


def test_sources_and_their_union(source: Source, tmp_path: Path) -> None:
    other = Source("other", tmp_path / "other.txt")
    other.path.write_text("\n".join(WORDS * 5))
    model = bert()
    found = Stream(model, TOKENIZER, Pass(16, sample=20, measures="all"))([source, other], Statistics.compute_measures)
    assert list(found) == ["text", "other", "combined"]
    for name, figures in read(model, Pass(16, sample=0), other).compute_measures().items():
        assert {measure: found["other"][name][measure] for measure in figures} == pytest.approx(
            figures, rel=1e-4, nan_ok=True
        )
    parts = [all_states(model, own, 16) for own in (source, other)]
    for name, figures in found["combined"].items():
        points, tokens = (np.concatenate(both) for both in zip(*((s[name], t) for s, t in parts), strict=True))
        for key, expected in naive(points, tokens).items():
            assert figures[key] == pytest.approx(expected, rel=tolerance(key), abs=1e-12), (name, key)


def test_an_interrupted_pass_resumes(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    monkeypatch.setattr(corpus, "WINDOW_SIZE", 13)
    whole = read(model, Pass(16, batch_tokens=32, sample=30, measures="all"), source)
    monkeypatch.setattr(stream, "SECONDS_BETWEEN_SAVES", 0.0)
    place = tmp_path / "state"
    broken = Stream(model, TOKENIZER, Pass(16, batch_tokens=32, sample=30, measures="all"), place, "same")
    calls = iter(range(100))

    def breaking(*arguments: Any) -> Any:
        if next(calls) == 9:
            raise KeyboardInterrupt
        return Stream._update_statistics(broken, *arguments)

    monkeypatch.setattr(broken, "_update_statistics", breaking)
    with pytest.raises(KeyboardInterrupt):
        broken([source], Statistics.compute_measures)
    assert len(list(tmp_path.glob("state.*"))) == 1
    going_on = Stream(model, TOKENIZER, Pass(16, batch_tokens=32, sample=30, measures="all"), place, "same")
    seen: list[int] = []

    def watched(statistics: Any, blocks: Any, keys: Any) -> None:
        seen.extend(keys)
        Stream._update_statistics(going_on, statistics, blocks, keys)

    monkeypatch.setattr(going_on, "_update_statistics", watched)
    found = going_on([source], Statistics.compute_measures)["text"]
    # Seven batches of the first window, the last of them of one block, and two of the second.
    assert len(seen) == len(inputs(source, 16, "separate")) - 17
    for name, figures in whole.compute_measures().items():
        assert found[name] == pytest.approx(figures, rel=0, abs=0, nan_ok=True)
    assert not list(tmp_path.glob("state.*"))


def test_the_time_of_an_interrupted_pass_counts(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that a forward pass moves by a second and the rest of a batch by a tenth."""
    now = 0.0
    monkeypatch.setattr(stream.time, "monotonic", lambda: now)
    monkeypatch.setattr(stream, "SECONDS_BETWEEN_SAVES", 0.0)
    settings = Pass(16, batch_tokens=64, sample=0)

    class SlowTaps(stream.Taps):
        def __call__(self, inputs: Any) -> Any:
            nonlocal now
            now += 1.0
            return super().__call__(inputs)

    monkeypatch.setattr(stream, "Taps", SlowTaps)

    def reader(batches: int | None = None) -> Stream:
        result = Stream(bert(), TOKENIZER, settings, tmp_path / "state", "same")
        update = result._update_statistics

        def slow(*arguments: Any) -> None:
            nonlocal now, batches
            if batches == 0:
                raise KeyboardInterrupt
            batches = None if batches is None else batches - 1
            now += 0.1
            update(*arguments)

        monkeypatch.setattr(result, "_update_statistics", slow)
        return result

    longest_first = sorted((2 + len(ids) for ids in inputs(source, 16, "separate")), reverse=True)
    count = 0
    while longest_first:
        longest_first = longest_first[max(1, 64 // longest_first[0]) :]
        count += 1
    broken = reader(batches=3)
    with pytest.raises(KeyboardInterrupt):
        broken([source], Statistics.compute_measures)
    now += 1_000.0
    going_on = reader()
    found = going_on([source], Statistics.compute_measures)
    reading = going_on.readings["text"]
    assert reading.forward_seconds == pytest.approx(count)
    assert reading.seconds == pytest.approx(1.1 * count)
    assert going_on.earlier_seconds == pytest.approx(3.3)
    documents = source.path.read_text().splitlines()
    assert (reading.documents, reading.characters) == (len(documents), sum(map(len, documents)))
    assert reading.tokens == found["text"]["embeddings"]["tokens"]


@pytest.mark.parametrize("kind", ["foreign", "damaged"])
def test_the_state_of_another_pass_is_ignored(source: Source, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "state.0.0-1"
    torch.save({"identity": "other"}, place) if kind == "foreign" else place.write_bytes(b"PK\x03\x04")
    found = Stream(bert(), TOKENIZER, Pass(16), tmp_path / "state", "same")([source], Statistics.compute_measures)
    assert found["text"]["layer_1"]["tokens"] == len(all_states(bert(), source, 16)[1])


def test_limits_and_empty_texts(source: Source, tmp_path: Path) -> None:
    text = source.path.read_text()
    for documents, special_tokens, around in (
        ("separate", "exclude", 0), ("separate", "include", 2), ("packed", "include", 2)
    ):  # fmt: skip
        lengths = [len(ids) + around for ids in inputs(source, 16, documents)]
        expected = next(total for total in np.cumsum(lengths) if total >= 40)
        settings = Pass(16, limit=40, documents=documents, special_tokens=special_tokens)  # type: ignore[arg-type]
        assert read(bert(), settings, source).compute_measures()["embeddings"]["tokens"] == expected
        reader = Stream(bert(), TOKENIZER, settings)
        reader([source], Statistics.compute_measures)
        reading = reader.readings["text"]
        assert reading.tokens == expected
        tokens = [len(TOKENIZER(line, add_special_tokens=False)["input_ids"]) for line in text.splitlines()]
        last = next(number for number, total in enumerate(np.cumsum(lengths)) if total >= 40)
        if documents == "separate":
            pieces = [number for number, count in enumerate(tokens) for _ in range(0, count, 14)]
            assert reading.documents == pieces[last] + 1
        else:
            # Each document is followed by a separator.
            ends = np.cumsum([count + 1 for count in tokens])
            assert reading.documents == next(number for number, end in enumerate(ends, 1) if end >= 14 * (last + 1))
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match=r"empty\.txt holds no text"):
        read(bert(), Pass(16), Source("empty", tmp_path / "empty.txt"))


def test_a_block_of_separators_alone(tmp_path: Path) -> None:
    """The last packed block may hold no token of the text."""
    path = tmp_path / "text.txt"
    path.write_text("the cat sees a\nthe dog sees the cat")
    text = Source("text", path)
    [whole] = inputs(text, 512, "packed")
    length = 2 + len(whole) - 1
    assert inputs(text, length, "packed")[-1] == [TOKENIZER.sep_token_id]
    for batch_size in (1, 8):
        settings = Pass(length, batch_tokens=length * batch_size, documents="packed")
        assert read(bert(), settings, text).compute_measures()["layer_2"]["tokens"] == len(whole) - 2


def test_statistics_of_all_sources_are_never_in_memory_at_once(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Statistics] = weakref.WeakSet()
    most = 0

    class Watched(Statistics):
        def __init__(self, *arguments: Any) -> None:
            nonlocal most
            super().__init__(*arguments)
            alive.add(self)
            most = max(most, len(alive))

    monkeypatch.setattr(stream, "Statistics", Watched)
    sources = [Source(name, source.path) for name in "abcd"]
    found = Stream(bert(), TOKENIZER, Pass(16, sample=0), tmp_path / "state", "same")(
        sources, Statistics.compute_measures
    )
    assert list(found) == [*"abcd", "combined"]
    assert most == 2
    assert not alive


def test_errors_are_from_groups_of_documents(source: Source) -> None:
    """The oracle measures the text without every third document."""
    model = bert()
    measures_by_tap = read(model, Pass(16, batch_tokens=112, groups=3), source).compute_measures()
    lines = source.path.read_text().splitlines()
    without = []
    for group in range(3):
        rest = Source("rest", source.path.with_name(f"without-{group}.txt"))
        rest.path.write_text("\n".join(line for number, line in enumerate(lines) if number % 3 != group))
        without.append({name: naive(points, tokens) for name, points, tokens in of_each_tap(model, rest)})
    for name, measures in measures_by_tap.items():
        for key in ("isoscore", "inter_sim", "average_norm", "mean_vector_norm", "participation_ratio"):
            # The standard error of the mean of pseudo-values; each is -2 times an estimate, apart from a constant.
            expected = scipy.stats.sem([-2 * estimates[name][key] for estimates in without])
            assert measures[f"{key}_error"] == pytest.approx(expected, rel=1e-6), (name, key)


def of_each_tap(model: PreTrainedModel, source: Source) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each tap with its hidden states and their tokens."""
    states, tokens = all_states(model, source, 16)
    for name, points in states.items():
        yield name, points, tokens


@pytest.mark.parametrize("batch_size", [3, 64])
def test_the_score_by_sentence_is_that_of_the_first_blocks_of_the_documents(source: Source, batch_size: int) -> None:
    """The oracle cuts each document to its first block, and reads the documents one by one."""
    model = bert()
    settings = Pass(16, batch_tokens=16 * batch_size, sample=0, measures="all", groups=3)
    found = read(model, settings, source).compute_measures()
    lines = [ids[:14] for ids in TOKENIZER(source.path.read_text().splitlines(), add_special_tokens=False)["input_ids"]]
    assert max(map(len, inputs(source, 512, "separate"))) > 14
    longest = max(map(len, lines))
    mask = torch.tensor([[position < len(ids) for position in range(longest)] for ids in lines])
    states: dict[str, Any] = {tap: torch.zeros(len(lines), longest, 24).double() for tap in found}
    for number, ids in enumerate(lines):
        ends = [TOKENIZER.cls_token_id], [TOKENIZER.sep_token_id]
        with torch.no_grad():
            taps = stream.Taps(model)({"input_ids": torch.tensor([[*ends[0], *ids, *ends[1]]])})
        for tap, state in taps.items():
            states[tap][number, : len(ids)] = state[0, 1:-1]
    blocks = list(corpus.Blocks(TOKENIZER, 16)(source.path.read_text().splitlines()))[: stream.ORIGIN_BLOCKS]
    for tap, points in states.items():
        # All pieces of the first documents make the origin.
        tokens = sum(block.num_text_tokens for block in blocks)
        origin = torch.from_numpy(all_states(model, source, 16)[0][tap][:tokens]).mean(0)

        def score(rows: list[int], points: Any = points, origin: Any = origin) -> float:
            return SentenceMoments(24, origin).update(points[rows], mask[rows]).score().item()

        numbers = range(len(lines))
        assert found[tap]["isoscore_by_sentence"] == pytest.approx(score([*numbers]), rel=1e-8)
        assert found[tap]["isoscore_by_sentence"] == pytest.approx(isoscore_by_sentence(points, mask).item(), rel=0.05)
        without = [score([number for number in numbers if number % 3 != group]) for group in range(3)]
        expected = scipy.stats.sem([-2 * estimate for estimate in without])
        assert found[tap]["isoscore_by_sentence_error"] == pytest.approx(expected, rel=1e-6)


def test_packed_documents_have_no_score_by_sentence(source: Source) -> None:
    console = Console(file=io.StringIO(), width=80)
    settings = Pass(16, sample=0, measures="all", documents="packed")
    found = Stream(bert(), TOKENIZER, settings)([source], Statistics.compute_measures, console)["text"]
    assert not [name for name in found["layer_1"] if name.startswith("isoscore_by_sentence")]
    [warning] = [line for line in console.file.getvalue().splitlines() if "warning: " in line]  # type: ignore[attr-defined]
    assert "isoscore_by_sentence is left out" in warning
    assert warning.rstrip().endswith("choose --documents separate")


def test_too_large_sums_of_groups_are_left_out_with_a_warning(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 10 * 3 * 24**2 * 8
    for limit, is_warned in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(stream, "MAX_GROUP_BYTES", limit)
        console = Console(file=io.StringIO(), width=80)
        found = Stream(bert(), TOKENIZER, Pass(16, sample=0))([source], Statistics.compute_measures, console)["text"]
        assert ("isoscore_error" not in found["layer_1"]) == is_warned
        assert math.isfinite(found["layer_1"]["inter_sim_error"])
        warning = [line for line in console.file.getvalue().splitlines() if "warning: " in line]  # type: ignore[attr-defined]
        assert bool(warning) == is_warned
        if is_warned:
            assert "isoscore" in warning[0]
            assert warning[0].rstrip().endswith("choose fewer --groups")


def test_positions_are_those_in_the_input(source: Source) -> None:
    """Without special tokens, the token at position 0 is left out."""
    for special_tokens, first in (("exclude", 1), ("include", 0)):
        settings = Pass(16, special_tokens=special_tokens)  # type: ignore[arg-type]
        table = read(bert(), settings, source).layers["layer_1"].summarize_by_position()
        assert table["first"][0] == first
        blocks = inputs(source, 16, "separate")
        assert table["tokens"][0] == len(blocks)
        assert sum(table["tokens"]) == sum(len(block) + 2 * (first == 0) for block in blocks)


def test_measures_of_the_sample(source: Source) -> None:
    statistics = read(bert(), Pass(16, sample=20, measures="all"), source)
    for name, measures in statistics.compute_measures().items():
        points = statistics.sample.points[name].numpy()
        unit = points / np.linalg.norm(points, axis=1, keepdims=True)
        assert measures["sample_inter_sim"] == pytest.approx(oracles.mean_pair_cosine(points), rel=1e-9)
        order = np.argsort(unit.sum(0) ** 2 - (unit**2).sum(0))[::-1]
        for k in (1, 5):
            expected = oracles.mean_pair_cosine(np.delete(points, order[:k], axis=1))
            assert measures[f"sample_inter_sim_without_top_{k}"] == pytest.approx(expected, rel=1e-8, abs=1e-12)
        standardized = oracles.mean_pair_cosine(scipy.stats.zscore(points))
        assert measures["sample_inter_sim_standardized"] == pytest.approx(standardized, rel=1e-8)
        assert [scale.n1 for scale in statistics.estimate_gride()[name]] == [1, 2, 4, 8]
    assert read(bert(), Pass(16, sample=20), source).estimate_gride() == {}


def test_without_intra_sim(source: Source) -> None:
    figures = read(bert(), Pass(16, intra=False), source).compute_measures()
    assert "intra_sim" not in figures["layer_1"]


# ---- several processes


def share(rank: int, world: int, folder: str, length: int) -> None:
    """Run one process of a shared pass."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    place = Path(folder)
    texts = [Source(name, place / f"{name}.txt") for name in ("text", "other")]
    settings = Pass(length, batch_tokens=3 * length, sample=12, measures="all", groups=4)
    found = Stream(bert(), TOKENIZER, settings, place / "state", "same")(texts, Statistics.compute_measures)
    torch.save(found, place / f"measures-{rank}.pt")
    dist.barrier()
    # Skip the interpreter's shutdown, in which the process group may abort.
    os._exit(0)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_a_pass(source: Source, tmp_path: Path, world: int) -> None:
    # The other text is one block, so that some processes read none of it.
    (tmp_path / "other.txt").write_text(WORDS[-1])
    texts = [source, Source("other", tmp_path / "other.txt")]
    alone = Stream(bert(), TOKENIZER, Pass(64, sample=12, measures="all", groups=4))(texts, Statistics.compute_measures)
    run_in_processes(share, (world, str(tmp_path), 64), world)
    together = torch.load(tmp_path / "measures-0.pt")
    assert all(torch.load(tmp_path / f"measures-{rank}.pt") == {} for rank in range(1, world))
    assert list(together) == list(alone) == ["text", "other", "combined"]
    for name, own in alone.items():
        for tap, figures in own.items():
            for key, value in figures.items():
                expected = pytest.approx(value, rel=tolerance(key), abs=1e-12, nan_ok=True)
                assert together[name][tap][key] == expected, (name, tap, key)
    # No state file remains.
    assert not list(tmp_path.glob("state.*"))
