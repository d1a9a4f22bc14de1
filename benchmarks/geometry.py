"""Compares a pass of `istar measure` with the bare forward pass over the same batches: `python -m benchmarks.geometry`.

The documents are of 1 to 60 random words, each seen alone, in batches of like length. The frequency of a word is the
inverse of its rank, as in natural texts, so that most words occur a few times. The contenders are the forward pass
alone, on batches that are ready; `istar measure` from the text to the table of its basic measures; and the same with
the streaming measures only, `--groups 0 --sample 0`: without standard errors, and without TwoNN, which compares the
tokens of a sample with each other. Prints the seconds, their ratios, and the memory that the passes take in addition
to the model's forward pass. All take place in this process, and with the same random model, a BERT or a GPT-NeoX; their
order rotates from round to round. The defaults take 10 minutes on two idle cores. The ratio is higher for a short text,
because the end of a pass (spectra of all layers, TwoNN) takes the same time for any text; it is also timed by itself.

    python -m benchmarks.geometry --measures all              also those that `istar measure` leaves out by default
    python -m benchmarks.geometry --documents packed          blocks of several documents, all of the same length
    python -m benchmarks.geometry --rounds 1 --tokens 500000 --layers 2 --width 128         memory of a long text
    python -m benchmarks.geometry --decoder --layers 16 --width 2048 --vocabulary 50304 --dtype bf16 --device cuda
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModel, PreTrainedModel

from benchmarks.common import (
    add_device_option,
    add_processor_time_option,
    comparison_table,
    make_config,
    make_console,
    paired_ratio,
    peak_memory_mb,
    positive_int,
    synchronize,
    time_in_rotation,
)
from istar.geometry.collect.pass_settings import MeasureSettings
from istar.geometry.collect.stream import Stream
from istar.measures.numerics import keep_freed_memory
from istar.models import tiny
from istar.models.pretrained import get_dtype
from istar.sums.source_sums import SourceSums
from istar.texts.corpus import Blocks, Source, pad_batch, sorted_windows, split_into_batches

PEER = "bare forward"


def main() -> None:
    """Measure and print the table and the additional memory."""
    options = make_parser().parse_args()
    keep_freed_memory()  # as `istar measure` does; it makes the bare forward pass no slower
    num_pieces = len(tiny.make_tokenizer())  # special tokens and characters
    words = [f"word{rank}" for rank in range(1, options.vocabulary - num_pieces + 1)]
    tokenizer = tiny.make_tokenizer(words)
    model = random_model(options)
    settings = MeasureSettings(
        options.length, intra=not options.no_intra, documents=options.documents, measures=options.measures
    )
    with tempfile.TemporaryDirectory() as folder:
        source = write_random_text(Path(folder) / "text.txt", words, options.tokens)
        blocks = Blocks(tokenizer, settings.length, settings.documents)(source.read_documents())
        batches = [
            {"input_ids": batch.input_ids.to(model.device), "attention_mask": batch.attention_mask.to(model.device)}
            for window in sorted_windows(blocks, lambda block: len(block.tokens))
            for batch_blocks in split_into_batches(window, lambda block: len(block.tokens), model.device)
            for batch in [pad_batch(batch_blocks, 0)]
        ]
        bare_forward = partial(run_forward, model, batches)
        bare_forward()
        memory_before = peak_memory_mb(options.device)
        calls: dict[str, Callable[[], object]] = {PEER: bare_forward}
        end_seconds: dict[str, list[float]] = {}
        streaming_only = replace(settings, groups=0, sample=0)
        for name, pass_settings in (("istar measure", settings), ("streaming measures only", streaming_only)):
            stream = Stream(model, tokenizer, pass_settings)
            calls[name] = partial(
                stream, [source], partial(timed_end, options.device, end_seconds.setdefault(name, []))
            )
        seconds = time_in_rotation(calls, options.rounds, options.device, options.clock)
    tokens = sum(int(inputs["attention_mask"].sum()) for inputs in batches)
    columns = ("seconds (median)", "lowest", "highest", "seconds of its end", f"ratio to the {PEER}")
    kind = "decoder" if options.decoder else "encoder"
    model_text = f"{kind} of {options.layers} layers of {options.width}, {options.dtype}, {options.device}"
    table = comparison_table(f"{model_text}, {tokens:,} tokens, {options.rounds} rounds", columns, options.rounds)
    for name, values in seconds.items():
        end = f"{median(end_seconds[name]):.2f}" if name in end_seconds else ""
        picked = (f"{pick(values):.2f}" for pick in (median, min, max))
        table.add_row(name, *picked, end, paired_ratio(seconds, name, PEER))
    make_console().print(table)
    memory_mb = peak_memory_mb(options.device) - memory_before
    make_console().print(f"Additional peak memory of istar measure: {memory_mb:.0f} MB")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive_int, default=200_000, help="tokens of each pass (default: 200000)")
    parser.add_argument("--rounds", type=positive_int, default=6, help="measured rounds (default: 6)")
    parser.add_argument("--layers", type=positive_int, default=6, help="layers of the model (default: 6)")
    parser.add_argument("--width", type=positive_int, default=384, help="a multiple of 32 (default: 384)")
    decoder_help = "a GPT-NeoX with attention heads of 256 as in Pythia-1B, instead of a BERT with heads of 32"
    parser.add_argument("--decoder", action="store_true", help=decoder_help)
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="default: float32")
    add_device_option(parser)
    add_processor_time_option(parser)
    parser.add_argument("--length", type=positive_int, default=256, help="tokens of a block (default: 256)")
    parser.add_argument("--documents", choices=("separate", "packed"), default="separate", help="default: separate")
    parser.add_argument("--measures", choices=("basic", "all"), default="basic", help="default: basic")
    parser.add_argument(
        "--vocabulary", type=positive_int, default=30_522, help="size of the vocabulary (default: 30522)"
    )
    parser.add_argument("--no-intra", action="store_true", help="leave out IntraSim and its memory")
    return parser


def random_model(options: argparse.Namespace) -> PreTrainedModel:
    """Return a model without a head, with random weights, in evaluation mode and on its device."""
    torch.manual_seed(0)
    heads = max(1, options.width // (256 if options.decoder else 32))
    config = make_config(options.layers, options.width, heads, options.decoder, options.vocabulary)
    with options.device:  # a GPU draws the random weights much faster
        model: PreTrainedModel = AutoModel.from_config(config, dtype=get_dtype(options.dtype))
    return model.eval()


def write_random_text(path: Path, words: Sequence[str], tokens: int) -> Source:
    """Write documents of 1 to 60 random words, about this many tokens in all, and return the file as a source.

    The frequency of a word is the inverse of its place in `words`, from 1.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 61, (max(1, round(tokens / 32.5)),), generator=generator)  # and two special tokens
    frequencies = 1 / torch.arange(1, len(words) + 1)
    word_indices = frequencies.multinomial(int(lengths.sum()), replacement=True, generator=generator)
    documents = (
        " ".join(words[index] for index in document.tolist()) for document in word_indices.split(lengths.tolist())
    )
    path.write_text("\n".join(documents))
    return Source("text", path)


def timed_end(device: torch.device, seconds: list[float], statistics: SourceSums) -> dict[str, dict[str, float]]:
    """Compute the measures at the end of a pass, and append how long it took to `seconds`."""
    synchronize(device)
    start = time.perf_counter()
    measures = statistics.compute_measures()
    seconds.append(time.perf_counter() - start)
    return measures


@torch.inference_mode()
def run_forward(model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> None:
    """Execute the forward pass over all batches."""
    for inputs in batches:
        model(**inputs, use_cache=False)


if __name__ == "__main__":
    main()
