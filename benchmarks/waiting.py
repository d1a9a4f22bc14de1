"""Measures what a person waits for: whole commands against a named peer, `python -m benchmarks.waiting`.

Each contender is a new process, in an order that rotates from round to round. CPU seconds are the user and system time
of the process and its threads. Wall and CPU seconds are divided by the peer's in the same round. On a machine that also
does other work, CPU seconds vary less. `--only` chooses the cases:

measure  `istar measure` of 277 sentences with MiniLM and default measures, page included, against a plain script that
         collects the hidden states and prints IsoScore and InterSim of all layers
report   `istar report` over 100 and 1,000 finished runs, against a plain script that reads every result.json with
         pandas and writes the mean of each method as CSV
compare  `istar compare` of four copies of a measured folder into a new folder, and the same command again, against a
         plain script that draws ten measures of the same folders as SVG
train    from `python train.py` to the first optimizer step, against a plain script with `Trainer`; `--help`, an unknown
         key, and a run that is finished, against `import torch`
import   `import istar; istar.IStar` after `import torch`, in CPU milliseconds, against `import torchmetrics`

The sentences are the premises of RTE's validation set if ../shared/data contains them, otherwise random words. All
files are written to a temporary folder.
"""

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.table import Table

from benchmarks.common import comparison_table, make_console, paired_ratio, positive_int, run_in_rotation
from benchmarks.finetune import default_model
from benchmarks.sweep import REPOSITORY, SMALL, isolated_environment
from tests.reports.synthetic import BASE, cosreg, istar, record, save

SENTENCES = 277
RTE = REPOSITORY.parent / "shared" / "data" / "glue_data" / "RTE" / "dev.tsv"
ISTAR = (str(Path(sys.executable).with_name("istar")),)
TRAIN = (sys.executable, "train.py")
PLAIN_MEASURE = """
import sys
import torch
from transformers import AutoModel, AutoTokenizer

folder, text = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
sentences = open(text).read().splitlines()
layers = [[] for _ in range(model.config.num_hidden_layers + 1)]
with torch.inference_mode():
    for start in range(0, len(sentences), 32):
        inputs = tokenizer(sentences[start : start + 32], padding=True, truncation=True, return_tensors="pt")
        hidden_states = model(**inputs, output_hidden_states=True).hidden_states
        for layer, states in zip(layers, hidden_states):
            layer.append(states[inputs["attention_mask"].bool()])
    for number, layer in enumerate(layers):
        points = torch.cat(layer)
        n, d = points.shape
        variances = torch.linalg.eigvalsh(torch.cov(points.T))
        normalized = d**0.5 * variances / variances.norm()
        defect = (normalized - 1).norm() / (2 * (d - d**0.5)) ** 0.5
        isoscore = ((d - defect**2 * (d - d**0.5)) ** 2 / d - 1) / (d - 1)
        units = points / points.norm(dim=1, keepdim=True)
        inter_sim = (units.sum(0).square().sum() - n) / (n * (n - 1))
        print(number, float(isoscore), float(inter_sim))
"""
PLAIN_REPORT = """
import json, sys
from pathlib import Path
import pandas as pd

records = [json.loads(path.read_text()) for path in Path(sys.argv[1]).glob("*/result.json")]
frame = pd.json_normalize(records)
frame.groupby(["config.reg.name", "config.reg.lambda"], dropna=False)["headline.value"].mean().to_csv(sys.argv[2])
"""
PLAIN_COMPARE = """
import sys
from pathlib import Path
import matplotlib
import pandas as pd
matplotlib.use("svg")
from matplotlib import pyplot

*folders, out = map(Path, sys.argv[1:])
out.mkdir(exist_ok=True)
frames = {folder.name: pd.read_csv(folder / "measures.csv") for folder in folders}
for name in next(iter(frames.values())).select_dtypes("number").columns[:10]:
    figure, axes = pyplot.subplots(layout="constrained")
    for label, frame in frames.items():
        axes.plot(frame[name], marker="o", label=label)
    axes.legend()
    figure.savefig(out / f"{name}.svg")
"""
FIRST_STEP = """
import os
def end(*_):
    os.write(1, b"first step")
    os._exit(0)
"""
ISTAR_STEP = f"""{FIRST_STEP}
import runpy, sys
class RegisterEnd:
    def find_spec(self, name, path=None, target=None):
        # Lightning imports torch, and nothing trains without it.
        if name == "lightning":
            sys.meta_path.remove(self)
            from torch.optim.optimizer import register_optimizer_step_post_hook
            register_optimizer_step_post_hook(end)
sys.meta_path.insert(0, RegisterEnd())
sys.path.insert(0, "")
runpy.run_path("train.py", run_name="__main__")
"""
TRAINER_STEP = f"""{FIRST_STEP}
import sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
register_optimizer_step_post_hook(end)
config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=200)
tokens = torch.randint(5, 200, (3200, 16))
rows = [dict(input_ids=row, attention_mask=torch.ones_like(row), labels=0) for row in tokens]
settings = TrainingArguments(sys.argv[1], per_device_train_batch_size=32, use_cpu=True, report_to="none")
Trainer(BertForSequenceClassification(config), settings, train_dataset=rows).train()
"""
IMPORT_TIME = "import time, torch; start = time.process_time(); {}; print(1000 * (time.process_time() - start))"


class Contender(NamedTuple):
    """A command, which may depend on the round, and the expected end of its process."""

    command: Callable[[int], Sequence[str]]
    peer: str
    goal: str = ""
    exit_code: int = 0
    output: str = ""  # part of what the command prints
    prints_ms: bool = False  # whether the output is the time, in milliseconds, instead of the process's


class Duration(NamedTuple):
    """What a process took: its wall and CPU seconds, or twice the milliseconds that it printed."""

    wall: float
    cpu: float


def main() -> None:
    """Measure and print the chosen cases."""
    options = make_parser().parse_args()
    for name in options.only or CASES:
        with tempfile.TemporaryDirectory(prefix="istar-waiting-") as folder, isolated_environment(Path(folder)):
            contenders = CASES[name](Path(folder), options)
            calls = {label: partial(time_process, contender) for label, contender in contenders.items()}
            for call in calls.values():
                call(0)  # Warm-up: reads libraries from the disk and fills the caches.
            make_console().print(make_table(name, contenders, run_in_rotation(calls, options.rounds), options.rounds))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=positive_int, default=6, help="measured rounds (default: 6)")
    parser.add_argument(
        "--runs", nargs="+", type=positive_int, default=[100, 1000], help="report: finished runs (default: 100 1000)"
    )
    return parser


def time_process(contender: Contender, round_number: int) -> Duration:
    """Execute a command in the repository, check how it ends, and return its duration."""
    command = list(contender.command(round_number))
    with tempfile.TemporaryFile() as output:
        started_at = time.perf_counter()
        redirected = [(os.POSIX_SPAWN_DUP2, output.fileno(), descriptor) for descriptor in (1, 2)]
        process = os.posix_spawn(command[0], command, os.environ, file_actions=redirected)
        _, status, usage = os.wait4(process, 0)
        wall = time.perf_counter() - started_at
        output.seek(0)
        text = output.read().decode()
    if os.waitstatus_to_exitcode(status) != contender.exit_code or contender.output not in text:
        sys.exit(f"{' '.join(command)} ended with exit status {status}:\n{text[-4000:]}")
    if contender.prints_ms:
        return Duration(float(text), float(text))
    return Duration(wall, usage.ru_utime + usage.ru_stime)


def make_table(
    case: str, contenders: Mapping[str, Contender], durations: Mapping[str, Sequence[Duration]], rounds: int
) -> Table:
    """Return a table of a case: durations of all contenders, and their ratios to their peers."""
    columns = ("goal", "median", "lowest", "highest", "ratio to the peer", "CPU s", "ratio of CPU s")
    table = comparison_table(f"{case}, {rounds} rounds", columns, rounds)
    wall, cpu = ({name: [getattr(d, key) for d in row] for name, row in durations.items()} for key in Duration._fields)
    for name, (_, peer, goal, *_, prints_ms) in contenders.items():
        seconds = [f"{pick(wall[name]):.2f}" for pick in (median, min, max)]
        ratios = [paired_ratio(values, name, peer) for values in (wall, cpu)]
        cpu_seconds = "" if prints_ms else f"{median(cpu[name]):.2f}"
        table.add_row(name, goal, *seconds, ratios[0], cpu_seconds, "" if prints_ms else ratios[1])
    return table


# ---- the cases: contenders by name


def fixed(*command: str) -> Callable[[int], Sequence[str]]:
    """Return a function of the round that returns this command for every round."""
    return lambda _: command


def numbered(*command: str) -> Callable[[int], Sequence[str]]:
    """Return a function of the round that appends its number to the command's last argument."""
    return lambda round_number: [*command[:-1], f"{command[-1]}{round_number}"]


def make_measure_case(folder: Path, options: argparse.Namespace) -> dict[str, Contender]:
    """Compare `istar measure` with a plain script."""
    model, text = str(default_model("rte")), write_sentences(folder / "sentences.txt")
    peer = "plain script, two measures"
    command = numbered(*ISTAR, "measure", model, "--text", text, "--out", f"{folder}/out-")
    return {
        "istar measure": Contender(command, peer, "1.25 x"),
        peer: Contender(fixed(sys.executable, "-c", PLAIN_MEASURE, model, text), peer),
    }


def make_report_case(folder: Path, options: argparse.Namespace) -> dict[str, Contender]:
    """Compare `istar report` with a plain script, for each number of runs."""
    contenders = {}
    for count in options.runs:
        runs, peer, goal = f"{folder}/runs-{count}", f"plain script, {count:,} runs", {100: "8 s", 1000: "30 s"}
        write_finished_runs(count, Path(runs))
        report = numbered(*ISTAR, "report", runs, "--out", f"{folder}/out-{count}-")
        contenders[f"istar report, {count:,} runs"] = Contender(report, peer, goal.get(count, ""))
        contenders[peer] = Contender(fixed(sys.executable, "-c", PLAIN_REPORT, runs, f"{folder}/means.csv"), peer)
    return contenders


def make_compare_case(folder: Path, options: argparse.Namespace) -> dict[str, Contender]:
    """Compare `istar compare` of four folders with a plain script that draws as many figures."""
    model, text = str(default_model("rte")), write_sentences(folder / "sentences.txt")
    folders = [f"{folder}/model-{number}" for number in range(4)]
    measure = fixed(*ISTAR, "measure", model, "--text", text, "--max-tokens", "3000", "--out", folders[0])
    time_process(Contender(measure, ""), 0)
    for copy in folders[1:]:
        shutil.copytree(folders[0], copy)
    peer, compare = "plain script, ten figures", (*ISTAR, "compare", *folders, "--out")
    return {
        "istar compare": Contender(numbered(*compare, f"{folder}/out-"), peer, "5 s"),
        "the same command again": Contender(fixed(*compare, f"{folder}/same"), peer),
        peer: Contender(numbered(sys.executable, "-c", PLAIN_COMPARE, *folders, f"{folder}/plain-"), peer),
    }


def make_train_case(folder: Path, options: argparse.Namespace) -> dict[str, Contender]:
    """Compare the answers of `python train.py` with a plain script's first step and with the import of torch."""
    first_step = numbered(sys.executable, "-c", ISTAR_STEP, f"run.root={folder}/runs-")
    trainer = fixed(sys.executable, "-c", TRAINER_STEP, f"{folder}/trainer")
    finished = fixed(*TRAIN, *SMALL, f"run.root={folder}/finished")
    time_process(Contender(finished, ""), 0)
    script, torch = "plain script, first step", "import torch"
    return {
        "first step": Contender(first_step, script, "3.5 s", output="first step"),
        script: Contender(trainer, script, output="first step"),
        "--help": Contender(fixed(*TRAIN, "--help"), torch, "1 s", output="--multirun"),
        "unknown key": Contender(fixed(*TRAIN, "optim.rate=1"), torch, "1.5 s", 2, "no such key"),
        "finished run": Contender(finished, torch, "3 s", output="is finished"),
        torch: Contender(fixed(sys.executable, "-c", "import torch"), torch),
    }


def make_import_case(folder: Path, options: argparse.Namespace) -> dict[str, Contender]:
    """Compare the imports of istar and of torchmetrics, both after torch."""
    name, peer = "import istar, ms", "import torchmetrics, ms"
    commands = {
        label: fixed(sys.executable, "-c", IMPORT_TIME.format(statement))
        for label, statement in {name: "import istar; istar.IStar", peer: "import torchmetrics"}.items()
    }
    return {
        name: Contender(commands[name], peer, "50 ms", prints_ms=True),
        peer: Contender(commands[peer], peer, prints_ms=True),
    }


CASES: dict[str, Callable[[Path, argparse.Namespace], dict[str, Contender]]] = {
    "measure": make_measure_case,
    "report": make_report_case,
    "compare": make_compare_case,
    "train": make_train_case,
    "import": make_import_case,
}


# ---- their inputs


def write_sentences(path: Path) -> str:
    """Write the premises of RTE's validation set, or as many lines of random words, and return the path."""
    if RTE.is_file():
        lines = [line.split("\t")[1] for line in RTE.read_text().splitlines()[1:]]
    else:
        words = ["the", "a", "of", "people", "has", "been", "said", "to", "city", "with", "new", "in", "government"]
        lines = [" ".join(random.Random(seed).choices(words, k=42)) for seed in range(SENTENCES)]
    path.write_text("\n".join(lines))
    return str(path)


def write_finished_runs(count: int, folder: Path) -> None:
    """Write finished runs: five seeds of each task, method and model, as many as needed."""
    models = ("google-bert/bert-base-cased", "distilbert/distilbert-base-cased")
    methods = [BASE, *(istar(weight, zeta) for zeta in (0.4, 0.8) for weight in (-5, -3, -1, 1, 3, 5)), cosreg()]
    methods += [istar(-1, 0.6, [layer]) for layer in (1, 2, 3)] + [istar(-1, zeta) for zeta in (0.0, 0.2, 1.0)]
    tasks, seeds = ("rte", "cola", "squad", "stsb", "clm"), range(1, 6)
    runs = itertools.product(models, methods, tasks, seeds)
    for number, (model, method, task, seed) in enumerate(itertools.islice(runs, count)):
        save(record(task, model, method, seed, 0.5 + number % 97 / 1000), folder)


if __name__ == "__main__":
    main()
