"""A pass over a corpus, checked against naive computations from all hidden states at once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from transformers import PreTrainedModel

from istar.errors import UserError
from istar.geometry import stream
from istar.geometry.corpus import Packer, Source
from istar.geometry.stream import Pass, Stream
from istar.models import tiny
from istar.tasks import demo
from istar.tasks.documents import read_documents
from tests.forks import run_in_processes

WORDS = ["the cat sees a dog", "a dog", "does the old dog see a cat ?", "anna likes the small house and the garden"]
TOKENIZER = tiny.tokenizer(demo.vocabulary())


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
    path.write_text("\n".join(" ".join(random.permutation(" ".join(WORDS).split())[:9]) for _ in range(60)))
    return Source("text", path)


def all_states(model: PreTrainedModel, source: Source, length: int) -> tuple[dict[str, Any], Any]:
    """Return the hidden states by tap and their tokens, computed block by block without padding."""
    states: dict[str, list[Any]] = {}
    tokens: list[int] = []
    for block in Packer(TOKENIZER, length)(read_documents(source.path)):
        with torch.no_grad():
            found = stream.Taps(model)({"input_ids": torch.tensor([block])})
        for name, state in found.items():
            states.setdefault(name, []).append(state[0].numpy())
        tokens += block
    return {name: np.concatenate(parts) for name, parts in states.items()}, np.array(tokens)


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
        "mean_kurtosis": ((centered**4).mean(0) / (centered**2).mean(0) ** 2 - 3).mean(),
    }


def tolerance(key: str) -> float:
    # Layer normalization removes the variance of one direction, whose singular value is a rounding error.
    return 1e-6 if key == "effective_rank" else 1e-9


@pytest.mark.parametrize("make", [bert, gpt2])
def test_every_figure_of_every_tap(make: Callable[[], PreTrainedModel], source: Source) -> None:
    model = make()
    states, tokens = all_states(model, source, 16)
    found = Stream(model, TOKENIZER, Pass(16, batch_size=7, sample=0))([source])["text"].measures()
    assert list(found) == list(states)
    assert ("final_norm" in found) == (make is gpt2)
    for name, points in states.items():
        for key, expected in naive(points, tokens).items():
            assert found[name][key] == pytest.approx(expected, rel=tolerance(key), abs=1e-12), (name, key)


def test_batches_do_not_matter(source: Source) -> None:
    model = bert()
    first, *others = (
        Stream(model, TOKENIZER, Pass(16, batch_size=size, sample=40))([source])["text"] for size in (1, 5, 64)
    )
    for other in others:
        assert torch.equal(first.sample.numbers, other.sample.numbers)
        for name, figures in first.measures().items():
            for key, value in figures.items():
                assert other.measures()[name][key] == pytest.approx(value, rel=tolerance(key), nan_ok=True), (name, key)


def test_the_sample_is_of_the_points(source: Source) -> None:
    model = bert()
    states, _ = all_states(model, source, 16)
    sample = Stream(model, TOKENIZER, Pass(16, sample=30))([source])["text"].sample
    again = Stream(model, TOKENIZER, Pass(16, sample=30, seed=1))([source])["text"].sample
    for name, points in states.items():
        distances = np.abs(sample.points[name].numpy()[:, None] - points[None]).max(2)
        # A token at the same position of several blocks has the same embedding.
        assert name == "embeddings" or len(set(distances.argmin(1))) == 30
        assert distances.min(1).max() < 1e-10
    assert not torch.equal(sample.numbers, again.numbers)


def test_sources_and_their_union(source: Source, tmp_path: Path) -> None:
    other = Source("other", tmp_path / "other.txt")
    other.path.write_text("\n".join(WORDS * 5))
    model = bert()
    found = Stream(model, TOKENIZER, Pass(16, sample=20))([source, other])
    assert list(found) == ["text", "other", "combined"]
    parts = [all_states(model, own, 16) for own in (source, other)]
    for name, figures in found["combined"].measures().items():
        points, tokens = (np.concatenate(both) for both in zip(*((s[name], t) for s, t in parts), strict=True))
        for key, expected in naive(points, tokens).items():
            assert figures[key] == pytest.approx(expected, rel=tolerance(key), abs=1e-12), (name, key)


def test_an_interrupted_pass_resumes(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    whole = Stream(model, TOKENIZER, Pass(16, batch_size=2, sample=30))([source])["text"]
    monkeypatch.setattr(stream, "SECONDS_BETWEEN_SAVES", 0.0)
    place = tmp_path / "state"
    broken = Stream(model, TOKENIZER, Pass(16, batch_size=2, sample=30), place, "same")
    calls = iter(range(100))

    def breaking(*arguments: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return Stream._update(broken, *arguments)

    monkeypatch.setattr(broken, "_update", breaking)
    with pytest.raises(KeyboardInterrupt):
        broken([source])
    assert len(list(tmp_path.glob("state.*"))) == 1
    going_on = Stream(model, TOKENIZER, Pass(16, batch_size=2, sample=30), place, "same")
    seen: list[int] = []

    def watched(own: Any, inputs: Any, numbers: Any, lengths: Any) -> None:
        seen.extend(numbers)
        Stream._update(going_on, own, inputs, numbers, lengths)

    monkeypatch.setattr(going_on, "_update", watched)
    found = going_on([source])["text"]
    assert seen[0] == 10
    for name, figures in whole.measures().items():
        assert found.measures()[name] == pytest.approx(figures, rel=0, abs=0, nan_ok=True)
    assert not list(tmp_path.glob("state.*"))


@pytest.mark.parametrize("kind", ["foreign", "damaged"])
def test_the_state_of_another_pass_is_ignored(source: Source, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "state.0.0-1"
    torch.save({"identity": "other"}, place) if kind == "foreign" else place.write_bytes(b"PK\x03\x04")
    found = Stream(bert(), TOKENIZER, Pass(16), tmp_path / "state", "same")([source])
    assert found["text"].measures()["layer_1"]["tokens"] == len(all_states(bert(), source, 16)[1])


def test_limits_and_empty_texts(source: Source, tmp_path: Path) -> None:
    found = Stream(bert(), TOKENIZER, Pass(16, limit=40))([source])["text"]
    assert found.measures()["embeddings"]["tokens"] == 48
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match=r"empty\.txt holds no text"):
        Stream(bert(), TOKENIZER, Pass(16))([Source("empty", tmp_path / "empty.txt")])


def test_without_intra_sim(source: Source) -> None:
    figures = Stream(bert(), TOKENIZER, Pass(16, intra=False))([source])["text"].measures()
    assert "intra_sim" not in figures["layer_1"]


# ---- several processes


def share(rank: int, world: int, folder: str, length: int) -> None:
    """Run one process of a shared pass."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    place = Path(folder)
    texts = [Source(name, place / f"{name}.txt") for name in ("text", "other")]
    found = Stream(bert(), TOKENIZER, Pass(length, batch_size=3, sample=30), place / "state", "same")(texts)
    if rank == 0:
        torch.save({name: own.measures() for name, own in found.items()}, place / "measures.pt")
    dist.barrier()
    # Skip the interpreter's shutdown, in which the process group may abort.
    os._exit(0)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_a_pass(source: Source, tmp_path: Path, world: int) -> None:
    (tmp_path / "other.txt").write_text("\n".join(WORDS))
    texts = [source, Source("other", tmp_path / "other.txt")]
    alone = Stream(bert(), TOKENIZER, Pass(64, sample=30))(texts)
    run_in_processes(share, (world, str(tmp_path), 64), world)
    together = torch.load(tmp_path / "measures.pt")
    assert list(together) == list(alone) == ["text", "other", "combined"]
    for name, own in alone.items():
        for tap, figures in own.measures().items():
            for key, value in figures.items():
                expected = pytest.approx(value, rel=tolerance(key), abs=1e-12, nan_ok=True)
                assert together[name][tap][key] == expected, (name, tap, key)
    # The other text is one block, so that some processes read none of it. No state file remains.
    assert not list(tmp_path.glob("state.*"))
