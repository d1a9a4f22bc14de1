"""Draw `images/log.svg`: what a trainer logs without a penalty, with a good lambda, and with one that is too strong.

Run `python docs/draw_log_figure.py ENCODER TREES` from the root of the repository. ENCODER is the folder of a model,
and TREES the folder `trees` of the Stanford Sentiment Treebank. On two CPU cores, it takes some five minutes.
"""

import random
import re
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    set_seed,
)

import istar
from istar.integrations.transformers import PenaltyTrainer

PICTURE = Path(__file__).parent / "images" / "log.svg"
GREY = "#808893"
"""Color of text and axes that can be read on white and on black."""
RUNS = (
    (-0.1, "lambda = -0.1: good", "#2a87d0", "-"),
    (-1.0, "lambda = -1: too strong", "#d9671c", "--"),
    (0.0, "lambda = 0: no penalty", GREY, ":"),
)
"""Lambda, label, color and line of each training."""
PANELS = ("task_loss", "isoscore_star")
NUM_EXAMPLES, BATCH_SIZE, LOGGING_STEPS = 960, 16, 5


def read_examples(path: Path) -> list[tuple[str, int]]:
    """Return the sentences of a file of trees that are not neutral, and whether they are positive."""
    trees = path.read_text(encoding="utf-8").splitlines()
    sentences = [(" ".join(re.findall(r"([^()\s]+)\)", tree)), int(tree[1])) for tree in trees]
    return [(sentence, int(label > 2)) for sentence, label in sentences if label != 2]


def train(encoder: str, examples: list[tuple[str, int]], weight: float) -> list[dict[str, float]]:
    """Train a classifier with I-STAR, and return the log."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    dataset = [{**tokenizer(text, truncation=True, max_length=32), "labels": label} for text, label in examples]
    with tempfile.TemporaryDirectory() as folder:
        trainer = PenaltyTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(encoder),
            args=TrainingArguments(
                folder,
                num_train_epochs=1,
                per_device_train_batch_size=BATCH_SIZE,
                learning_rate=1e-4,
                logging_steps=LOGGING_STEPS,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
            ),
            train_dataset=dataset,
            data_collator=DataCollatorWithPadding(tokenizer),
            penalty=istar.IStar(weight, zeta=0.4),
            settings=istar.PenaltySettings(num_points=20_000),
        )
        trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def draw(logs: dict[float, list[dict[str, float]]]) -> Figure:
    """Draw the logged terms of each training by its lambda."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "istar", "font.family": "sans-serif"})
    mpl.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), GREY))
    mpl.rcParams.update(dict.fromkeys(("xtick.color", "ytick.color"), GREY))
    figure, all_axes = plt.subplots(1, 2, figsize=(8.2, 3.2), layout="constrained")
    for axes, name in zip(all_axes, PANELS, strict=True):
        for weight, label, color, line in RUNS:
            points = [(log["step"], log[name]) for log in logs[weight] if name in log]
            if points:
                axes.plot(*zip(*points, strict=True), line, color=color, linewidth=2, label=label)
        axes.set(xlabel="step", title=name, xlim=(0, None), ylim=(0, 1.05 * axes.get_ylim()[1]))
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].legend(frameon=False)
    return figure


def main() -> None:
    """Train the runs, and write the picture."""
    encoder, trees = sys.argv[1:]
    examples = random.Random(0).sample(read_examples(Path(trees) / "train.txt"), NUM_EXAMPLES)
    logs = {weight: train(encoder, examples, weight) for weight, *_ in RUNS}
    draw(logs).savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
