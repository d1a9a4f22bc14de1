"""Reading the embedding matrices of tiny saved models from safetensors files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from istar.errors import UserError
from istar.models.embedding_matrix import read_matrix, read_untied_output
from istar.models.model_source import ModelSource
from tests.embeddings.builders import INPUT, build, save_model
from tests.mock_hub import Repository, serving, set_offline, use


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
    matrix = read_matrix(ModelSource(str(folder)))
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
    matrix = read_matrix(ModelSource(str(folder)), which)
    model: Any = build("neox")
    expected = model.get_input_embeddings() if which == "input" else model.get_output_embeddings()
    assert torch.equal(matrix.values, expected.weight)
    assert matrix.file == shard
    assert not matrix.tied
    (folder / shard).unlink()
    with pytest.raises(UserError, match=f"lacks {shard}"):
        read_matrix(ModelSource(str(folder)), which)


def test_tensor_names_with_and_without_a_head(tmp_path: Path) -> None:
    """Checkpoints of GPT-2 and others were written without the head that their config names."""
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights_without_prefix = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    save_file(weights_without_prefix, folder / "model.safetensors")
    matrix = read_matrix(ModelSource(str(folder)))
    assert torch.equal(matrix.values, weights[INPUT["bert"]])
    assert matrix.file == "model.safetensors"


def test_pythia_has_a_former_name_for_its_output_embeddings(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "neox")
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight") if "lm_head.weight" in weights else weights.pop("embed_out.weight")
    save_file({**weights, "embed_out.weight": head}, folder / "model.safetensors")
    matrix = read_untied_output(ModelSource(str(folder)))
    assert matrix is not None
    assert matrix.tensor == "embed_out.weight"
    assert torch.equal(matrix.values, head)


TEXT: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
RENAMED: dict[str, Callable[[], Any]] = {
    "llava": lambda: hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**VISION))
    ),
    "gemma3": lambda: hf.Gemma3ForConditionalGeneration(hf.Gemma3Config(text_config=TEXT, vision_config=VISION)),
    "qwen2_vl": lambda: hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            vision_config={"embed_dim": 16, "depth": 1, "num_heads": 2, "hidden_size": 16, "patch_size": 8},
        )
    ),
    "voxtral": lambda: hf.VoxtralForConditionalGeneration(
        hf.VoxtralConfig(
            text_config={**TEXT, "model_type": "llama"},
            audio_config={**VISION, "num_mel_bins": 8, "max_source_positions": 8, "intermediate_size": 64},
        )
    ),
    "nemotron_h": lambda: hf.NemotronHForCausalLM(
        hf.NemotronHConfig(**{**TEXT, "num_hidden_layers": None}, layers_block_type=["attention"])
    ),
}


@pytest.mark.parametrize("name", RENAMED)
@pytest.mark.parametrize("side", ["input", "output"])
def test_one_tensor_is_read_of_models_with_renamed_weights(tmp_path: Path, name: str, side: Any) -> None:
    model = RENAMED[name]()
    model.save_pretrained(tmp_path)
    matrix = read_matrix(ModelSource(str(tmp_path)), side)
    assert matrix.file == "model.safetensors"
    overwrite_other_tensors(tmp_path / "model.safetensors", matrix.tensor)
    layer = model.get_input_embeddings() if side == "input" else model.get_output_embeddings()
    assert torch.equal(read_matrix(ModelSource(str(tmp_path)), side).values, layer.weight)


def test_without_safetensors_the_model_is_loaded_but_no_code_from_it(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    matrix = read_matrix(ModelSource(str(folder)))
    assert torch.equal(matrix.values, weights[INPUT["bert"]])
    assert matrix.file is None
    torch.save({**weights, "more": Path("code")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights"):
        read_matrix(ModelSource(str(folder)))


def test_from_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub" / "models--some--model"
    save_model(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "step10").write_text("abc")
    with serving() as hub:
        use(hub, tmp_path, monkeypatch)
        set_offline(True, monkeypatch)
        assert read_matrix(ModelSource("some/model", revision="step10")).tied
        with pytest.raises(UserError, match="not in the local cache"):
            read_matrix(ModelSource("some/model", revision="step20"))
        assert hub.requests == []


def test_one_shard_is_brought_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "model", "neox", max_shard_size="12KB")
    shard_by_tensor = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    with serving() as hub:
        hub.repositories["models/some/model"] = Repository()
        hub.repositories["models/some/model"].push(
            {path.name: path.read_bytes() for path in folder.iterdir()}, "step10"
        )
        use(hub, tmp_path / "cache", monkeypatch)
        read_matrix(ModelSource("some/model", revision="step10"))
    requested_files = {request.rpartition("/")[2] for request in hub.requests if request.startswith("GET")}
    assert {name for name in requested_files if name.endswith(".safetensors")} == {shard_by_tensor[INPUT["neox"]]}


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    source = ModelSource(str(folder))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:5000])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        read_matrix(source)
    (folder / "model.safetensors").write_bytes(content)
    model_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model_config, "hidden_size": 32}))
    with pytest.raises(UserError, match="not of one model"):
        read_matrix(source)
    (folder / "config.json").write_text(json.dumps({**model_config, "architectures": ["BertModel"]}))
    with pytest.raises(UserError, match="no output embeddings"):
        read_matrix(source, "output")
    assert read_untied_output(source) is None
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match="not an index"):
        read_matrix(source)


def test_matrices_that_differ_are_not_tied_whatever_the_config_says(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    output = torch.randn_like(weights[INPUT["bert"]])
    save_file({**weights, "cls.predictions.decoder.weight": output}, folder / "model.safetensors")
    source = ModelSource(str(folder))
    assert torch.equal(read_matrix(source, "output").values, output)
    assert torch.equal(read_matrix(source, "input").values, weights[INPUT["bert"]])
    untied = read_untied_output(source)
    assert untied is not None
    assert torch.equal(untied.values, output)
    save_file(
        {**weights, "cls.predictions.decoder.weight": weights[INPUT["bert"]].clone()}, folder / "model.safetensors"
    )
    assert read_matrix(source, "output").tied
    assert read_untied_output(source) is None


def test_a_single_file_is_preferred_to_shards_as_in_transformers(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "neox", max_shard_size="12KB")
    model: Any = build("neox")
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    index = (folder / "model.safetensors.index.json").read_text()
    shards = {path.name: path.read_bytes() for path in folder.glob("model-*.safetensors")}
    model.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(index)
    for name, content in shards.items():
        (folder / name).write_bytes(content)
    loaded: Any = hf.AutoModel.from_pretrained(folder)
    assert torch.equal(read_matrix(ModelSource(str(folder))).values, loaded.get_input_embeddings().weight)
