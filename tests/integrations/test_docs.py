"""Every Python block of `docs/your_own_training.md` runs, section by section."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import transformers

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "your_own_training.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^(?:import|from) ([\w.]+)", re.MULTILINE)


def read_sections() -> dict[str, list[str]]:
    """Return the Python blocks of each section of the page that has some."""
    titles_and_texts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = {
        title: BLOCK.findall(text) for title, text in zip(titles_and_texts[1::2], titles_and_texts[2::2], strict=True)
    }
    return {title: title_blocks for title, title_blocks in blocks.items() if title_blocks}


def is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def test_the_page_has_blocks_for_every_library():
    assert {"A plain loop", "accelerate", "transformers", "trl", "sentence-transformers", "Lightning"} <= set(
        read_sections()
    )


# The page is about the penalty; warnings of libraries about so small a training do not matter.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", read_sections())
def test_each_section_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = read_sections()[title]
    missing = sorted({module for block in blocks for module in IMPORT.findall(block) if is_missing(module)})
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, f"{PAGE.name}: {title}", "exec"), namespace)


def test_the_lines_of_the_readme_run_on_a_random_decoder():
    section = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("## In your own training\n")[1]
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    batch = {"input_ids": torch.randint(50, (4, 10)), "labels": torch.randint(50, (4, 10))}
    namespace = {"model": model, "batch": batch, "train_loader": [batch]}
    exec(BLOCK.findall(section)[0], namespace)
    namespace["loss"].backward()
    assert namespace["penalty"].last.points == 2 * 40
    assert namespace["penalty"].shrinkage_covariance.shape == (16, 16)
    assert model.transformer.h[0].mlp.c_fc.weight.grad.any()
