"""A pass over a corpus, checked against naive computations from all hidden states at once."""

import copy
import functools
import io
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import transformers as hf
from rich.console import Console
from transformers import PreTrainedModel

from istar.errors import NonFiniteError, UserError
from istar.geometry.collect import stream
from istar.geometry.collect.layer_outputs import BlockReader
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.geometry.collect.stream import Stream
from istar.models import tiny
from istar.sums import source_sums
from istar.sums.source_sums import SourceSums
from istar.texts import corpus, demo
from istar.texts.corpus import Source
from tests import oracles
from tests.operations import CountedOperations

SENTENCES = ["the cat sees a dog", "a dog", "does the old dog see a cat ?", "anna likes the small house and the garden"]
TOKENIZER = tiny.make_tokenizer(demo.vocabulary())


@functools.cache
def bert() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return hf.BertModel(hf.BertConfig(**sizes, vocab_size=len(TOKENIZER))).double().eval()


@functools.cache
def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    return hf.GPT2Model(hf.GPT2Config(**sizes, vocab_size=len(TOKENIZER))).double().eval()


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "text.txt"
    random = np.random.default_rng(0)
    words = " ".join(SENTENCES).split()
    path.write_text("\n".join(" ".join(random.choice(words, random.integers(1, 25))) for _ in range(30)))
    return Source("text", path)


def tokenize_inputs(source: Source, length: int, documents: str) -> list[list[int]]:
    """Return the token ids of each input of the model, without the special tokens at its ends."""
    return tokenize_text(source.path.read_text(), length, documents)


def tokenize_text(text: str, length: int, documents: str) -> list[list[int]]:
    lines = text.splitlines()
    ids_by_document = [TOKENIZER(line, add_special_tokens=False)["input_ids"] for line in lines]
    if documents == "packed":
        ids_by_document = [[token for ids in ids_by_document for token in [*ids, TOKENIZER.sep_token_id]]]
    return [ids[start : start + length - 2] for ids in ids_by_document for start in range(0, len(ids), length - 2)]


def compute_states(
    model: PreTrainedModel, source: Source, length: int, documents: str = "separate", special_tokens: str = "exclude"
) -> tuple[dict[str, Any], Any]:
    """Return the hidden states by tap and their tokens, from one forward pass for each input, without padding."""
    return compute_states_of_text(model, source.path.read_text(), length, documents, special_tokens)


@functools.cache
def compute_states_of_text(
    model: PreTrainedModel, text: str, length: int, documents: str, special_tokens: str
) -> tuple[dict[str, Any], Any]:
    states: dict[str, list[Any]] = {}
    tokens: list[int] = []
    cls, sep = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
    block_reader = BlockReader(model)
    for ids in tokenize_text(text, length, documents):
        with torch.no_grad():
            state_by_tap = block_reader({"input_ids": torch.tensor([[cls, *ids, sep]])})
        block = np.array([cls, *ids, sep])
        # The text itself contains no special token.
        is_included = (
            np.full(len(block), fill_value=True) if special_tokens == "include" else ~np.isin(block, [cls, sep])
        )
        for tap, state in state_by_tap.items():
            states.setdefault(tap, []).append(state[0].numpy()[is_included])
        tokens += block[is_included].tolist()
    return {tap: np.concatenate(parts) for tap, parts in states.items()}, np.array(tokens)


def read_statistics(model: PreTrainedModel, settings: MeasureSettings, *sources: Source) -> Any:
    """Run a pass and return copies of its statistics: a dictionary by source, or one object for a single source."""
    statistics_by_source = Stream(model, TOKENIZER, settings)(sources, copy.deepcopy)
    return statistics_by_source if len(sources) > 1 else statistics_by_source[sources[0].name]


def compute_naive_measures(points: Any, tokens: Any) -> dict[str, float]:
    """Compute the measures of points `(n, d)` by the definitions in the papers; return them by name."""
    covariance = np.cov(points.T)
    eigenvalues = np.linalg.eigvalsh(covariance)
    d = len(eigenvalues)
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    cosines = unit @ unit.T
    n = len(points)
    intra_sims = []
    for token in np.unique(tokens):
        of_type = cosines[np.ix_(tokens == token, tokens == token)]
        if len(of_type) > 1:
            intra_sims.append((of_type.sum() - np.trace(of_type)) / (len(of_type) * (len(of_type) - 1)))
    # Steps 5 to 9 of Algorithm 1.
    normalized_eigenvalues = np.sqrt(d) * eigenvalues / np.linalg.norm(eigenvalues)
    delta = np.linalg.norm(normalized_eigenvalues - 1) / np.sqrt(2 * (d - np.sqrt(d)))
    phi = (d - delta**2 * (d - np.sqrt(d))) ** 2 / d**2
    centered = points - points.mean(0)
    singular_values = np.linalg.svd(centered, compute_uv=False)
    raw_singular_values = np.linalg.svd(points, compute_uv=False)
    raw_shares = raw_singular_values / raw_singular_values.sum() + 1e-7
    contributions = np.sort((unit.sum(0) ** 2 - (unit**2).sum(0)) / (n * (n - 1)))[::-1]
    variances = np.sort(points.var(0))[::-1]
    shares = singular_values / singular_values.sum()
    return {
        "points": n, "isoscore": (d * phi - 1) / (d - 1), "inter_sim": (cosines.sum() - n) / (n * (n - 1)),
        "intra_sim": float(np.mean(intra_sims)), "average_norm": np.linalg.norm(points, axis=1).mean(),
        "mean_vector_norm": np.linalg.norm(points.mean(0)),
        "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
        "participation_ratio": eigenvalues.sum() ** 2 / (eigenvalues**2).sum(),
        "largest_variance_share": points.var(0, ddof=1).max() / points.var(0, ddof=1).sum(),
        "largest_kurtosis": ((centered**4).mean(0) / (centered**2).mean(0) ** 2 - 3).max(),
        "rank_me": np.exp(-(raw_shares * np.log(raw_shares)).sum()), "nesum": eigenvalues.sum() / eigenvalues.max(),
        "top_5_variance_share": variances[:5].sum() / variances.sum(),
        "top_1_cosine_share": contributions[0] / contributions.sum(),
        "top_5_cosine_share": contributions[:5].sum() / contributions.sum(),
        "adjusted_intra_sim": float(np.mean(intra_sims)) - (cosines.sum() - n) / (n * (n - 1)),
        "token_kurtosis": scipy.stats.kurtosis(points, axis=1).mean(),
        "largest_token_kurtosis": scipy.stats.kurtosis(points, axis=1).max(),
        "massive_activations": (np.abs(points) > max(100, 1000 * np.median(np.abs(points)))).sum(),
        "mean_kurtosis": ((centered**4).mean(0) / (centered**2).mean(0) ** 2 - 3).mean(),
    }  # fmt: skip


def tolerance(key: str) -> float:
    # Layer normalization leaves one direction without variance, so that its singular value is a rounding error.
    # IntraSim is summed in float32.
    special = {"effective_rank": 1e-6, "rank_me": 1e-6, "effective_rank_error": 1e-3,
               "intra_sim": 1e-7, "adjusted_intra_sim": 1e-6}  # fmt: skip
    return special.get(key, 1e-9)


@pytest.mark.parametrize(
    ("make_model", "documents", "special_tokens"), [(bert, "separate", "exclude"), (gpt2, "packed", "include")]
)
def test_every_figure_of_every_tap(
    make_model: Callable[[], PreTrainedModel], source: Source, documents: Any, special_tokens: Any
) -> None:
    model = make_model()
    states, tokens = compute_states(model, source, 16, documents, special_tokens)
    settings = MeasureSettings(
        16, batch_tokens=112, sample=0, documents=documents, special_tokens=special_tokens, measures="all", groups=3
    )
    measures_by_tap = read_statistics(model, settings, source).compute_measures()
    assert list(measures_by_tap) == list(states)
    assert ("final_norm" in measures_by_tap) == (make_model is gpt2)
    for tap, points in states.items():
        for key, expected in compute_naive_measures(points, tokens).items():
            assert measures_by_tap[tap][key] == pytest.approx(expected, rel=tolerance(key), abs=1e-12), (tap, key)


def test_batches_hold_documents_of_like_length(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "WINDOW_SIZE", 20)
    batch_lengths: list[list[int]] = []
    reader = Stream(bert(), TOKENIZER, MeasureSettings(32, batch_tokens=6 * 16, sample=0))

    def record_lengths(statistics: SourceSums, update: Any) -> None:
        batch_lengths.extend(batch.attention_mask.sum(1).tolist() for batch in update.batches)

    monkeypatch.setattr(reader, "_update_statistics", record_lengths)
    reader([source], lambda statistics: None)
    lengths = [2 + len(ids) for ids in tokenize_inputs(source, 32, "separate")]
    expected = []
    for start in range(0, len(lengths), 20):
        window = sorted(lengths[start : start + 20], reverse=True)
        while window:
            # The first block of a batch is the longest.
            size = max(1, 6 * 16 // window[0])
            expected.append(window[:size])
            window = window[size:]
    assert batch_lengths == expected


def test_batches_and_windows_do_not_matter(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(batch_tokens: int) -> Any:
        settings = MeasureSettings(16, batch_tokens=batch_tokens, sample=12, measures="all", groups=3)
        return read_statistics(bert(), settings, source)

    first, large = read(16), read(16 * 64)
    monkeypatch.setattr(corpus, "WINDOW_SIZE", 11)
    monkeypatch.setattr(stream, "UPDATE_POINTS", 150)
    expected_by_tap = first.compute_measures()
    for other in (large, read(64)):
        assert torch.equal(first.samples["embeddings"].random_numbers, other.samples["embeddings"].random_numbers)
        assert torch.equal(first.samples["embeddings"].types, other.samples["embeddings"].types)
        measures = other.compute_measures()
        for tap, expected_measures in expected_by_tap.items():
            for key, value in expected_measures.items():
                assert measures[tap][key] == pytest.approx(value, rel=tolerance(key), nan_ok=True), (tap, key)


@pytest.mark.parametrize(("max_tokens", "max_bytes"), [(100, 10**9), (10**9, 100 * 4 * 3 * 24)])
def test_states_are_limited(max_tokens: int, max_bytes: int, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both limits are 100 tokens: the model has three taps of width 24, whose numbers have four bytes in float32."""
    monkeypatch.setattr(stream, "UPDATE_POINTS", max_tokens)
    monkeypatch.setattr(stream, "UPDATE_BYTES", max_bytes)
    update_statistics, tokens_of_batches = Stream._update_statistics, []

    def record(self: Stream, statistics: Any, update: Any) -> None:
        tokens_of_batches.append([int(batch.attention_mask.sum()) for batch in update.batches])
        update_statistics(self, statistics, update)

    monkeypatch.setattr(Stream, "_update_statistics", record)
    read_statistics(bert(), MeasureSettings(16, batch_tokens=16, sample=0, groups=0), source)
    assert all(sum(tokens) <= 100 for tokens in tokens_of_batches)
    # No update could take the next batch as well.
    assert all(sum(tokens) + after[0] > 100 for tokens, after in itertools.pairwise(tokens_of_batches))
    assert len(tokens_of_batches) > 2


def test_the_sample_is_of_the_points(source: Source) -> None:
    model = bert()
    states, tokens = compute_states(model, source, 16)
    sample = read_statistics(model, MeasureSettings(16, sample=12), source).samples["embeddings"]
    sample_of_other_seed = read_statistics(model, MeasureSettings(16, sample=12, seed=1), source).samples["embeddings"]
    assert len(sample.types.unique()) == len(sample.types) == 12 < len(np.unique(tokens))
    for tap, points in states.items():
        for token, sampled_state in zip(sample.types.tolist(), sample.get_points(tap).numpy(), strict=True):
            assert np.abs(points[tokens == token] - sampled_state).max(1).min() < 1e-10
        expected = oracles.two_nn(sample.get_points(tap).numpy())
        assert sample.estimate_two_nn(tap).value == pytest.approx(expected, rel=1e-9)
    assert not torch.equal(sample.random_numbers, sample_of_other_seed.random_numbers)
    unlimited_sample = read_statistics(model, MeasureSettings(16), source).samples["embeddings"]
    assert sorted(unlimited_sample.types.tolist()) == np.unique(tokens).tolist()


def test_sources_and_their_union(source: Source, tmp_path: Path) -> None:
    other = Source("other", tmp_path / "other.txt")
    other.path.write_text("\n".join(SENTENCES * 5))
    model = bert()
    measures_by_source = Stream(model, TOKENIZER, MeasureSettings(16, sample=20, measures="all", groups=3))(
        [source, other], SourceSums.compute_measures
    )
    assert list(measures_by_source) == ["text", "other", "combined"]
    for tap, measures in (
        read_statistics(model, MeasureSettings(16, sample=0, groups=3), other).compute_measures().items()
    ):
        assert {measure: measures_by_source["other"][tap][measure] for measure in measures} == pytest.approx(
            measures, rel=1e-4, nan_ok=True
        )
    states_and_tokens = [compute_states(model, each_source, 16) for each_source in (source, other)]
    for tap, measures in measures_by_source["combined"].items():
        points, tokens = (
            np.concatenate(arrays)
            for arrays in zip(*((states[tap], types) for states, types in states_and_tokens), strict=True)
        )
        for key, expected in compute_naive_measures(points, tokens).items():
            assert measures[key] == pytest.approx(expected, rel=tolerance(key), abs=1e-12), (tap, key)


def test_an_interrupted_pass_resumes(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    source.path.write_text("\n".join(source.path.read_text().splitlines()[:12]))
    monkeypatch.setattr(corpus, "WINDOW_SIZE", 7)
    monkeypatch.setattr(stream, "UPDATE_POINTS", 64)
    monkeypatch.setattr(stream, "SECONDS_BETWEEN_SAVES", 0.0)
    settings, state_path = MeasureSettings(16, batch_tokens=32, sample=30, measures="all", groups=2), tmp_path / "state"
    uninterrupted = Stream(model, TOKENIZER, settings, tmp_path / "other_state", "same")
    expected_by_tap = uninterrupted([source], SourceSums.compute_measures)["text"]
    interrupted = Stream(model, TOKENIZER, settings, state_path, "same")
    saved_keys: list[int] = []

    def interrupt(statistics: Any, update: Any) -> None:
        if len(saved_keys) > 8:
            raise KeyboardInterrupt
        Stream._update_statistics(interrupted, statistics, update)
        saved_keys.extend(update.block_keys)

    monkeypatch.setattr(interrupted, "_update_statistics", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted([source], SourceSums.compute_measures)
    # The traceback keeps the generator, which would end the thread if it were dropped.
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")], caught
    assert len(list(tmp_path.glob("state.*"))) == 1
    resumed = Stream(model, TOKENIZER, settings, state_path, "same")
    resumed_keys: list[int] = []

    def record_keys(statistics: Any, update: Any) -> None:
        resumed_keys.extend(update.block_keys)
        Stream._update_statistics(resumed, statistics, update)

    monkeypatch.setattr(resumed, "_update_statistics", record_keys)
    measures_by_tap = resumed([source], SourceSums.compute_measures)["text"]
    # The state holds the first window of 7 blocks and a part of the second.
    assert sorted(saved_keys + resumed_keys) == list(range(len(tokenize_inputs(source, 16, "separate"))))
    for tap, expected_measures in expected_by_tap.items():
        assert measures_by_tap[tap] == pytest.approx(expected_measures, rel=0, abs=0, nan_ok=True)
    reading, expected_reading = resumed.readings["text"], uninterrupted.readings["text"]
    documents = source.path.read_text().splitlines()
    assert (reading.documents, reading.characters) == (len(documents), sum(map(len, documents)))
    assert reading.tokens == expected_reading.tokens == expected_by_tap["embeddings"]["points"]
    # The time of the interrupted pass counts.
    assert reading.seconds >= resumed.earlier_seconds > 0
    assert 0 < expected_reading.forward_seconds <= expected_reading.seconds
    # The state is for resuming until the caller has written the result.
    assert len(list(tmp_path.glob("state.*"))) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param({"format": stream._STATE_FORMAT, "identity": "other"}, "of another model", id="another pass"),
        pytest.param({"identity": "same", "statistics": {}, "blocks": 3}, "another version", id="an earlier version"),
        pytest.param(b"PK\x03\x04", "cannot be read", id="damaged"),
        pytest.param([1], "of another version", id="foreign"),
    ],
)
def test_an_unusable_state_is_not_used_and_a_line_says_why(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, reason: str
) -> None:
    state_path = tmp_path / "state.0.0-1"
    state_path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, state_path)
    reader = Stream(bert(), TOKENIZER, MeasureSettings(16, sample=0, groups=0), tmp_path / "state", "same")
    measures_by_source = reader([source], SourceSums.compute_measures)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the text is read from its beginning: ")
    assert reason in line
    assert measures_by_source["text"]["layer_1"]["points"] == sum(map(len, tokenize_inputs(source, 16, "separate")))


def save_state_after(num_blocks: int, path: Path) -> None:
    torch.save({"format": stream._STATE_FORMAT, "identity": "same", "blocks": num_blocks}, path)


def test_a_file_that_a_network_disk_shows_late_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First there is no file, then one that is not complete, an earlier one, and at last the one that was saved."""
    path, now = tmp_path / "state.0.1-2", 0.0
    reader = Stream(bert(), TOKENIZER, MeasureSettings(16), tmp_path / "state", "same")
    actions = [lambda: path.write_bytes(b"PK"), *(functools.partial(save_state_after, n, path) for n in (3, 4))]
    steps: Iterator[Callable[[], object]] = iter(actions)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        next(steps)()

    monkeypatch.setattr(stream.time, "sleep", sleep)
    monkeypatch.setattr(stream.time, "monotonic", lambda: now)
    assert reader._wait_for_state(path, 4)["blocks"] == 4
    for num_blocks, reason in ((3, "of another model.* or time"), (None, "cannot be read")):
        path.unlink() if num_blocks is None else save_state_after(num_blocks, path)
        steps, start = itertools.repeat(lambda: None), now
        with pytest.raises(UserError, match=rf"state\.0\.1-2 .*{reason}.*; expected a folder that all processes see"):
            reader._wait_for_state(path, 4)
        assert now - start <= stream.SECONDS_TO_WAIT_FOR_FILES + 1


@pytest.mark.parametrize(("document", "place"), [(0, "embeddings"), (0, "layer_2"), (20, "layer_1")])
def test_nonfinite_states(source: Source, monkeypatch: pytest.MonkeyPatch, document: int, place: str) -> None:
    """A layer gives NaN for a single token, as where half precision overflows; the layers after it have NaN, too."""
    lines = source.path.read_text().splitlines()
    lines[document] = "anna"
    source.path.write_text("\n".join(line if index == document else line.replace("anna", "dog")
                                     for index, line in enumerate(lines)))  # fmt: skip
    model, seen = copy.deepcopy(bert()), list[torch.Tensor]()
    settings = MeasureSettings(32, batch_tokens=32, sample=0, groups=2)
    reader = Stream(model, TOKENIZER, settings)
    anna = TOKENIZER.convert_tokens_to_ids("anna")
    module = model.embeddings if place == "embeddings" else model.encoder.layer[int(place[-1]) - 1]
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((kwargs["input_ids"] == anna).any(1)), with_kwargs=True
    )

    forward = module.forward

    def damage(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs).masked_fill(seen[-1][:, None, None], math.nan)

    monkeypatch.setattr(module, "forward", damage)
    monkeypatch.setattr(stream, "UPDATE_POINTS", 1)
    with pytest.raises(NonFiniteError, match=rf"^the hidden states at {place}\b.* are not finite"):
        reader([source], SourceSums.compute_measures)
    assert [bool(is_damaged.any()) for is_damaged in seen].index(True) == len(seen) - 1


def test_limits_and_empty_texts(source: Source, tmp_path: Path) -> None:
    text = source.path.read_text()
    for documents, special_tokens, num_special_tokens in (
        ("separate", "exclude", 0), ("separate", "include", 2), ("packed", "include", 2)
    ):  # fmt: skip
        lengths = [len(ids) + num_special_tokens for ids in tokenize_inputs(source, 16, documents)]
        expected = next(total for total in np.cumsum(lengths) if total >= 40)
        settings = MeasureSettings(16, limit=40, documents=documents, special_tokens=special_tokens)  # type: ignore[arg-type]
        reader = Stream(bert(), TOKENIZER, settings)
        assert (
            reader([source], lambda statistics: float(statistics.layers["embeddings"].moments.count))["text"]
            == expected
        )
        reading = reader.readings["text"]
        assert reading.tokens == expected
        document_lengths = [len(TOKENIZER(line, add_special_tokens=False)["input_ids"]) for line in text.splitlines()]
        last_block_index = next(index for index, total in enumerate(np.cumsum(lengths)) if total >= 40)
        if documents == "separate":
            document_indices = [index for index, count in enumerate(document_lengths) for _ in range(0, count, 14)]
            assert reading.documents == document_indices[last_block_index] + 1
        else:
            # Each document is followed by a separator.
            document_ends = np.cumsum([count + 1 for count in document_lengths])
            assert reading.documents == next(
                number for number, end in enumerate(document_ends, 1) if end >= 14 * (last_block_index + 1)
            )
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match=r"empty\.txt holds no text"):
        read_statistics(bert(), MeasureSettings(16), Source("empty", tmp_path / "empty.txt"))


@pytest.mark.parametrize(("text", "limit"), [("cat", None), ("the", None), ("the\n\n" * 9, 2)])
def test_too_few_tokens(tmp_path: Path, text: str, limit: int | None) -> None:
    """The message used to be about the moments of some points, and named no file."""
    (tmp_path / "short.txt").write_text(text)
    with pytest.raises(UserError, match=r"short\.txt: (1 token is|\d tokens are) too few to measure"):
        read_statistics(
            bert(), MeasureSettings(16, limit=limit, documents="separate"), Source("short", tmp_path / "short.txt")
        )


def test_a_block_of_separators_alone(tmp_path: Path) -> None:
    """The last packed block may hold no token of the text."""
    path = tmp_path / "text.txt"
    path.write_text("the cat sees a\nthe dog sees the cat")
    text_source = Source("text", path)
    [token_ids] = tokenize_inputs(text_source, 512, "packed")
    length = 2 + len(token_ids) - 1
    assert tokenize_inputs(text_source, length, "packed")[-1] == [TOKENIZER.sep_token_id]
    for batch_size in (1, 8):
        settings = MeasureSettings(length, batch_tokens=length * batch_size, documents="packed")
        assert (
            read_statistics(bert(), settings, text_source).compute_measures()["layer_2"]["points"] == len(token_ids) - 2
        )


def test_one_source_is_in_memory_at_a_time(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[SourceSums] = weakref.WeakSet()
    max_alive = 0

    class TrackedStatistics(SourceSums):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal max_alive
            super().__init__(*arguments, **options)
            alive.add(self)
            max_alive = max(max_alive, len(alive))

    monkeypatch.setattr(stream, "SourceSums", TrackedStatistics)
    sources = [Source(name, source.path) for name in "abc"]
    measures_by_source = Stream(bert(), TOKENIZER, MeasureSettings(16, sample=0, groups=0), tmp_path / "state", "same")(
        sources, SourceSums.compute_measures
    )
    assert list(measures_by_source) == [*"abc", "combined"]
    assert max_alive == 2
    assert not alive


def test_errors_are_from_groups_of_documents(source: Source) -> None:
    """The oracle measures the states of the tokens without every third document."""
    model = bert()
    measures_by_tap = read_statistics(model, MeasureSettings(16, batch_tokens=112, groups=3), source).compute_measures()
    states, tokens = compute_states(model, source, 16)
    token_ids = TOKENIZER(source.path.read_text().splitlines(), add_special_tokens=False)["input_ids"]
    groups = np.repeat(np.arange(len(token_ids)) % 3, list(map(len, token_ids)))
    measures_without_group = [
        {
            tap: compute_naive_measures(points[groups != group], tokens[groups != group])
            for tap, points in states.items()
        }
        for group in range(3)
    ]
    for tap, measures in measures_by_tap.items():
        for key in ("isoscore", "inter_sim", "average_norm", "mean_vector_norm", "participation_ratio"):
            # The standard error of the mean of pseudo-values, which are -2 times an estimate plus a constant.
            expected = scipy.stats.sem([-2 * estimates[tap][key] for estimates in measures_without_group])
            assert measures[f"{key}_error"] == pytest.approx(expected, rel=1e-6), (tap, key)


def test_too_large_sums_of_groups_are_left_out_with_a_warning(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    required_bytes = 10 * 3 * 24**2 * 8
    for limit, is_warned in ((required_bytes, False), (required_bytes - 1, True)):
        monkeypatch.setattr(source_sums, "MAX_GROUP_BYTES", limit)
        console = Console(file=io.StringIO(), width=80)
        measures_by_tap = Stream(bert(), TOKENIZER, MeasureSettings(16, sample=0))(
            [source], SourceSums.compute_measures, console
        )["text"]
        assert ("isoscore_error" not in measures_by_tap["layer_1"]) == is_warned
        assert math.isfinite(measures_by_tap["layer_1"]["inter_sim_error"])
        warnings = [line for line in console.file.getvalue().splitlines() if "warning: " in line]  # type: ignore[attr-defined]
        assert bool(warnings) == is_warned
        if is_warned:
            assert "isoscore" in warnings[0]
            assert warnings[0].rstrip().endswith("choose fewer groups")


def test_positions_are_those_in_the_input(source: Source) -> None:
    """Without special tokens, the token at position 0 is left out."""
    for special_tokens, first_position in (("exclude", 1), ("include", 0)):
        settings = MeasureSettings(16, special_tokens=special_tokens)  # type: ignore[arg-type]
        table = read_statistics(bert(), settings, source).layers["layer_1"].summarize_by_position()
        assert table["first"][0] == first_position
        blocks = tokenize_inputs(source, 16, "separate")
        assert table["points"][0] == len(blocks)
        assert sum(table["points"]) == sum(len(block) + 2 * (first_position == 0) for block in blocks)


def test_measures_of_the_sample(source: Source) -> None:
    statistics = read_statistics(bert(), MeasureSettings(16, sample=20, measures="all", groups=0), source)
    for tap, measures in statistics.compute_measures().items():
        points = statistics.samples["embeddings"].get_points(tap).numpy()
        unit = points / np.linalg.norm(points, axis=1, keepdims=True)
        assert measures["sample_inter_sim"] == pytest.approx(oracles.mean_pair_cosine(points), rel=1e-9)
        order = np.argsort(unit.sum(0) ** 2 - (unit**2).sum(0))[::-1]
        for k in (1, 5):
            expected = oracles.mean_pair_cosine(np.delete(points, order[:k], axis=1))
            assert measures[f"sample_inter_sim_without_top_{k}"] == pytest.approx(expected, rel=1e-8, abs=1e-12)
        standardized = oracles.mean_pair_cosine(scipy.stats.zscore(points))
        assert measures["sample_inter_sim_standardized"] == pytest.approx(standardized, rel=1e-8)
        assert measures.items() >= statistics.samples["embeddings"].compute_neighbour_measures(tap).items()
        assert measures["uniformity"] < 0 < 1 < measures["relative_contrast"]
        assert [scale.n1 for scale in statistics.estimate_gride()[tap]] == [1, 2, 4, 8]
    assert read_statistics(bert(), MeasureSettings(16, sample=20), source).estimate_gride() == {}


def test_an_update_has_few_operations_and_synchronizations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count those of the second of three updates of 8,192 tokens of a model of six layers, with the model's own."""
    path, random = tmp_path / "text.txt", np.random.default_rng(0)
    words = [f"word{index}" for index in range(3_000)]
    path.write_text("\n".join(" ".join(random.choice(words, random.integers(5, 60))) for _ in range(900)))
    tokenizer = tiny.make_tokenizer(words)
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 1, "intermediate_size": 64}
    model = hf.BertModel(hf.BertConfig(**sizes, vocab_size=len(tokenizer))).eval()
    counters: list[CountedOperations] = []
    num_tokens: list[int] = []
    update_statistics, read_list = Stream._update_statistics, torch.Tensor.tolist

    def count_update(self: Stream, statistics: SourceSums, update: Any) -> None:
        counters.append(CountedOperations())
        num_tokens.append(sum(update.num_tokens))
        with counters[-1]:
            update_statistics(self, statistics, update)

    def count_list(values: torch.Tensor) -> Any:  # on a CPU, it is not dispatched
        if counters and threading.current_thread() is threading.main_thread():
            counters[-1].synchronizations += 1
        return read_list(values)

    monkeypatch.setattr(Stream, "_update_statistics", count_update)
    monkeypatch.setattr(torch.Tensor, "tolist", count_list)
    Stream(model, tokenizer, MeasureSettings(length=256, groups=10, sample=1_000, batch_tokens=4_096))(
        [Source("text", path)], lambda sums: None
    )
    assert 7_000 < num_tokens[1] <= 8_192
    assert 500 < counters[1].total <= 1_300
    assert 0 < counters[1].synchronizations <= 6
