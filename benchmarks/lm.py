"""Compares pre-training by istar with Hugging Face's `Trainer`: same model, blocks, precision, batches and steps.

    python -m benchmarks.lm                                        a 4 x 256 decoder on generated text
    python -m benchmarks.lm --task mlm --data-dir books --rounds 6
    python -m benchmarks.lm --precision bf16 --steps 60

The contenders are istar without a penalty, istar with I-STAR on all layers, and `Trainer` without a penalty, which gets
the same blocks from the same collator. Each run has a new process, and the order of the contenders rotates from round
to round. The rate counts real tokens between the end of the first and the end of the last optimizer step. Validation,
checkpoints and the refresh of Sigma_S are outside of these steps: Sigma_S is computed once, before the first step.
"Data" is the time to make a batch, as a share of a step.

All steps are of one epoch, because a new epoch begins with a refresh. With the default of 34 steps of 32 blocks of 128
tokens, a round takes about 2 minutes on two cores in float32.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import (
    comparison_table,
    json_from_new_process,
    make_console,
    note_emulated_bfloat16,
    paired_ratio,
    positive_int,
    run_in_rotation,
)

REPOSITORY = Path(__file__).resolve().parents[1]
CONTENDERS = {"none": "istar, no penalty", "istar": "istar, I-STAR on all layers", "trainer": "Trainer, no penalty"}
AS_CONTENDER = "--as-contender"
"""Before the settings of a contender, as JSON, on the command line of its process."""


def main(arguments: list[str] | None = None) -> int:
    """Run the contenders and print the table; or, in the process of a contender, print its measurements."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [AS_CONTENDER]:
        print(json.dumps(train_and_measure(argparse.Namespace(**json.loads(arguments[1])))))
        return 0
    options = make_parser().parse_args(arguments)
    if options.precision == "bf16":
        note_emulated_bfloat16("cpu")
    with tempfile.TemporaryDirectory() as folder:
        calls = {
            name: partial(measure_in_new_process, {**vars(options), "name": name, "folder": folder})
            for name in CONTENDERS
        }
        calls["none"](0)  # fills the cache of tokenized data
        print_table(run_in_rotation(calls, options.rounds), options)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["clm", "mlm"], default="clm", help="default: clm")
    parser.add_argument("--data-dir", help="text file or folder (default: generated text)")
    parser.add_argument("--model", help="option of the group model (default: small_decoder or small_encoder)")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="default: float32")
    parser.add_argument("--steps", type=positive_int, default=34, help="optimizer steps of a run (default: 34)")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="blocks of a batch (default: 32)")
    parser.add_argument("--length", type=positive_int, default=128, help="tokens of a block (default: 128)")
    parser.add_argument("--rounds", type=positive_int, default=6, help="runs of each contender (default: 6)")
    return parser


def measure_in_new_process(settings: dict[str, Any], round_number: int) -> dict[str, float]:
    """Run a contender in a new process, and return its measurements."""
    measurements: dict[str, float] = json_from_new_process("benchmarks.lm", AS_CONTENDER, json.dumps(settings))
    print(f"round {round_number} {settings['name']}: {json.dumps(measurements)}", file=sys.stderr)
    return measurements


def train_and_measure(settings: argparse.Namespace) -> dict[str, float]:
    """Train a contender, and return its `rate` in tokens per second and the share of a step for making its `data`."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from istar.finetune.execute.run import run

    step_ends: list[float] = []
    register_optimizer_step_post_hook(lambda *_: step_ends.append(time.perf_counter()))
    config = make_config(settings)
    steps_per_epoch = len(prepare_data(config)[0]) // settings.batch_size
    if settings.steps > steps_per_epoch:
        raise SystemExit(f"--steps {settings.steps} is more than an epoch of {steps_per_epoch} steps; take fewer")
    if settings.name == "trainer":
        train_with_trainer(config, settings)
    else:
        run(config)
    if len(step_ends) != settings.steps:
        raise SystemExit(f"{settings.name} executed {len(step_ends)} steps; expected {settings.steps}")
    seconds = (step_ends[-1] - step_ends[0]) / (settings.steps - 1)
    return {
        "rate": settings.batch_size * settings.length / seconds,
        "data": seconds_per_batch(config) / seconds,
    }


def make_config(settings: argparse.Namespace) -> Any:
    """Return the config of a run of istar."""
    from hydra import compose, initialize_config_dir

    from istar.finetune.config import schema

    overrides = [
        f"task={settings.task}", f"task.max_length={settings.length}", "task.limit_validation=50",
        f"model={settings.model or ('small_decoder' if settings.task == 'clm' else 'small_encoder')}",
        f"reg={'istar' if settings.name == 'istar' else 'none'}", f"data.batch_size={settings.batch_size}",
        f"data.cache_dir={settings.folder}/cache", f"run.root={settings.folder}/runs", "run.overwrite=true",
        "run.save_model=false", "run.geometry=false", f"trainer.max_steps={settings.steps}", "trainer.max_epochs=1000",
        "trainer.accumulate_grad_batches=1", "trainer.checkpoints=false", "trainer.progress_bar=false",
        f"trainer.precision={'bf16-mixed' if settings.precision == 'bf16' else '32-true'}",
    ]  # fmt: skip
    overrides += [f"task.data_dir={settings.data_dir}"] if settings.data_dir else []
    schema.register()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return schema.load(compose("config", overrides=overrides))


def prepare_data(config: Any) -> tuple[Any, Any, Any]:
    """Return the rows of the training data, the model, and the function that makes a batch of rows for it."""
    from istar.finetune.execute.build_model import build_model
    from istar.finetune.execute.identify import identify
    from istar.finetune.execute.prepare import make_collator, prepare

    prepared = prepare(identify(config))
    spec, config, tokenizer = prepared.identity.spec, prepared.identity.config, prepared.tokenizer
    model = build_model(config.model, spec, prepared.model_config, tokenizer)
    return prepared.data.train, model, make_collator(spec, config, tokenizer, model)


def train_with_trainer(config: Any, settings: argparse.Namespace) -> None:
    """Train the same model on the same rows with transformers' Trainer."""
    import torch
    import transformers

    rows, model, collate = prepare_data(config)

    def collate_for_trainer(rows: Any) -> dict[str, Any]:
        """Make a batch without the column that `Trainer` does not know."""
        return {name: value for name, value in collate(rows).items() if name != "feature_id"}

    arguments = transformers.TrainingArguments(
        f"{settings.folder}/trainer",
        per_device_train_batch_size=settings.batch_size,
        max_steps=settings.steps,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        save_strategy="no",
        bf16=settings.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,  # the collator needs them all
        disable_tqdm=True,
        report_to="none",
    )
    transformers.Trainer(model, arguments, collate_for_trainer, rows).train()


def seconds_per_batch(config: Any, num_batches: int = 20) -> float:
    """Return the average seconds to make a batch of the training data."""
    rows, _, collate = prepare_data(config)
    size = config.data.batch_size
    start = time.perf_counter()
    for batch in range(num_batches):
        collate([rows.training_row((batch * size + row) % len(rows), epoch=batch) for row in range(size)])
    return (time.perf_counter() - start) / num_batches


def print_table(results: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    """Print a table of the measurements of each contender, whose runs are in the order of the rounds."""
    from statistics import median

    title = (
        f"{options.task}, {options.precision}, {options.batch_size} x {options.length} tokens, {options.steps} steps"
    )
    columns = ("tokens/s", "lowest", "highest", "step / step of Trainer", "step / step of istar", "data")
    table = comparison_table(title, columns, options.rounds)
    seconds = {name: [1 / run["rate"] for run in runs] for name, runs in results.items()}
    for name, runs in results.items():
        rates = [f"{pick(run['rate'] for run in runs):.0f}" for pick in (median, min, max)]
        ratios = [paired_ratio(seconds, name, peer) for peer in ("trainer", "none")]
        table.add_row(CONTENDERS[name], *rates, *ratios, f"{median(run['data'] for run in runs):.2%}")
    make_console().print(table)


if __name__ == "__main__":
    sys.exit(main())
