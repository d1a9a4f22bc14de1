"""The measurements of `istar measure`: their file, the length of blocks, and how documents are fed to the model."""

import copy
import io
import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import transformers as hf
from rich.console import Console

from istar.cli.main import main
from istar.errors import UserError
from istar.geometry.collect import measure, measures_file
from istar.geometry.collect.matrices import summarize_rows
from istar.geometry.collect.measures_file import Measurements, OtherModelError, interval_half_width, t_quantile
from istar.geometry.collect.model_identity import hash_weights
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.geometry.collect.stream import Stream
from istar.geometry.collect.summaries import describe_activations
from istar.measures import Activation, MassiveActivationsSummary
from istar.measures.catalogue import MEASURES_WITH_ERROR
from istar.measures.matrix_forms import MAX_ROWS
from istar.measures.spectrum import decompose_rows
from istar.models.model_source import ModelSource
from istar.texts.corpus import Source
from tests.architectures import MODELS
from tests.geometry.collect.test_stream import SENTENCES, TOKENIZER, bert
from tests.geometry.synthetic import write_measures

FALCON_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}


@pytest.mark.parametrize(
    ("config", "max_length"),
    [
        (hf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50), None),
        (hf.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=50), None),
        (hf.FalconConfig(**FALCON_SIZES, alibi=True, max_position_embeddings=20), None),
        (hf.MptConfig(d_model=32, n_layers=2, n_heads=4, max_seq_len=40, vocab_size=50), 40),
        (hf.BertConfig(max_position_embeddings=100), 100),
        (hf.RobertaConfig(max_position_embeddings=130, pad_token_id=1), 128), (hf.GPT2Config(n_positions=64), 64),
        (hf.FalconConfig(**FALCON_SIZES, max_position_embeddings=20), 20), (MODELS["llama"][0]().config, 2048),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)  # fmt: skip
def test_the_length_is_limited_by_absolute_positions(config: Any, max_length: int | None) -> None:
    model: Any = SimpleNamespace(config=config)
    length = max_length or 5_000
    assert measure._resolve_length(MeasureSettings(length), model).length == length
    assert measure._resolve_length(MeasureSettings(0), model).length == min(length, 512)
    if max_length:
        with pytest.raises(UserError, match=rf"length={length + 1} is too long; .* at most {length} tok"):
            measure._resolve_length(MeasureSettings(length + 1), model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    copy.deepcopy(bert()).float().save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("\n".join(SENTENCES * 3))
    return folder


def open_folder(folder: Path, dtype: str = "float32") -> measure.OpenedModel:
    return measure.open_model(ModelSource(str(folder)), dtype, "cpu")


@pytest.fixture(scope="module")
def measurements(folder: Path) -> Measurements:
    """Return measurements whose TwoNN is not defined, because the sample has two points."""
    sources = [Source(name, folder / "text.txt") for name in ("a", "b")]
    text_pass = measure.plan_pass(open_folder(folder / "model"), sources, MeasureSettings(16, sample=2))
    return measure.measure_texts(text_pass, folder / "out").measurements


def test_undefined_numbers_are_null_in_the_file(measurements: Measurements, tmp_path: Path) -> None:
    assert math.isnan(measurements.sources["a"]["layer_1"]["two_nn"])
    write_measures(measurements, tmp_path)
    text = (tmp_path / measures_file.JSON_FILE).read_text()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse)["sources"]["a"]["layer_1"]["two_nn"] is None
    reread = measures_file.read_measurement(tmp_path / measures_file.JSON_FILE)
    assert math.isnan(reread.sources["a"]["layer_1"]["two_nn"])
    assert reread.model["revision"] is None
    assert reread.settings["limit"] is None
    assert reread.final_norm is None
    assert measures_file.file_contents(reread) == measures_file.file_contents(measurements)


def test_a_list_with_undefined_numbers_is_on_one_line(measurements: Measurements, tmp_path: Path) -> None:
    spectra = {"a": {"layer_1": {"raw": [1.5, math.nan, -2e-7, math.inf]}}}
    write_measures(replace(measurements, spectra=spectra), tmp_path)
    assert "[ 1.5, null, -2e-07, null ]" in (tmp_path / measures_file.JSON_FILE).read_text()
    spectrum = measures_file.read_measurement(tmp_path / measures_file.JSON_FILE).spectra["a"]["layer_1"]["raw"]
    assert spectrum == pytest.approx([1.5, math.nan, -2e-7, math.nan], nan_ok=True)


def test_a_file_of_an_earlier_version_is_refused(measurements: Measurements, tmp_path: Path) -> None:
    write_measures(replace(measurements, format=1), tmp_path)
    with pytest.raises(UserError, match=r"has format 1; this version reads 3; delete the file and"):
        measures_file.read_measurement(tmp_path / measures_file.JSON_FILE)


def change_values(path: Path, **values: Any) -> None:
    """Change values in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tokenizer(model: Path) -> None:
    """Take a word from the model's tokenizer, which then splits it into characters."""
    path = model / "tokenizer.json"
    path.write_text(path.read_text().replace('"garden"', '"gardens"'))


def measure_quickly(model: Path, text: Path, out: Path, names: Sequence[str] = ("a",)) -> tuple[Measurements, bool]:
    """Return measurements, also written to `out`, and whether an earlier call has taken them."""
    console = Console(file=io.StringIO())
    settings, sources = MeasureSettings(16, sample=0, intra=False), [Source(name, text) for name in names]
    text_pass = measure.plan_pass(open_folder(model), sources, settings)
    measured = measure.measure_texts(text_pass, out, console).measurements
    write_measures(measured, out)
    return measured, "measured before" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_changed_configuration_or_tokenizer_is_measured_again(folder: Path, tmp_path: Path) -> None:
    """All results are in the same folder; the weights stay the same."""
    model, text = shutil.copytree(folder / "model", tmp_path / "model"), folder / "text.txt"
    first, is_earlier = measure_quickly(model, text, tmp_path / "out")
    assert not is_earlier
    changes: list[dict[str, Any]] = [{"num_attention_heads": 1}, {"hidden_act": "relu"}, {"layer_norm_eps": 0.1}]
    for values in changes:
        change_values(model / "config.json", **values)
        changed, is_earlier = measure_quickly(model, text, tmp_path / "out")
        assert not is_earlier, values
        assert changed.weights == first.weights
        assert changed.sources["a"]["layer_1"]["isoscore"] != first.sources["a"]["layer_1"]["isoscore"]
    change_tokenizer(model)
    assert not measure_quickly(model, text, tmp_path / "out")[1]
    change_values(model / "config.json", transformers_version="4.1", _name_or_path="elsewhere", dtype="float64")
    assert measure_quickly(model, text, tmp_path / "out")[1]


def test_the_state_of_another_tokenizer(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = shutil.copytree(folder / "model", tmp_path / "model"), folder / "text.txt"
    summarize_source = measure.summarize_source

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "summarize_source", interrupt)  # the first text has been read, and its state saved
    with pytest.raises(KeyboardInterrupt):
        measure_quickly(model, text, tmp_path / "out", ["a", "b"])
    assert list((tmp_path / "out" / ".istar").glob("pass.0.*"))
    monkeypatch.setattr(measure, "summarize_source", summarize_source)
    change_tokenizer(model)
    resumed, _ = measure_quickly(model, text, tmp_path / "out", ["a", "b"])
    assert resumed.sources == measure_quickly(model, text, tmp_path / "other", ["a", "b"])[0].sources


def test_another_device_does_not_resume(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums about the origins of one device cannot be merged with those of another."""
    identities: list[str] = []

    class InterruptedStream(Stream):
        def __init__(self, *arguments: Any) -> None:
            identities.append(arguments[4])
            raise KeyboardInterrupt

    monkeypatch.setattr(measure, "Stream", InterruptedStream)
    for device in ("cpu", "meta", "cpu"):
        monkeypatch.setattr(measure, "find_input_device", lambda _, name=device: torch.device(name))
        with pytest.raises(KeyboardInterrupt):
            measure_quickly(folder / "model", folder / "text.txt", tmp_path / "out")
    assert identities[0] == identities[2] != identities[1]


def test_buffers_of_the_checkpoint_are_weights() -> None:
    model = copy.deepcopy(bert())
    model.register_buffer("derived", torch.tensor(1), persistent=False)
    model.register_buffer("scale", torch.tensor(1.0))
    weights = hash_weights(model, None)
    model.derived.fill_(2)
    assert hash_weights(model, None) == weights
    model.scale.fill_(2)
    assert hash_weights(model, None) != weights


def test_measures_of_another_model_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model has another name, and other weights, another configuration or another tokenizer."""
    text, out = folder / "text.txt", tmp_path / "out"
    measure_quickly(folder / "model", text, out)
    moved = shutil.copytree(folder / "model", tmp_path / "moved")
    measured, is_earlier = measure_quickly(moved, text, out)
    assert is_earlier
    assert measured.model["name"] == str(moved)
    other = shutil.copytree(moved, tmp_path / "other")
    change_values(other / "config.json", hidden_act="relu")
    monkeypatch.setattr(measure, "Stream", None)  # the pass
    with pytest.raises(OtherModelError, match=r"out holds the measures of .*/moved, not of .*/other; expected another"):
        measure_quickly(other, text, out)


@pytest.mark.slow
def test_settings_are_recorded_and_shown(folder: Path, measurements: Measurements, tmp_path: Path) -> None:
    assert (measurements.settings["documents"], measurements.settings["special_tokens"]) == ("separate", "exclude")
    text, out = str(folder / "text.txt"), tmp_path / "out"
    options = ["--documents", "packed", "--special-tokens", "include", "--length", "16", "--out", str(out)]
    assert main(["measure", str(folder / "model"), "--text", text, *options]) == 0
    settings = json.loads((out / measures_file.JSON_FILE).read_text())["settings"]
    assert (settings["documents"], settings["special_tokens"]) == ("packed", "include")
    page_text = (out / "index.html").read_text()
    assert "<code>packed</code>" in page_text
    assert "<code>include</code>" in page_text


@pytest.fixture(scope="module")
def complete_measurements(folder: Path) -> Measurements:
    settings = MeasureSettings(16, measures="all", groups=3)
    text_pass = measure.plan_pass(open_folder(folder / "model"), [Source("a", folder / "text.txt")], settings)
    return measure.measure_texts(text_pass).measurements


def test_tables_have_fields_of_their_own(complete_measurements: Measurements, tmp_path: Path) -> None:
    write_measures(complete_measurements, tmp_path)
    reread = measures_file.read_measurement(tmp_path / measures_file.JSON_FILE)
    assert measures_file.file_contents(reread) == measures_file.file_contents(complete_measurements)
    assert (reread.settings["groups"], reread.settings["measures"]) == (3, "all")
    for tap, measures in reread.sources["a"].items():
        for table in (reread.by_position["a"][tap], reread.by_frequency["a"][tap]):
            assert list(table) == ["first", "last", "points", "norm", "inter_sim"]
            assert sum(table["points"]) == measures["points"]
            mean_norm = np.average(table["norm"], weights=table["points"])
            assert mean_norm == pytest.approx(measures["average_norm"], rel=1e-7)
        assert [scale["n1"] for scale in reread.gride["a"][tap]][:2] == [1, 2]
        assert measures["isoscore_error"] > 0
        assert reread.massive["a"][tap] == []
        replicates = reread.replicates["a"][tap]
        for name in ("isoscore", "inter_sim"):
            # This is the standard error of the mean of the pseudo-values.
            expected_error = scipy.stats.sem((len(replicates[name]) - 1) * np.array(replicates[name]))
            assert measures[f"{name}_error"] == pytest.approx(expected_error, rel=1e-6)
    assert math.isfinite(measures_file.layer_frame(reread)["inter_sim_error"].min())


def test_massive_activations_have_the_text_of_their_token() -> None:
    text, token = max(TOKENIZER.get_vocab().items())
    summary = MassiveActivationsSummary(9, 1, 0.5, 500, 1e5, 2e5, (Activation(-1e5, 3, token, 4),))
    assert describe_activations(summary, TOKENIZER.convert_ids_to_tokens) == [
        {"value": -1e5, "dimension": 3, "token": token, "position": 4, "ratio": 2e5, "text": text}
    ]
    assert describe_activations(replace(summary, median=0.0), str)[0]["ratio"] == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--text is missing; expected a file or folder of text"),
        (["--text", "text.txt", "--groups", "1"], "--groups 1 gives no standard errors; expected at least 2, or 0"),
        (["--text", "text.txt", "--groups", "-1"], "--groups -1 is too small; expected 0 or more"),
    ],
)
def test_refused_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "model", *options]) == 2
    error_output = capsys.readouterr().err
    assert message in error_output
    assert error_output.count("\n") == 1


def test_rows_of_a_matrix() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(5_000, 6) * torch.tensor([5.0, 3, 1, 1, 1, 1]) + 4
    summary = summarize_rows(matrix, decompose_rows(matrix))
    assert summary["ids"][0] == 0
    assert summary["ids"][-1] == 4_999
    assert len(summary["ids"]) == MAX_ROWS
    for form, points in (("raw", matrix), ("centered", matrix - matrix.mean(0))):
        left_vectors, singular_values, _ = np.linalg.svd(points.double().numpy(), full_matrices=False)
        for coordinates, axis in zip(summary[form], (0, 1), strict=True):
            expected = (left_vectors * singular_values)[summary["ids"], axis]
            assert abs(np.corrcoef(coordinates, expected)[0, 1]) == pytest.approx(1, abs=1e-6)
            assert np.abs(coordinates) == pytest.approx(np.abs(expected), rel=1e-3, abs=1e-3)
    assert sum(summary["norms"]["counts"]) == 5_000
    assert summary["norms"]["edges"][0] == pytest.approx(matrix.norm(dim=1).min().item())


def test_rows_have_the_frequencies_of_their_tokens(measurements: Measurements) -> None:
    """Both sources have the same text."""
    counts = Counter(token for line in SENTENCES for token in TOKENIZER(line, add_special_tokens=False)["input_ids"])
    rows = measurements.rows["input"]
    assert rows["counts"] == [2 * 3 * counts[token] for token in rows["ids"]]


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e30])
def test_norms_that_differ_by_rounding_have_a_histogram(scale: float) -> None:
    """The rows have the same numbers in different orders."""
    numbers = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = scale * torch.stack([numbers.roll(shift) for shift in range(50)])
    for rows in (matrix, torch.nn.functional.normalize(torch.randn(50, 50)) if scale == 1 else matrix):
        histogram = summarize_rows(rows, decompose_rows(rows))["norms"]
        assert sum(histogram["counts"]) == 50
        assert histogram["edges"][0] <= rows[0].norm().item() <= histogram["edges"][-1]
        assert all(low < high for low, high in itertools.pairwise(histogram["edges"]))


@pytest.mark.parametrize("offset", [-5.0, 5.0])
def test_directions_have_a_fixed_sign(offset: float) -> None:
    """The largest coordinate of each direction is positive, whatever sign the eigensolver returns."""
    torch.manual_seed(0)
    matrix = 0.1 * torch.randn(50, 3) + torch.tensor([0, offset, 0])
    x, _ = summarize_rows(matrix, decompose_rows(matrix))["raw"]
    assert np.mean(x) == pytest.approx(offset, rel=0.05)


@pytest.mark.parametrize("groups", [2, 3, 10, 40])
def test_the_jackknife_has_students_quantile_and_other_errors_the_normal_one(groups: int) -> None:
    low, high = scipy.stats.t.interval(0.95, groups - 1, loc=0.3, scale=0.02)
    assert interval_half_width("isoscore", 0.02, groups) == pytest.approx((high - low) / 2, rel=1e-12)
    low, high = scipy.stats.norm.interval(0.95, loc=9, scale=0.5)
    assert interval_half_width("two_nn", 0.5, groups) == pytest.approx((high - low) / 2, rel=1e-12)
    # There is no interval without an error or groups.
    assert math.isnan(interval_half_width("isoscore", math.nan, groups))
    assert all(math.isnan(interval_half_width(name, 0.1, 0)) for name in MEASURES_WITH_ERROR)
    assert math.isnan(t_quantile(0))
