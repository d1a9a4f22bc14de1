"""One pass of `istar measure` against the bare forward pass over the same blocks: `python -m benchmarks.geometry`.

Prints seconds of both, their ratio, and how much memory the pass takes above the model's own. The peer is the model's
forward as transformers runs it, in the same process, alternating with the pass so that both meet the same machine.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel

from istar.geometry.corpus import Packer, Source, batch, chunks, documents
from istar.geometry.stream import Pass, Stream
from istar.models import tiny
from istar.tasks import demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000, help="of a round (default: 50,000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=30_522, help="rows of IntraSim's sums")
    parser.add_argument("--no-intra", action="store_true")
    options = parser.parse_args()
    console = Console()
    tokenizer = tiny.tokenizer(demo.vocabulary())
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.width // 32,
            intermediate_size=4 * options.width,
            vocab_size=options.vocabulary,
        )
    ).eval()
    settings = Pass(options.length, intra=not options.no_intra)
    with tempfile.TemporaryDirectory() as folder:
        source = text(Path(folder) / "text.txt", options.tokens)
        packed = Packer(tokenizer, settings.length)(documents(source))
        blocks = [batch(chunk, 0) for chunk in chunks(packed, settings.batch_size)]
        forward(model, blocks[:1])
        before = peak_mb()
        bare, measured = [], []
        for _ in range(options.rounds):
            bare.append(timed(lambda: forward(model, blocks)))
            measured.append(timed(lambda: Stream(model, tokenizer, settings)([source])))  # type: ignore[arg-type]
    table = Table(title=f"{sum(int(b['attention_mask'].sum()) for b in blocks):,} tokens, {options.rounds} rounds")
    for column in ("", "seconds (median)", "lowest", "highest"):
        table.add_column(column)
    for name, seconds in (("bare forward", bare), ("istar measure", measured)):
        table.add_row(name, *(f"{value:.1f}" for value in (median(seconds), min(seconds), max(seconds))))
    console.print(table)
    console.print(f"ratio of the medians {median(measured) / median(bare):.2f}")
    console.print(f"peak memory above that of the bare forward {peak_mb() - before:.0f} MB")


def text(path: Path, tokens: int) -> Source:
    words = demo.vocabulary()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(words), (tokens // 20, 19), generator=generator).tolist()
    path.write_text("\n".join(" ".join(words[number] for number in row) for row in drawn))
    return Source("text", path)


@torch.inference_mode()
def forward(model: BertModel, blocks: list[dict[str, torch.Tensor]]) -> None:
    for inputs in blocks:
        model(**inputs)


def timed(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
