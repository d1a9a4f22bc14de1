"""`istar embed` on tiny saved models, checked against computations in numpy."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from istar.cli.main import main
from istar.embeddings import embed
from istar.errors import UserError
from istar.inputs import tiny
from istar.inputs.embedding_matrix import read_matrix, read_untied_output
from istar.records.config import ModelConfig
from tests.mock_hub import Repository, serving, set_offline, use

UNUSED = [f"[unused{number}]" for number in range(5)]
TOKENIZER = tiny.make_tokenizer([*UNUSED, *["the", "cat", "dog", "house", "garden", "sees"]])
ROWS, WIDTH = len(TOKENIZER) + 3, 24
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48
}  # fmt: skip
INPUT = {"bert": "bert.embeddings.word_embeddings.weight", "neox": "gpt_neox.embed_in.weight"}


def build(kind: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    if kind == "bert":  # tied
        model: Any = hf.BertForMaskedLM(hf.BertConfig(**SHAPE))
    else:  # untied
        model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE, bos_token_id=1, eos_token_id=1))
    with torch.no_grad():  # a mean that is not zero, so that centering changes something
        model.get_input_embeddings().weight.copy_(torch.randn(ROWS, WIDTH) + torch.linspace(-1, 1, WIDTH))
    return model


def save_model(folder: Path, kind: str = "bert", **settings: Any) -> Path:
    build(kind).save_pretrained(folder, **settings)
    TOKENIZER.save_pretrained(folder)
    return folder


def compute_isotropy(matrix: np.ndarray) -> float:
    """Compute I(W) over both signs by its definition."""
    _, vectors = np.linalg.eigh(matrix.T @ matrix)
    z = np.exp(matrix @ np.concatenate([vectors, -vectors], 1)).sum(0)
    return float(z.min() / z.max())


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(folder: Path, out: Path, *arguments: str) -> int:
    return main(["embed", str(folder), "--out", str(out), *arguments])


def test_measures_equal_their_definitions(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    assert run(folder, tmp_path / "out", "--form", "scaled_centered") == 0
    weights = build("bert").get_input_embeddings().weight.detach().double().numpy()  # type: ignore[operator]
    norms = np.linalg.norm(weights, axis=1, keepdims=True)
    centered = weights - weights.mean(0)
    directions = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, : math.ceil(WIDTH / 100)]
    matrix_by_form = {
        "raw": weights,
        "centered": centered,
        "all_but_the_top": centered - centered @ directions @ directions.T,
        "scaled_centered": weights - norms * (weights / norms).mean(0),
    }
    row_by_form = {row["form"]: row for row in read_rows(tmp_path / "out" / "embeddings.csv")}
    assert row_by_form.keys() == matrix_by_form.keys()
    for form, matrix in matrix_by_form.items():
        row = row_by_form[form]
        assert float(row["partition_isotropy_both"]) == pytest.approx(compute_isotropy(matrix), rel=1e-5)
        assert float(row["average_norm"]) == pytest.approx(np.linalg.norm(matrix, axis=1).mean(), rel=1e-5)
        assert float(row["mean_vector_norm"]) == pytest.approx(np.linalg.norm(matrix.mean(0)), abs=1e-6)
    record = json.loads((tmp_path / "out" / "embeddings.json").read_text())
    assert (record["tensor"], record["tied"]) == (INPUT["bert"], True)
    spectrum = np.linalg.svd(matrix_by_form["centered"], compute_uv=False)
    np.testing.assert_allclose(record["figures"]["centered"]["singular_values"], spectrum, rtol=1e-5)


def overwrite_other_tensors(path: Path, tensor: str) -> None:
    """Overwrite all tensors of a safetensors file except one with NaN."""
    content = bytearray(path.read_bytes())
    header_size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_size])
    for name, entry in header.items():
        if name not in ("__metadata__", tensor):
            start, end = (8 + header_size + offset for offset in entry["data_offsets"])
            content[start:end] = b"\xff" * (end - start)
    path.write_bytes(content)


def test_the_rest_of_the_file_is_not_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    overwrite_other_tensors(folder / "model.safetensors", INPUT["bert"])
    matrix = read_matrix(ModelConfig(name=str(folder)))
    assert torch.equal(matrix.values, build("bert").get_input_embeddings().weight)  # type: ignore[operator]
    assert matrix.tied
    assert (matrix.tensor, matrix.file) == (INPUT["bert"], "model.safetensors")


@pytest.mark.parametrize("which", ["input", "output"])
def test_other_shards_may_be_missing(tmp_path: Path, which: Any) -> None:
    folder = save_model(tmp_path / "model", "neox", max_shard_size="12KB")
    shard_by_tensor = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    [shard] = {file for name, file in shard_by_tensor.items() if name in (
        {INPUT["neox"]} if which == "input" else {"lm_head.weight", "embed_out.weight"}
    )}  # fmt: skip
    other_shards = set(shard_by_tensor.values()) - {shard}
    assert other_shards
    for file in other_shards:
        (folder / file).unlink()
    matrix = read_matrix(ModelConfig(name=str(folder)), which)
    model: Any = build("neox")
    expected = model.get_input_embeddings() if which == "input" else model.get_output_embeddings()
    assert torch.equal(matrix.values, expected.weight)
    assert matrix.file == shard
    assert not matrix.tied
    (folder / shard).unlink()
    with pytest.raises(UserError, match=f"lacks {shard}"):
        read_matrix(ModelConfig(name=str(folder)), which)


def test_tensor_names_with_and_without_a_head(tmp_path: Path) -> None:
    """Checkpoints of GPT-2 and others were written without the head that their config names."""
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights_without_prefix = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    save_file(weights_without_prefix, folder / "model.safetensors")
    matrix = read_matrix(ModelConfig(name=str(folder)))
    assert torch.equal(matrix.values, weights[INPUT["bert"]])
    assert matrix.file == "model.safetensors"


def test_pythia_has_a_former_name_for_its_output_embeddings(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "neox")
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight") if "lm_head.weight" in weights else weights.pop("embed_out.weight")
    save_file({**weights, "embed_out.weight": head}, folder / "model.safetensors")
    matrix = read_untied_output(ModelConfig(name=str(folder)))
    assert matrix is not None
    assert matrix.tensor == "embed_out.weight"
    assert torch.equal(matrix.values, head)


def test_without_safetensors_the_model_is_loaded_but_no_code_from_it(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    matrix = read_matrix(ModelConfig(name=str(folder)))
    assert torch.equal(matrix.values, weights[INPUT["bert"]])
    assert matrix.file is None
    torch.save({**weights, "more": Path("code")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights"):
        read_matrix(ModelConfig(name=str(folder)))


def test_from_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "hub" / "models--some--model"
    save_model(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "step10").write_text("abc")
    with serving() as hub:
        use(hub, tmp_path, monkeypatch)
        set_offline(True, monkeypatch)
        command = ["embed", "some/model", "--out", str(tmp_path / "out")]
        assert main([*command, "--revision", "step10"]) == 0
        assert read_rows(tmp_path / "out" / "embeddings.csv")[0]["revision"] == "step10"
        capsys.readouterr()
        assert main([*command, "--revision", "step20"]) == 2
        assert hub.requests == []
    [line] = capsys.readouterr().err.splitlines()
    assert "not in the local cache" in line


def test_one_shard_is_brought_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "model", "neox", max_shard_size="12KB")
    shard_by_tensor = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    with serving() as hub:
        hub.repositories["models/some/model"] = Repository()
        hub.repositories["models/some/model"].push(
            {path.name: path.read_bytes() for path in folder.iterdir()}, "step10"
        )
        use(hub, tmp_path / "cache", monkeypatch)
        assert main(["embed", "some/model", "--revision", "step10", "--out", str(tmp_path / "out")]) == 0
    requested_files = {request.rpartition("/")[2] for request in hub.requests if request.startswith("GET")}
    assert {name for name in requested_files if name.endswith(".safetensors")} == {shard_by_tensor[INPUT["neox"]]}


# ---- files that are written


def test_the_matrix_and_its_tokens(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    assert run(folder, tmp_path / "out", "--form", "all_but_the_top", "--components", "2", "--save", "matrix") == 0
    with safe_open(tmp_path / "out" / "embeddings.safetensors", "pt") as file:
        values = file.get_tensor("input_embeddings").double().numpy()
        assert file.metadata()["form"] == "all_but_the_top"
    assert np.linalg.matrix_rank(values, tol=1e-3) == WIDTH - 2
    tokens = [json.loads(line) for line in (tmp_path / "out" / "tokens.txt").read_text().splitlines()]
    assert tokens == [*TOKENIZER.convert_ids_to_tokens(range(len(TOKENIZER))), None, None, None]


def test_the_published_form_subtracts_before_centering(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    assert run(folder, tmp_path / "out", "--form", "all_but_the_top_published", "--save", "matrix") == 0
    values = load_file(tmp_path / "out" / "embeddings.safetensors")["input_embeddings"].double().numpy()
    weights = build("bert").get_input_embeddings().weight.detach().double().numpy()  # type: ignore[operator]
    centered = weights - weights.mean(0)
    [top] = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, :1].T
    np.testing.assert_allclose(values, centered - np.outer(weights @ top, top), atol=1e-5)


def test_back_into_a_tied_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model")
    assert run(folder, tmp_path / "out", "--form", "centered", "--save", "model") == 0
    assert "tied" in capsys.readouterr().out
    model = hf.AutoModelForMaskedLM.from_pretrained(tmp_path / "out" / "model")
    embeddings = model.get_input_embeddings().weight
    assert embeddings is model.get_output_embeddings().weight
    original_embeddings = build("bert").get_input_embeddings().weight  # type: ignore[operator]
    torch.testing.assert_close(embeddings, original_embeddings - original_embeddings.mean(0))
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "out" / "model")("the cat")["input_ids"]
    # A second call replaces the model.
    assert run(folder, tmp_path / "out", "--save", "model") == 0
    assert torch.equal(read_matrix(ModelConfig(name=str(tmp_path / "out" / "model"))).values, original_embeddings)


def test_back_into_an_untied_model(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "neox")
    assert run(folder, tmp_path / "out", "--matrix", "output", "--form", "centered", "--save", "model") == 0
    original_model: Any = build("neox")
    saved_model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert torch.equal(saved_model.get_input_embeddings().weight, original_model.get_input_embeddings().weight)
    head = original_model.get_output_embeddings().weight
    torch.testing.assert_close(saved_model.get_output_embeddings().weight, head - head.mean(0))


# ---- words


def test_word_similarity_of_the_form_and_of_raw(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    pairs = [("cat", "dog", 40), ("house", "garden", 30), ("cat", "garden", 3), ("house", "dog", 11)]
    benchmark = tmp_path / "men.txt"
    benchmark.write_text("".join(f"{a} {b} {rating}\n" for a, b, rating in [*pairs, ("cat", "unheard", 1)]))
    assert run(folder, tmp_path / "out", "--form", "centered", "--wordsim", str(benchmark)) == 0
    rows = read_rows(tmp_path / "out" / "wordsim.csv")
    assert [row["form"] for row in rows] == ["raw", "centered"]
    weights = build("bert").get_input_embeddings().weight.detach().double().numpy()  # type: ignore[operator]
    for row, matrix in zip(rows, (weights, weights - weights.mean(0)), strict=True):
        vectors = {word: matrix[TOKENIZER.convert_tokens_to_ids(word)] for pair in pairs for word in pair[:2]}
        scores = [
            vectors[a] @ vectors[b] / np.linalg.norm(vectors[a]) / np.linalg.norm(vectors[b]) for a, b, _ in pairs
        ]
        expected = np.corrcoef(scores, [rating for *_, rating in pairs])[0, 1]
        assert float(row["cosine_pearson"]) == pytest.approx(expected, abs=1e-5)
        assert (row["pairs"], row["kept"]) == ("5", "4")


def test_a_benchmark_without_known_words_gives_a_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model")
    benchmark = tmp_path / "men.txt"
    benchmark.write_text("unheard words 3\nof others 4\n")
    known_benchmark = tmp_path / "known.txt"
    known_benchmark.write_text("cat dog 3\nthe house 4\ngarden sees 1\n")
    assert run(folder, tmp_path / "out", "--wordsim", str(known_benchmark)) == 0
    assert (tmp_path / "out" / "wordsim.csv").exists()
    capsys.readouterr()
    assert run(folder, tmp_path / "out", "--wordsim", str(benchmark)) == 0
    assert "0 of 2 pairs have vectors" in capsys.readouterr().out
    assert not (tmp_path / "out" / "wordsim.csv").exists()


def test_a_constant_score_is_undefined_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model")
    benchmark = tmp_path / "men.txt"
    benchmark.write_text("cat dog 4\nhouse garden 4\ncat garden 4\n")
    assert run(folder, tmp_path / "out", "--wordsim", str(benchmark)) == 0
    for row in read_rows(tmp_path / "out" / "wordsim.csv"):
        assert row["cosine_pearson"] == row["inner_product_spearman"] == ""
        assert row["note"] == "cosine: the rating is constant; inner product: the rating is constant"
    output = " ".join(capsys.readouterr().out.split())
    assert "nan" not in output
    assert "men, raw: cosine: the rating is constant" in output


def test_frequency_and_unused_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "BIN_SIZE", 3)
    folder = save_model(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the cat the dog\n\nthe house sees the cat\n")
    assert run(folder, tmp_path / "out", "--form", "centered", "--text", str(text)) == 0
    counts = {"the": 4, "cat": 2, "dog": 1, "house": 1, "sees": 1}
    frequency_rows = read_rows(tmp_path / "out" / "frequency.csv")
    assert {json.loads(row["token"]): int(row["count"]) for row in frequency_rows} == counts
    assert [int(row["rank"]) for row in frequency_rows] == [1, 2, 3, 4, 5]
    assert [json.loads(row["token"]) for row in frequency_rows][:2] == ["the", "cat"]
    assert float(frequency_rows[1]["cumulative_share"]) == pytest.approx(6 / 9)

    weights = build("bert").get_input_embeddings().weight.detach().double().numpy()  # type: ignore[operator]
    unit_rows = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    unused_ids = TOKENIZER.convert_tokens_to_ids(UNUSED)
    rows = read_rows(tmp_path / "out" / "unused.csv")
    [first_bin] = [row for row in rows if row["order"] == "frequency" and row["first"] == "1"]
    most_frequent_ids = [int(row["id"]) for row in frequency_rows[:3]]
    expected = np.mean(
        [unit_rows[unused_id] @ unit_rows[member_id] for unused_id in unused_ids for member_id in most_frequent_ids]
    )
    assert float(first_bin["cosine_raw"]) == pytest.approx(expected, abs=1e-6)
    assert first_bin["occurrences"] == "7"
    index_bins = [row for row in rows if row["order"] == "index"]
    excluded_ids = {*unused_ids, *TOKENIZER.all_special_ids}
    assert sum(int(row["tokens"]) for row in index_bins) == len(TOKENIZER) - len(excluded_ids)
    for row in index_bins:
        member_ids = [
            token_id
            for token_id in range(int(row["first"]), int(row["last"]) + 1)
            if token_id not in excluded_ids and token_id < len(TOKENIZER)
        ]
        expected = np.mean(
            [unit_rows[unused_id] @ unit_rows[member_id] for unused_id in unused_ids for member_id in member_ids]
        )
        assert float(row["cosine_raw"]) == pytest.approx(expected, abs=1e-6)
    [bin_of_unseen_tokens] = [row for row in rows if row["order"] == "not in the text"]
    assert int(bin_of_unseen_tokens["tokens"]) == len(TOKENIZER) - len(excluded_ids) - len(counts)


def test_which_tokens_are_unused() -> None:
    assert embed.find_unused_tokens(["a", "[unused0]", "[unused12]", "unused", "<unused3>", None]) == [1, 2, 4]
    assert embed.find_unused_tokens([str(number) for number in range(1999)]) == []
    assert embed.find_unused_tokens([*map(str, range(2000)), None]) == list(range(1000, 2000))


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--components", "2"], "--components needs an all_but_the_top form, but --form is raw"),
        (["--form", "all_but_the_top", "--components", "99"], "components is 99; expected 0 to 24"),
        (["--revision", "main"], "needs a model of the hub"),
        (["--wordsim", "nowhere"], "nowhere"),
        (["--text", "nowhere"], "there is no nowhere"),
    ],
)
def test_an_error_is_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "model")
    capsys.readouterr()  # discard the progress bars of transformers
    assert run(folder, tmp_path / "out", *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model")
    (tmp_path / "out").write_text("something")
    capsys.readouterr()
    assert run(folder, tmp_path / "out") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "is not a folder" in line


def test_half_precision_is_widened(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    assert run(folder, tmp_path / "out", "--form", "centered", "--save", "matrix") == 0
    saved_matrix = load_file(tmp_path / "out" / "embeddings.safetensors")["input_embeddings"]
    double_matrix = weights[INPUT["bert"]].double()
    torch.testing.assert_close(saved_matrix.double(), double_matrix - double_matrix.mean(0), atol=1e-6, rtol=0)


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = ModelConfig(name=str(folder))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:5000])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        read_matrix(config)
    (folder / "model.safetensors").write_bytes(content)
    model_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model_config, "hidden_size": 32}))
    with pytest.raises(UserError, match="not of one model"):
        read_matrix(config)
    (folder / "config.json").write_text(json.dumps({**model_config, "architectures": ["BertModel"]}))
    with pytest.raises(UserError, match="no output embeddings"):
        read_matrix(config, "output")
    assert read_untied_output(config) is None
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="not an index"):
        read_matrix(config)


@pytest.mark.slow
def test_real_embeddings_and_benchmarks(tmp_path: Path, real_data: Path, minilm: Path) -> None:
    """The raw MiniLM vectors agree with human ratings about as well as those of the models in the paper."""
    files = sorted((real_data / "wordsim").iterdir())
    arguments = [argument for file in files for argument in ("--wordsim", str(file))]
    assert run(minilm, tmp_path, "--form", "all_but_the_top", *arguments) == 0
    rows = read_rows(tmp_path / "wordsim.csv")
    assert len({row["benchmark"] for row in rows}) == len(files)
    assert all(0.4 < float(row["cosine_pearson"]) < 0.9 for row in rows)
    isotropy_by_form = {
        row["form"]: float(row["partition_isotropy_both"]) for row in read_rows(tmp_path / "embeddings.csv")
    }
    assert isotropy_by_form["raw"] < isotropy_by_form["centered"] < isotropy_by_form["all_but_the_top"] < 1


def test_another_model_does_not_replace_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, out = save_model(tmp_path / "first"), save_model(tmp_path / "second", "neox"), tmp_path / "out"
    assert run(first, out, "--save", "matrix") == 0
    contents_before = {path: path.read_bytes() for path in out.glob("[!.]*")}
    assert run(second, out) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: --out {out} holds the measures of {first}, not of {second}; expected another folder: --out <folder>"
    )
    assert {path: path.read_bytes() for path in out.glob("[!.]*")} == contents_before
    # The same weights in another place are the same model.
    moved = Path(shutil.copytree(first, tmp_path / "moved"))
    assert run(moved, out) == 0


def test_files_of_an_earlier_call_do_not_remain(tmp_path: Path) -> None:
    folder, out = save_model(tmp_path / "model"), tmp_path / "out"
    assert run(folder, out, "--form", "centered", "--save", "matrix") == 0
    assert run(folder, out, "--form", "centered", "--save", "model") == 0
    assert not (out / "embeddings.safetensors").exists()
    assert not (out / "tokens.txt").exists()
    (out / "notes.txt").write_text("mine")
    assert run(folder, out) == 0
    assert not (out / "model").exists()
    assert (out / "notes.txt").read_text() == "mine"
