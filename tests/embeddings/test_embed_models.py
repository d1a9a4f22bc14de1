"""`istar embed` on tiny saved models: its page, its files and its errors, checked against computations in numpy."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from istar.cli.main import main
from istar.embeddings import embed_models, token_frequencies
from istar.embeddings.embed_models import FORM_FUNCTIONS
from istar.errors import UserError
from istar.models.embedding_matrix import read_matrix
from istar.models.model_source import ModelSource
from istar.texts import tokenizing
from istar.texts.corpus import Source
from tests.embeddings.builders import (
    INPUT,
    PAIRS,
    ROWS,
    TEXT,
    TOKENIZER,
    UNUSED,
    WIDTH,
    build,
    compute_forms,
    compute_isotropy,
    get_embeddings,
    read_rows,
    save_model,
    write_files,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("blank_figures")
# ---- the page and its files


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, blank_figures: None) -> Path:
    """Return the page of two models with benchmarks and a text, in bins of three tokens."""
    folder = tmp_path_factory.mktemp("page")
    models = [str(save_model(folder / "gpt2")), f"mine={save_model(folder / 'other', 'neox')}"]
    options = [*write_files(folder), "--text", str(folder / "text.txt"), "--out", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_frequencies, "BIN_SIZE", 3)
        assert main(["embed", *models, *options]) == 0
    return folder / "out"


def test_the_page_and_its_files(page: Path) -> None:
    html = (page / "index.html").read_text()
    assert "Embedding matrices of gpt2, mine" in html
    assert "gpt2 is anisotropic because of more than a common shift: I(W) over both signs is " in html
    for name in ("table1", "table2", "table3", "figure4_coverage"):
        assert {path.suffix for path in (page / "tables").glob(f"{name}.*")} == {".csv", ".md", ".tex"}
    for name in (
        "figure1_projection-gpt2", "figure1_projection-mine", "figure1_singular_values", "figure2_spheres",
        "figure2_singular_values", "figure3_unused", "figure4_frequencies", "figure5_norms", "figure6_centering",
        "frequency_norms",
    ):  # fmt: skip
        assert {path.suffix for path in (page / "figures").glob(f"{name}.*")} >= {".svg", ".pdf", ".png"}
    for name in ("embeddings", "wordsim", "unused", "frequency"):
        assert {row["label"] for row in read_rows(page / f"{name}.csv")} == {"gpt2", "mine"}
    assert [row["word"] for row in read_rows(page / "words.csv")][:2] == ["the", "cat"]


def test_measures_equal_their_definitions(page: Path) -> None:
    rows = {row["form"]: row for row in read_rows(page / "embeddings.csv") if row["label"] == "gpt2"}
    record = json.loads((page / "embeddings.json").read_text())["models"][0]
    assert (record["label"], record["tensor"], record["tied"]) == ("gpt2", INPUT["bert"], True)
    forms = compute_forms(get_embeddings())
    assert rows.keys() == forms.keys()
    for form, matrix in forms.items():
        row = rows[form]
        assert float(row["partition_isotropy_both"]) == pytest.approx(compute_isotropy(matrix), rel=1e-5)
        assert float(row["average_norm"]) == pytest.approx(np.linalg.norm(matrix, axis=1).mean(), rel=1e-5)
        assert float(row["mean_vector_norm"]) == pytest.approx(np.linalg.norm(matrix.mean(0)), abs=1e-6)
    spectrum = np.linalg.svd(forms["centered"], compute_uv=False)
    np.testing.assert_allclose(record["figures"]["centered"]["singular_values"], spectrum, rtol=1e-5)


def test_word_similarity(page: Path) -> None:
    rows = [row for row in read_rows(page / "wordsim.csv") if (row["label"], row["benchmark"]) == ("gpt2", "men")]
    forms = compute_forms(get_embeddings())
    assert [row["form"] for row in rows] == list(forms)
    for row in rows:
        vectors = {
            word: forms[row["form"]][TOKENIZER.convert_tokens_to_ids(word)] for *words, _ in PAIRS for word in words
        }
        products = np.array([vectors[a] @ vectors[b] for a, b, _ in PAIRS])
        norms = np.array([np.linalg.norm(vectors[a]) * np.linalg.norm(vectors[b]) for a, b, _ in PAIRS])
        for name, scores in (("cosine", products / norms), ("inner_product", products)):
            expected = np.corrcoef(scores, [rating for *_, rating in PAIRS])[0, 1]
            assert float(row[f"{name}_pearson"]) == pytest.approx(expected, abs=1e-5)
        assert (row["pairs"], row["kept"]) == ("6", "5")


def test_frequency_and_unused_tokens(page: Path) -> None:
    counts = {"the": 4, "cat": 2, "dog": 1, "house": 1, "sees": 1, ".": 1}
    frequencies = [row for row in read_rows(page / "frequency.csv") if row["label"] == "gpt2"]
    assert {json.loads(row["token"]): int(row["count"]) for row in frequencies} == counts
    norms = np.linalg.norm(get_embeddings(), axis=1)
    for row in frequencies:
        assert float(row["norm"]) == pytest.approx(norms[int(row["id"])], rel=1e-6)
    unit_rows = get_embeddings() / norms[:, None]
    unused_ids = TOKENIZER.convert_tokens_to_ids(UNUSED)
    excluded = {*unused_ids, *TOKENIZER.all_special_ids}
    mean_cosines = (unit_rows[unused_ids] @ unit_rows.T).mean(0)
    rows = [row for row in read_rows(page / "unused.csv") if row["label"] == "gpt2"]
    for row in rows:
        if row["order"] == "index":
            ids = [
                i for i in range(int(row["first"]), int(row["last"]) + 1) if i not in excluded and i < len(TOKENIZER)
            ]
        elif row["order"] == "frequency":
            used = [int(other["id"]) for other in frequencies if int(other["id"]) not in excluded]
            ids = used[int(row["first"]) - 1 : int(row["last"])]
        else:
            used = [int(other["id"]) for other in frequencies]
            ids = [i for i in range(len(TOKENIZER)) if i not in excluded and i not in used]
        assert int(row["tokens"]) == len(ids)
        assert float(row["cosine_raw"]) == pytest.approx(mean_cosines[ids].mean(), abs=1e-6)
    assert {row["order"] for row in rows} == {"index", "frequency", "not in the text"}


def test_a_long_document_is_counted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("the cat the dog . " * 30)
    sources = [Source("text", tmp_path / "text.txt")]
    monkeypatch.setattr(tokenizing, "_TOKENIZER_CHARACTERS", 50)
    counts = token_frequencies.count_tokens(sources, TOKENIZER, ROWS)
    expected = {"the": 60, "cat": 30, "dog": 30, ".": 30}
    assert {TOKENIZER.convert_ids_to_tokens(int(index)): counts[index] for index in np.flatnonzero(counts)} == expected
    words = token_frequencies.count_words(sources)
    assert dict(zip(words["word"], words["count"], strict=True)) == expected


def test_which_tokens_are_unused() -> None:
    find = token_frequencies.find_unused_tokens
    assert find(["a", "[unused0]", "[unused12]", "unused", "<unused3>", None]) == [1, 2, 4]
    assert find([str(number) for number in range(1999)]) == []
    assert find([*map(str, range(2000)), None]) == list(range(1000, 2000))


# ---- the processed matrix


def test_the_processed_matrix_and_model_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = save_model(tmp_path / "model"), tmp_path / "out"
    command = ["embed", str(folder), "--out", str(out)]
    assert main([*command, "--form", "all_but_the_top", "--components", "2", "--save", "matrix"]) == 0
    with safe_open(out / "embeddings.safetensors", "pt") as file:
        values = file.get_tensor("input_embeddings").double().numpy()
        assert file.metadata()["form"] == "all_but_the_top"
    assert np.linalg.matrix_rank(values, tol=1e-3) == WIDTH - 2
    tokens = [json.loads(line) for line in (out / "tokens.txt").read_text().splitlines()]
    assert tokens == [*TOKENIZER.convert_ids_to_tokens(range(len(TOKENIZER))), None, None, None]
    # A second call replaces the files. The model's input and output embeddings stay tied.
    (out / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert main([*command, "--form", "centered", "--save", "model"]) == 0
    assert "tied" in capsys.readouterr().out
    assert not (out / "embeddings.safetensors").exists()
    assert (out / "notes.txt").exists()
    model = hf.AutoModelForMaskedLM.from_pretrained(out / "model")
    embeddings = model.get_input_embeddings().weight
    assert embeddings is model.get_output_embeddings().weight
    original = build("bert").get_input_embeddings().weight  # type: ignore[operator]
    torch.testing.assert_close(embeddings, original - original.mean(0))
    assert hf.AutoTokenizer.from_pretrained(out / "model")("the cat")["input_ids"]


@pytest.mark.parametrize(("kind", "name"), [("matrix", "tokens.txt"), ("model", "model/config.json")])
def test_saved_results_stay_until_the_next_save(kind: str, name: str, tmp_path: Path) -> None:
    folder, out = save_model(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["embed", str(folder), "--out", str(out)]
    assert main([*command, "--text", str(tmp_path / "text.txt"), "--save", kind]) == 0
    assert (out / "words.csv").is_file()
    saved = (out / name).read_bytes()
    assert main(command) == 0
    assert not (out / "words.csv").exists()
    assert (out / name).read_bytes() == saved


def test_back_into_an_untied_model(tmp_path: Path) -> None:
    folder, out = save_model(tmp_path / "model", "neox"), tmp_path / "out"
    options = ["--matrix", "output", "--form", "centered", "--save", "model"]
    assert main(["embed", str(folder), "--out", str(out), *options]) == 0
    original: Any = build("neox")
    saved = hf.AutoModelForCausalLM.from_pretrained(out / "model")
    assert torch.equal(saved.get_input_embeddings().weight, original.get_input_embeddings().weight)
    head = original.get_output_embeddings().weight
    torch.testing.assert_close(saved.get_output_embeddings().weight, head - head.mean(0))


def test_the_published_form_subtracts_before_centering(tmp_path: Path) -> None:
    matrix = read_matrix(ModelSource(str(save_model(tmp_path / "model"))))
    values = FORM_FUNCTIONS["all_but_the_top_published"](matrix.values, None)
    weights = get_embeddings()
    centered = weights - weights.mean(0)
    [top] = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, :1].T
    np.testing.assert_allclose(values.double().numpy(), centered - np.outer(weights @ top, top), atol=1e-5)


def test_half_precision_is_widened(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    values = read_matrix(ModelSource(str(folder))).values
    assert torch.equal(values, weights[INPUT["bert"]].float())


# ---- models and errors


@pytest.fixture(scope="module")
def input_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models, benchmarks and a text."""
    folder = tmp_path_factory.mktemp("input")
    for name in ("first", "second"):
        save_model(folder / name)
    write_files(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--components", "2", "--forms", "raw"], "--components needs an all_but_the_top form, but the forms are raw"),
        (["--form", "all_but_the_top", "--components", "99"], "components is 99; expected 0 to 24"),
        (["--forms", "raw,centred"], "--forms=centred is not known; did you mean centered?"),
        (["--wordsim", "nowhere"], "nowhere"),
        (["--text", "nowhere"], "there is no nowhere"),
        (["--wordsim", "MEN,MEN"], "several benchmarks are called MEN.txt; give them names, as in first=<path or id>"),
        (["SECOND", "--form", "centered"], "--form is for a single model; remove it, or call istar embed for each"),
        (["SECOND", "--save", "matrix"], "--save is for a single model"),
        (["FIRST"], "is given twice; give each model once"),
        (["SECOND", "second=FIRST/"], "several models are called second; give them names"),
    ],
)
def test_an_error_is_one_line(
    input_folder: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = input_folder / "first"
    names = {"SECOND": str(input_folder / "second"), "FIRST": str(first), "MEN": str(input_folder / "MEN.txt")}
    for name, path in names.items():
        arguments = [argument.replace(name, path) for argument in arguments]
    assert main(["embed", str(first), *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_embeddings_that_are_not_finite_are_refused_before_any_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [save_model(tmp_path / name) for name in ("first", "second")]
    model = hf.AutoModelForMaskedLM.from_pretrained(folders[1])
    model.get_input_embeddings().weight.data[-1] = math.inf
    model.save_pretrained(folders[1])
    monkeypatch.setattr(embed_models, "measure_embeddings", None)
    assert main(["embed", *map(str, folders), "--out", str(tmp_path / "out")]) == 2
    assert f"the input embeddings of {folders[1]} are not finite" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("value", [0.0, 1.0, 3e38])
def test_equal_rows_have_a_page_and_valid_json(tmp_path: Path, value: float) -> None:
    folder, out = save_model(tmp_path / "model"), tmp_path / "out"
    model = hf.AutoModelForMaskedLM.from_pretrained(folder)
    model.get_input_embeddings().weight.data.fill_(value)
    model.save_pretrained(folder)
    assert main(["embed", str(folder), "--out", str(out)]) == 0
    text = (out / "embeddings.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    measures = json.loads(text)["models"][0]["figures"]
    assert measures["raw"]["average_norm"] == pytest.approx(value * WIDTH**0.5, rel=1e-6)
    assert measures["centered"]["partition_isotropy_both"] is None
    assert ("All rows of each matrix are zero" in (out / "index.html").read_text()) == (value == 0)


def test_the_page_stays_if_the_model_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise UserError("model cannot be written: No space left on device")

    monkeypatch.setattr(embed_models, "save_model", fail)
    out = tmp_path / "out"
    assert main(["embed", str(save_model(tmp_path / "model")), "--save", "model", "--out", str(out)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (out / "index.html").exists()


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("something")
    assert main(["embed", str(save_model(tmp_path / "model")), "--out", str(tmp_path / "out")]) == 2
    assert "is not a folder" in capsys.readouterr().err.splitlines()[-1]
