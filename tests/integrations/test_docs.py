"""The examples of the README and of the pages on own trainings, measuring and watching run, on tiny models."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import istar

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "your_own_training.md"
MEASURING = REPOSITORY / "docs" / "measuring.md"
WATCHING = REPOSITORY / "docs" / "watching.md"
BLOCK = re.compile(r"^```(?:python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^[+ ]?(?:import|from) ([\w.]+)", re.MULTILINE)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "ran", "away"]

Names = dict[str, Any]


def apply_difference(block: str) -> str:
    """Return the script after the changes of a block with a difference; a block without one is returned as it is.

    >>> apply_difference("+import istar\\n-loss = 1\\n+loss = 2\\n if loss:\\n     print(loss)\\n")
    'import istar\\nloss = 2\\nif loss:\\n    print(loss)\\n'
    """
    lines = block.splitlines(keepends=True)
    if not any(line.startswith("+") for line in lines):
        return block
    return "".join(line if line == "\n" else line[1:] for line in lines if not line.startswith("-"))


def read_sections(page: Path = PAGE) -> dict[str, list[str]]:
    """Return the examples of each section of the page that has some."""
    titles_and_texts = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = {
        title: BLOCK.findall(text) for title, text in zip(titles_and_texts[1::2], titles_and_texts[2::2], strict=True)
    }
    return {title: title_blocks for title, title_blocks in blocks.items() if title_blocks}


def make_classifier() -> Names:
    """Return a model and its data, as a script for classification has them."""
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    model = transformers.BertForSequenceClassification(config)
    dataset = [{"input_ids": torch.randint(50, (12,)), "labels": torch.tensor(i % 2)} for i in range(16)]
    return {
        "model": model,
        "dataset": dataset,
        "loader": torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "num_epochs": 2,
    }


def make_accelerated() -> Names:
    import accelerate

    return make_classifier() | {"accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)}


def make_trainer_script() -> Names:
    args = transformers.TrainingArguments(
        "out", max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none"
    )
    return make_classifier() | {"args": args, "Trainer": transformers.Trainer}


def make_sft_script() -> Names:
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", eos_token="[SEP]")
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=len(WORDS),
        pad_token_id=0, eos_token_id=3, bos_token_id=3,
    )  # fmt: skip
    args = trl.SFTConfig(
        "out", max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none", bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    return {
        "model": transformers.LlamaForCausalLM(config),
        "args": args,
        "dataset": datasets.Dataset.from_dict({"text": ["the cat sat", "the dog ran away"] * 4}),
        "tokenizer": tokenizer,
    }


def make_sentence_script() -> Names:
    import datasets
    import sentence_transformers
    from sentence_transformers.sentence_transformer import losses, modules

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=len(WORDS)
    )
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained("encoder")
    transformers.BertModel(config).save_pretrained("encoder")
    parts = [modules.Transformer("encoder"), modules.Pooling(16)]
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        "out", max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none"
    )
    pairs = {"anchor": ["the cat sat", "the dog ran"] * 4, "positive": ["the cat", "away"] * 4}
    return {
        "model": sentence_transformers.SentenceTransformer(modules=parts, device="cpu"),
        "args": args,
        "dataset": datasets.Dataset.from_dict(pairs),
        "MultipleNegativesRankingLoss": losses.MultipleNegativesRankingLoss,
        "SentenceTransformerTrainer": sentence_transformers.SentenceTransformerTrainer,
    }


def make_lightning_script() -> Names:
    import lightning

    return make_classifier() | {"lightning": lightning, "torch": torch}


def make_decoder() -> Names:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=2000, bos_token_id=0, eos_token_id=0)
    batch = {"input_ids": torch.randint(50, (4, 10)), "labels": torch.randint(50, (4, 10))}
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})
    return {"model": transformers.GPT2LMHeadModel(config), "batch": batch, "tokenizer": tokenizer}


SCRIPTS: dict[str, tuple[str, Callable[[], Names]]] = {
    "A plain loop": ("torch", make_classifier),
    "accelerate": ("accelerate", make_accelerated),
    "transformers": ("accelerate", make_trainer_script),
    "trl": ("trl", make_sft_script),
    "sentence-transformers": ("sentence_transformers", make_sentence_script),
    "Lightning": ("lightning", make_lightning_script),
    "Isotropy of the evaluation set": ("accelerate", make_trainer_script),
    "Which tokens": ("torch", make_decoder),
    "Embedding matrices": ("torch", make_decoder),
}
"""By section, the library that it needs, and the names that its example takes from the usual script."""


def is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def test_the_page_has_examples_for_every_library():
    assert set(read_sections()) >= set(SCRIPTS)


SLOW_SECTIONS = ("transformers", "trl", "sentence-transformers", "Isotropy of the evaluation set")
"""Sections that take seconds, mostly to import their libraries; they run nightly."""


# The page is about the penalty; warnings of libraries about so small a training do not matter.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=pytest.mark.slow if title in SLOW_SECTIONS else ()) for title in read_sections()],
)
def test_each_section_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_section(PAGE, title, *SCRIPTS.get(title, ("torch", dict)))


def run_section(page: Path, title: str, library: str, make_names: Callable[[], Names]) -> Names:
    """Run the examples of a section one after the other, and return all names."""
    blocks = read_sections(page)[title]
    modules = {library, *(module for block in blocks for module in IMPORT.findall(block))}
    if missing := sorted(filter(is_missing, modules)):
        pytest.skip(f"not installed: {', '.join(missing)}")
    namespace: Names = {"__name__": "__main__", "istar": istar, **make_names()}
    for block in blocks:
        exec(compile(apply_difference(block), f"{page.name}: {title}", "exec"), namespace)
    return namespace


def make_watched() -> Names:
    """Return what the sections on loops, files and alarms take from a script, and write files of monitors."""
    names = make_classifier()
    for path in ("base.csv", "tuned.csv", "monitor.csv"):
        with istar.Monitor(names["model"], every=2) as monitor:
            for batch in names["loader"]:
                names["model"](**batch).loss.backward()
                monitor.step()
        monitor.save(path)
    network = torch.nn.Sequential()
    network.blocks, network.head = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh()), torch.nn.Linear(4, 3)
    return names | {"network": network, "logged": (logged := {}), "log": lambda values, step: logged.update(values)}


def make_watched_module() -> Names:
    import lightning

    names = make_classifier()

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = names["model"]

        def training_step(self, batch: Names) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return names["optimizer"]

    return names | {"lightning": lightning, "module": Classifier()}


WATCHED_SCRIPTS: dict[str, tuple[str, Callable[[], Names]]] = {
    "A loop": ("torch", make_watched),
    "accelerate": ("accelerate", make_accelerated),
    "transformers and trl": ("accelerate", make_trainer_script),
    "sentence-transformers": ("sentence_transformers", make_sentence_script),
    "Lightning": ("lightning", make_watched_module),
    "Files and comparisons": ("torch", make_watched),
    "Alarms": ("torch", make_watched),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=pytest.mark.slow if "transformers" in title else ()) for title in WATCHED_SCRIPTS],
)
def test_each_section_on_watching_runs(title, tmp_path, monkeypatch, blank_figures):
    monkeypatch.chdir(tmp_path)
    assert set(read_sections(WATCHING)) == set(WATCHED_SCRIPTS)
    names = run_section(WATCHING, title, *WATCHED_SCRIPTS[title])
    if title == "A loop":
        assert (
            names["logged"]["geometry/layer_2/inter_sim"] == names["monitor"].readings[0].values["layer_2"]["inter_sim"]
        )
        assert names["monitor"].count == 4
    elif title == "accelerate":
        assert names["monitor"].count == 2  # two batches a step
        assert names["monitor"].readings[0].values["layer_1"]["points"] == 2 * 4 * 12
    elif title == "transformers and trl":
        assert [reading.step for reading in names["callback"].monitor.readings] == [0]


SHAPE: Names = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def make_subjects() -> Names:
    """Return what the README and docs/measuring.md measure, and write the files that they name."""
    generator = np.random.default_rng(0)
    queries, corpus = generator.normal(size=(2, 60, 8)).astype("float32")
    vit_config = transformers.ViTConfig(image_size=16, patch_size=8, **SHAPE)
    convolutions = [torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Conv2d(8, 8, 3)]
    network = torch.nn.ModuleDict({"blocks": torch.nn.Sequential(torch.nn.Linear(16, 8)), "head": torch.nn.ReLU()})
    network.forward = lambda images: network.head(network.blocks(images.flatten(2)[:, :, :16]))
    texts = [" ".join(WORDS[i : i + 4]) for i in range(5, 8)] * 5
    np.save("embeddings.npy", queries)
    np.save("vectors.npy", queries)
    np.savez("vectors.npz", queries=queries, corpus=corpus)
    Path("wiki.txt").write_text("\n".join(texts))
    names = make_encoder()
    names["model"].save_pretrained("my-bert")
    names["tokenizer"].save_pretrained("my-bert")
    return {
        **names,
        "vectors": queries,
        "queries": queries,
        "corpus": corpus,
        "documents": [row // 3 for row in range(60)],
        "names": list(range(60)),
        "vit": transformers.ViTModel(vit_config),
        "loader": torch.utils.data.DataLoader(torch.rand(12, 3, 16, 16), batch_size=4),
        "network": network,
        "convolutions": torch.nn.Sequential(*convolutions),
        "texts": texts,
        "news": texts[:10],
        "sentences": texts,
    }


def make_encoder() -> Names:
    config = transformers.BertConfig(vocab_size=len(WORDS), **SHAPE)
    return {
        "model": transformers.BertModel(config),
        "tuned": transformers.BertModel(config),
        "tokenizer": transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}),
    }


def test_the_first_lines_of_the_readme_run(tmp_path, monkeypatch, blank_figures):
    monkeypatch.chdir(tmp_path)
    names = make_subjects()
    exec(BLOCK.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))[0], names)
    assert names["geometry"].states == ("embeddings", "layer_1", "layer_2")
    assert (tmp_path / "geometry" / "index.html").is_file()


@pytest.mark.filterwarnings("ignore")
def test_the_lines_on_watching_in_the_readme_run():
    section = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("## Watch\n")[1]
    names = {**make_classifier(), "istar": istar}
    exec(BLOCK.findall(section)[0], names)
    assert names["monitor"].count == len(names["loader"])
    names["monitor"].close()


def test_the_lines_on_measuring_run(tmp_path, monkeypatch, blank_figures):
    monkeypatch.chdir(tmp_path)
    names = make_subjects()
    blocks = [block for block in BLOCK.findall(MEASURING.read_text(encoding="utf-8")) if "SentenceT" not in block]
    istar.measure(names["queries"] + 1).save("geometry-tuned")
    for block in blocks:
        exec(compile(block, MEASURING.name, "exec"), names)
    assert names["comparison"].table.set_index("measure").loc["isoscore", "difference"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_the_lines_on_sentence_transformers_run(tmp_path, monkeypatch):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    monkeypatch.chdir(tmp_path)
    names = make_subjects() | {"istar": istar}
    names["model"].save_pretrained("encoder")
    names["tokenizer"].save_pretrained("encoder")
    modules = sentence_transformers.sentence_transformer.modules
    parts = [modules.Transformer("encoder"), modules.Pooling(16)]
    sentence_transformers.SentenceTransformer(modules=parts, device="cpu").save("my-sentence-model")
    [block] = [block for block in BLOCK.findall(MEASURING.read_text(encoding="utf-8")) if "SentenceT" in block]
    exec(compile(block, MEASURING.name, "exec"), names)


def test_the_lines_of_the_readme_run_on_a_random_decoder():
    section = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("## Steer\n")[1]
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    batch = {"input_ids": torch.randint(50, (4, 10)), "labels": torch.randint(50, (4, 10))}
    namespace = {"istar": istar, "model": model, "batch": batch, "train_loader": [batch]}
    exec(BLOCK.findall(section)[0], namespace)
    namespace["loss"].backward()
    assert namespace["penalty"].last.points == 2 * 40
    assert namespace["penalty"].shrinkage_covariance.shape == (16, 16)
    assert model.transformer.h[0].mlp.c_fc.weight.grad.any()
