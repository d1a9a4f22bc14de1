"""Models on several devices, in part offloaded to the disk."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from rich.console import Console

from istar.cli.main import main
from istar.errors import UserError
from istar.finetune.execute import extras
from istar.geometry.collect import measure
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.models.model_source import ModelSource
from istar.models.pretrained import load_encoder
from istar.sums.stack_sums import StackSums
from istar.texts.corpus import Source
from tests.geometry.collect.test_stream import SENTENCES, TOKENIZER

pytest.importorskip("accelerate")

SETTINGS = MeasureSettings(16, groups=2, sample=20)
OWN_FIELDS = ("readings", "seconds", "command")
"""Fields of measurements that differ between two runs."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, and a decoder with four layers and untied output embeddings, in many shards."""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = hf.LlamaConfig(**sizes, vocab_size=len(TOKENIZER), pad_token_id=0, bos_token_id=1, eos_token_id=1)
    model = hf.LlamaForCausalLM(config)
    with torch.no_grad():  # a norm with gains of 1 would look like one that was never read
        model.model.norm.weight.uniform_(0.5, 2)
    model.save_pretrained(folder / "model", max_shard_size="20KB")
    TOKENIZER.save_pretrained(folder / "model")
    assert len(list((folder / "model").glob("*.safetensors"))) > 2
    (folder / "text.txt").write_text("\n".join(SENTENCES * 3))
    return folder


def place_layers(num_on_cpu: int, other: str) -> dict[str, Any]:
    """Return arguments that put the first layers on the CPU, and the others and the final norm in another place."""
    layers = {f"layers.{index}": "cpu" if index < num_on_cpu else other for index in range(4)}
    return {"device_map": {"embed_tokens": "cpu", **layers, "norm": other, "rotary_emb": "cpu"}}


def measure_folder(
    folder: Path, name: str, device: Any = "cpu", dtype: str = "float32", console: Console | None = None
) -> Measurements:
    sources = [Source("text", folder / "text.txt")]
    model = measure.open_model(ModelSource(str(folder / "model")), dtype, device)
    text_pass = measure.plan_pass(model, sources, SETTINGS)
    return measure.measure_texts(text_pass, folder / name, console).measurements


def strip(measurements: Measurements) -> str:
    """Return all that two runs should have in common, with NaN equal to NaN."""
    return repr({name: value for name, value in asdict(measurements).items() if name not in OWN_FIELDS})


@pytest.fixture(scope="module")
def plain(folder: Path) -> Measurements:
    return measure_folder(folder, "plain")


@pytest.mark.parametrize("num_on_cpu", [1, 3])
def test_offloaded_layers_give_the_same_measures(folder: Path, plain: Measurements, num_on_cpu: int) -> None:
    model = load_encoder(ModelSource(str(folder / "model")), TOKENIZER, device=place_layers(num_on_cpu, "disk"))
    assert [layer.mlp.up_proj.weight.is_meta for layer in model.layers] == [index >= num_on_cpu for index in range(4)]
    offloaded = measure_folder(folder, f"disk-{num_on_cpu}", device=place_layers(num_on_cpu, "disk"))
    assert offloaded.final_norm is not None
    assert strip(offloaded) == strip(plain)


def test_offloaded_embeddings_are_read_from_the_disk(folder: Path, plain: Measurements) -> None:
    placement = place_layers(4, "cpu")
    placement["device_map"]["embed_tokens"] = "disk"
    assert strip(measure_folder(folder, "embeddings", device=placement)) == strip(plain)


def test_offloaded_weights_have_the_dtype_of_the_others(folder: Path) -> None:
    """The file has float32."""
    plain = measure_folder(folder, "plain-bf16", dtype="bf16")
    assert strip(measure_folder(folder, "disk-bf16", device=place_layers(2, "disk"), dtype="bf16")) == strip(plain)


def test_a_map_leaves_room_for_the_first_layer(folder: Path) -> None:
    placement = {"device_map": "auto", "max_memory": {"cpu": 1_000}}
    with pytest.raises(UserError, match=r"model: --max-memory has no room for the first layer"):
        measure_folder(folder, "none", device=placement)


def test_adapters_are_not_placed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder / "model")}))
    with pytest.raises(UserError, match=r"holds adapters; merge them into a model"):
        load_encoder(ModelSource(str(tmp_path)), TOKENIZER, device={"device_map": "auto"})


@pytest.mark.slow
def test_offloading(folder: Path, plain: Measurements, tmp_path: Path) -> None:
    num_bytes = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    text, out = f"text={folder / 'text.txt'}", tmp_path / "out"
    command = ["measure", str(folder / "model"), "--text", text, "--out", str(out)]
    settings = ["--length", "16", "--groups", "2", "--sample", "20"]
    limit = f"cpu={num_bytes * 0.6 / 1e3:.0f}KB"
    placement = ["--device-map", "auto", "--max-memory", limit, "--offload-folder", str(tmp_path / "offloaded")]
    assert main([*command, *settings, *placement]) == 0
    measured = json.loads((tmp_path / "out" / "measures.json").read_text())
    assert measured["weights"] == plain.weights
    assert measured["sources"]["text"]["layer_4"]["isoscore"] == plain.sources["text"]["layer_4"]["isoscore"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device-map", "cuda:9"], r"argument --device-map: invalid choice: 'cuda:9' \(choose from '?auto"),
        (["--device-map", "auto", "--revisions", "a,b"], r"--device-map does not go with --revisions or --checkpoints"),
        (["--device-map", "auto", "--device", "cpu"], r"--device cpu does not go with --device-map"),
        (["--max-memory", "cpu=1GB"], r"--max-memory and --offload-folder need --device-map"),
        (["--device-map", "auto", "--max-memory", "cpu"], r"--max-memory cpu: expected cpu or a GPU of this machine"),
        (["--device-map", "auto", "--max-memory", "disk=1GB"], r"--max-memory disk=1GB: expected cpu or a GPU of"),
    ],
)
def test_wrong_options(folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", str(folder / "model"), "--text", str(folder / "text.txt"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    with pytest.raises(UserError, match=message):
        raise UserError(line)


@pytest.mark.parametrize("command", ["measure", "compare"])
def test_a_map_needs_accelerate(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_installed = extras.is_installed
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "accelerate" and is_installed(module))
    models = [str(folder / "model")] * (1 if command == "measure" else 2)
    assert main([command, *models, "--text", str(folder / "text.txt"), "--device-map", "auto"]) == 2
    assert capsys.readouterr().err == "error: --device-map needs accelerate; pip install 'istar[large]'\n"


def test_a_pass_that_runs_out_of_memory_says_what_to_lower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(StackSums, "update", run_out_of_memory)
    with pytest.raises(UserError, match=r"does not fit into memory \(CUDA out of memory.*lower batch_tokens"):
        measure_folder(folder, "none")
