"""The three roads to one model: texts, batches, and named modules; sentences; and clouds against float64 by hand."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import istar
from istar.errors import NonFiniteError, UserError
from istar.geometry.collect import measure_batches
from istar.geometry.geometry import Geometry
from istar.models import tiny
from istar.texts import demo

TOKENIZER = tiny.make_tokenizer(demo.vocabulary())
TEXTS = [" ".join(demo.vocabulary()[start : start + 3 + start % 9]) for start in range(5, 125)]
ROADS = ("texts", "batches", "modules")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
    )
    return hf.BertModel(config).double()


def make_batches(size: int = 7) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(TEXTS), size):
        batch = TOKENIZER(
            TEXTS[start : start + size], padding=True, return_tensors="pt", return_special_tokens_mask=True
        )
        yield dict(batch)


@pytest.fixture(scope="module")
def geometries(model: Any) -> dict[str, Geometry]:
    options: dict[str, Any] = {"measures": "all", "sample": 50}
    excluded: dict[str, Any] = {**options, "special_tokens": "exclude"}
    return {
        "texts": istar.measure(model, TEXTS, tokenizer=TOKENIZER, **options),
        "batches": istar.measure(model, make_batches(), **excluded),
        "modules": istar.measure(model, make_batches(13), modules=["encoder.layer.*"], **excluded),
    }


def test_three_roads_to_a_model_agree_in_every_measure(geometries: dict[str, Geometry]) -> None:
    texts, batches, modules = (geometries[road].table for road in ROADS)
    assert texts["two_nn"].notna().all()
    pd.testing.assert_frame_equal(batches, texts, rtol=1e-8, atol=1e-12)
    layers = texts.loc["layer_1":].set_axis(modules.index)
    pd.testing.assert_frame_equal(modules, layers, rtol=1e-8, atol=1e-12)


def test_the_mean_states_of_examples(model: Any, geometries: dict[str, Geometry]) -> None:
    batch = next(make_batches(len(TEXTS)))
    mask = batch.pop("special_tokens_mask") == 0
    with torch.no_grad():
        states = model.eval()(**batch).last_hidden_state
    expected = torch.stack([rows[kept].mean(0) for rows, kept in zip(states, mask, strict=True)])
    for road, state in zip(ROADS, ("layer_3", "layer_3", "encoder.layer.2"), strict=True):
        examples = geometries[road].examples
        assert examples is not None
        assert len(set(examples.ids)) == len(TEXTS)
        torch.testing.assert_close(examples.states[state].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_model_is_as_before(model: Any) -> None:
    model.train()
    model.encoder.layer[1].eval()
    modes = [module.training for module in model.modules()]
    istar.measure(model, TEXTS[:20], tokenizer=TOKENIZER)
    istar.measure(model, make_batches())
    with pytest.raises(UserError, match=r"^the batch has no key labels; expected mask="):
        istar.measure(model, make_batches(), mask="labels")
    assert [module.training for module in model.modules()] == modes
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    # transformers itself leaves hooks where hidden states were asked for.
    assert not [hook for hook in hooks if "istar" in repr(hook)]


def make_cloud(num_points: int = 1_000, dim: int = 12) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(0)
    return np.asarray(random.normal(size=(num_points, dim)) * np.linspace(1, 3, dim) + 2)


def compute_isoscore(points: np.ndarray[Any, Any]) -> float:
    variances = np.linalg.eigvalsh(np.cov(points.T, bias=True))
    return float((variances.sum() ** 2 / np.square(variances).sum() - 1) / (len(variances) - 1))


def compute_inter_sim(points: np.ndarray[Any, Any]) -> float:
    units = points / np.linalg.norm(points, axis=1, keepdims=True)
    total = np.square(units.sum(0)).sum()
    return float((total - len(units)) / (len(units) * (len(units) - 1)))


def test_a_cloud_against_float64() -> None:
    points = make_cloud(20_000)
    geometry = istar.measure(points, measures="all")
    assert geometry.states == ("points",)
    row = geometry.table.loc["points"]
    assert row["points"] == len(points)
    assert row["isoscore"] == pytest.approx(compute_isoscore(points), rel=1e-10)
    assert row["inter_sim"] == pytest.approx(compute_inter_sim(points), rel=1e-10)
    assert row["average_norm"] == pytest.approx(np.linalg.norm(points, axis=1).mean(), rel=1e-10)
    variances = np.linalg.eigvalsh(np.cov(points.T))[::-1]
    expected = 1 + np.searchsorted(np.cumsum(variances) / variances.sum(), 0.95)
    assert row["dimensions_95"] == expected
    np.testing.assert_allclose(geometry.spectra["points"], np.sqrt(variances * (len(points) - 1)), rtol=1e-7)


def test_neighbours_are_among_all_rows_of_a_small_cloud() -> None:
    """A sample of 50 of 600 rows would separate nearly all copies."""
    copies = np.repeat(make_cloud(300), 2, axis=0)
    assert istar.measure(copies, measures="all", sample=50)["near_duplicates"]["points"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_narrow_points_are_summed_in_wider_numbers(dtype: torch.dtype, scale: float) -> None:
    points = (torch.from_numpy(make_cloud()) * scale).to(dtype)
    row = istar.measure(points).table.loc["points"]
    exact = points.double().numpy()
    assert row["isoscore"] == pytest.approx(compute_isoscore(exact), rel=1e-6)
    assert row["inter_sim"] == pytest.approx(compute_inter_sim(exact), rel=1e-6)


def test_a_shift_of_many_deviations_and_a_sorted_file(tmp_path: Any) -> None:
    points = make_cloud(9_000) + 1e4
    points = points[points[:, 0].argsort()]
    np.save(tmp_path / "sorted.npy", points.astype("float32"))
    row = istar.measure(tmp_path / "sorted.npy").table.loc["sorted"]
    exact = np.load(tmp_path / "sorted.npy").astype("float64")
    assert row["isoscore"] == pytest.approx(compute_isoscore(exact), rel=1e-5)
    assert row["mean_kurtosis"] == pytest.approx(pd.DataFrame(exact).kurt().mean(), abs=2e-3)


def test_clouds_of_several_widths_and_the_gap_between_their_means() -> None:
    first, second = make_cloud(300), make_cloud(300)[::-1] * 2
    geometry = istar.measure({"a": first, "b": torch.tensor(second.copy()), "c": make_cloud(200, 5)}, pairs=False)
    assert geometry.states == ("a", "b", "c")
    assert geometry["isoscore"]["b"] == pytest.approx(compute_isoscore(second), rel=1e-9)
    [gap] = geometry.gaps.to_dict("records")
    means = first.mean(0), second.mean(0)
    assert gap["distance"] == pytest.approx(np.linalg.norm(means[0] - means[1]), rel=1e-9)
    assert gap["cosine"] == pytest.approx(means[0] @ means[1] / np.prod([np.linalg.norm(mean) for mean in means]))
    [paired] = istar.measure({"a": first, "b": second}, pairs=True).measurements.gaps
    units = [points / np.linalg.norm(points, axis=1, keepdims=True) for points in (first, second)]
    assert paired["alignment"] == pytest.approx(np.square(units[0] - units[1]).sum(1).mean(), rel=1e-9)
    [limited] = istar.measure({"a": first, "b": second}, pairs=True, limit=100).measurements.gaps
    assert limited["alignment"] == pytest.approx(np.square(units[0] - units[1])[:100].sum(1).mean(), rel=1e-9)
    with pytest.raises(UserError, match=r"^a and c have different shapes; pairs need"):
        istar.measure({"a": first, "c": make_cloud(200, 5)}, pairs=True)


def test_clouds_of_different_sizes_have_their_own_groups() -> None:
    clouds = {"a": make_cloud(300), "b": make_cloud(200)}
    users = {name: [row // 10 for row in range(len(points))] for name, points in clouds.items()}
    together = istar.measure(clouds, groups=users).table
    for name, points in clouds.items():
        alone = istar.measure({name: points}, groups=users[name]).table
        pd.testing.assert_frame_equal(together.loc[[name]], alone)


def test_errors_leave_out_tenths_of_the_groups() -> None:
    """Rows of a group are equal, so that the error is that of as many rows as groups."""
    points = make_cloud(200)
    copies = np.repeat(points, 5, axis=0)
    error = istar.measure(points)["average_norm_error"]["points"]
    users = np.repeat(np.arange(200), 5)
    grouped = istar.measure(copies, groups=users)
    assert grouped["average_norm_error"]["points"] == pytest.approx(error, rel=0.5)
    assert istar.measure(copies)["average_norm_error"]["points"] < 0.7 * error
    assert grouped.measurements.groups == {"points": 200}
    norms = np.linalg.norm(copies, axis=1)
    without = np.array([norms[users % 10 != group].mean() for group in range(10)])
    expected = np.sqrt(9 / 10 * np.square(without - without.mean()).sum())
    assert grouped["average_norm_error"]["points"] == pytest.approx(expected, rel=1e-9)


def test_equal_ids_pair_two_clouds() -> None:
    points = make_cloud(400)
    ids = [f"row {index}" for index in range(400)]
    first, second = (istar.measure(cloud, ids=ids) for cloud in (points, points * np.linspace(1, 2, 12)))
    table = istar.compare({"a": first, "b": second}).table
    assert set(table.dropna(subset="low")["method"]) == {"paired"}
    unpaired = istar.compare({"a": istar.measure(points), "b": istar.measure(points)}).table
    assert set(unpaired.dropna(subset="low")["method"]) == {"independent"}


@pytest.mark.parametrize(
    ("source", "inputs", "options", "message"),
    [
        (make_cloud(), None, {"lenght": 3}, "istar.measure takes no lenght for points; expected key, "),
        (make_cloud(), None, {"sampel": 3}, "istar.measure takes no sampel for points; did you mean sample"),
        (make_cloud(), None, {"groups": [0, 1]}, "there are only 2 groups; expected one for each"),
        (make_cloud(), None, {"groups": [0] * 1_000}, "groups are all the same; standard errors need at least 2"),
        (make_cloud(), None, {"ids": ["a"] * 1_000}, "ids has 'a' twice; expected a different id for each"),
        (make_cloud(), None, {"groups": np.ones((1_000, 2))}, "groups has several dimensions; expected one value"),
        (make_cloud(), None, {"limit": 0}, "limit=0 is too small; expected 1 or more"),
        (make_cloud(), None, {"limit": -5}, "limit=-5 is too small; expected 1 or more"),
        (make_cloud(), None, {"sample": -1}, "sample=-1 is too small; expected 0 or more"),
        (make_cloud(), None, {"sample": "all"}, "sample='all' is a str; expected a whole number"),
        (make_cloud(), None, {"seed": None}, "seed=None is a NoneType; expected a whole number"),
        (nn.Linear(2, 2), {"x": torch.ones(4, 2)}, {}, "the inputs are a single batch; expected batches"),
        (make_cloud(), None, {"ids": ["a"]}, "there are only 1 ids; expected one for each row or example"),
        (torch.ones(9, 3), None, {}, "points: all 9 rows are equal; expected points that differ"),
        (make_cloud(3), None, {}, "points: 3 points are too few; expected 4 or more"),
        (nn.Linear(2, 2), None, {}, "a model needs texts or batches: istar.measure"),
        (nn.Linear(2, 2), [], {}, "the batches are empty or read already; expected at least one"),
        (nn.Linear(2, 2), ["a text"], {}, "texts need a tokenizer: istar.measure"),
        ("bert-base", None, {}, "bert-base is not a file of vectors, such as .npy or .parquet; a model needs texts"),
        (make_cloud(), None, {"pairs": True}, "pairs are rows of two clouds; expected a dictionary of clouds"),
        ({"a": make_cloud()}, None, {"ids": {"b": [1]}}, "ids lacks a; expected a key for each cloud, or one list"),
        (nn.Linear(2, 2), torch.ones(4, 2), {"modules": ["*"]}, "inputs are a Tensor; expected batches, as in"),
        (nn.Sequential(nn.Linear(2, 2)), [torch.ones(3, 2)], {"modules": ["*"]}, "0 has 3 places that count; expected"),
        (nn.Sequential(nn.Linear(2, 2)), [torch.ones(9, 2)], {"modules": ["*"], "groups": {"a": []}},
         "groups is a dictionary; expected a list"),
        (nn.Linear(2, 2), TEXTS, {"tokenizer": 1, "batch_tokens": 0}, "batch_tokens=0 is too small"),
        (nn.Linear(2, 2), TEXTS, {"tokenizer": 1, "special_tokens": "no"}, "special_tokens=no is not known"),
        (nn.Linear(2, 2), TEXTS, {"tokenizer": 1, "groups": [0, 1], "documents": "packed"}, "groups are of texts that"),
        (nn.Linear(2, 2), {"combined": TEXTS, "b": TEXTS}, {"tokenizer": 1}, "combined is the name of all texts"),
        (nn.Linear(2, 2), "one text", {"tokenizer": 1}, "'one text' is no file, folder or data set of the hub"),
        (nn.Linear(2, 2), [torch.ones(2, 2)], {"tokenizer": 1}, "texts: a text is a Tensor; expected strings"),
        (3, ["a text"], {}, "a int is neither a model nor the name of one"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(source: Any, inputs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        istar.measure(source, inputs, **options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_rows_that_are_not_finite_are_counted() -> None:
    points = make_cloud(9_000)
    points[[8_500, 8_700], 3] = np.nan
    with pytest.raises(NonFiniteError, match=r"2 of 9000 rows are not finite, the first at index 8500"):
        istar.measure(points)


def test_an_exhausted_loader_is_refused(model: Any) -> None:
    batches = make_batches()
    list(batches)
    with pytest.raises(UserError, match="the batches are empty or read already"):
        istar.measure(model, batches)


def test_a_limit_ends_the_pass(model: Any) -> None:
    read = []

    def count() -> Iterator[dict[str, Tensor]]:
        for batch in itertools.cycle(make_batches()):
            read.append(batch)
            yield batch

    geometry = istar.measure(model, count(), limit=100)
    assert 100 <= geometry["points"].iloc[0] < 200
    assert len(read) < 5
    assert istar.measure(make_cloud(), limit=50)["points"]["points"] == 50


@pytest.mark.parametrize("road", ["texts", "batches"])
def test_few_groups_of_examples_give_errors(model: Any, road: str) -> None:
    """Three groups are fewer than those that the examples would otherwise be divided into."""
    users = [number % 3 for number in range(len(TEXTS))]
    if road == "texts":
        geometry = istar.measure(model, TEXTS, tokenizer=TOKENIZER, groups=users)
    else:
        geometry = istar.measure(model, make_batches(), special_tokens="exclude", groups=users)
    batch = next(make_batches(len(TEXTS)))
    mask = batch.pop("special_tokens_mask") == 0
    with torch.no_grad():
        states = model.eval()(**batch).last_hidden_state
    groups = torch.tensor(users)[:, None].expand_as(mask)
    without = np.array([compute_inter_sim(states[mask & (groups != group)].numpy()) for group in range(3)])
    expected = np.sqrt(2 / 3 * np.square(without - without.mean()).sum())
    assert geometry["inter_sim_error"]["layer_3"] == pytest.approx(expected, rel=1e-6)
    assert set(geometry.measurements.groups.values()) == {3}
    assert "3 groups" in geometry._repr_html_()


def test_groups_of_several_clouds_may_be_an_iterator() -> None:
    clouds = {"a": make_cloud(300), "b": make_cloud(300) + 1}
    users = [row // 10 for row in range(300)]
    pd.testing.assert_frame_equal(
        istar.measure(clouds, groups=iter(users)).table, istar.measure(clouds, groups=users).table
    )


def test_rows_beyond_the_limit_are_not_looked_at() -> None:
    points = make_cloud(3_000)
    expected = istar.measure(points[:500]).table
    points[1_000:] = np.nan
    pd.testing.assert_frame_equal(istar.measure(points, limit=500).table, expected, rtol=1e-7)


def test_batches_without_places_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last batch are empty, and the last one waits alone for being added."""
    monkeypatch.setattr(measure_batches, "UPDATE_POINTS", 1)
    states = torch.randn(6, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masks = torch.ones(6, 3, 5)
    masks[[0, 5]] = 0
    masks[1:3, :, 1:] = 0  # the first batches with rows have only first places
    batches = [{"input": points, "mask": mask} for points, mask in zip(states, masks, strict=True)]
    geometry = istar.measure(nn.Sequential(nn.Identity()), batches, modules=["0"], mask="mask")
    points = states[masks.bool()].numpy()
    assert geometry["points"]["0"] == len(points)
    assert geometry["isoscore"]["0"] == pytest.approx(compute_isoscore(points), rel=1e-9)
    with pytest.raises(UserError, match=r"^0 has 0 places that count; expected at least 4$"):
        istar.measure(nn.Sequential(nn.Identity()), batches[:1], modules=["0"], mask="mask")


def test_positions_of_batches_that_begin_with_single_places() -> None:
    batches = [torch.randn(5, num_places, 4) for num_places in (1, 3)]
    geometry = istar.measure(nn.Sequential(nn.Identity()), batches, modules=["0"])
    assert geometry.measurements.by_position["batches"]["0"]["points"] == [10, 5, 5]


@pytest.mark.parametrize("road", [*ROADS, "points"])
def test_the_default_device_of_torch_does_not_matter(model: Any, road: str) -> None:
    """The device `meta` stands for a GPU: tensors on it and on the CPU do not mix."""
    points, batches, users = make_cloud(200), list(make_batches()), [number % 12 for number in range(200)]
    measure: Any = {
        "texts": lambda: istar.measure(model, TEXTS, tokenizer=TOKENIZER, groups=users[:120], measures="all"),
        "batches": lambda: istar.measure(model, batches, groups=users[:120], measures="all"),
        "modules": lambda: istar.measure(model, batches, modules=["pooler"], special_tokens="exclude"),
        "points": lambda: istar.measure({"a": points, "b": points}, groups=users, ids=range(200), measures="all"),
    }[road]
    expected = measure()
    with torch.device("meta"):
        geometry = measure()
        istar.compare({"a": expected, "b": geometry})
    pd.testing.assert_frame_equal(geometry.table, expected.table)
