"""Fine-tune a decoder on texts with I-STAR in trl's SFTTrainer."""

import argparse

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

import istar  # istar
from istar.integrations.transformers import MonitorCallback, PenaltyMixin  # istar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="EleutherAI/pythia-70m-deduped", help="name on the hub, or folder")
parser.add_argument(
    "--data", nargs="+", default=["cornell-movie-review-data/rotten_tomatoes"],
    help="name on the hub, or folder (README.md)",
)  # fmt: skip
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=2e-5)
parser.add_argument("--weight", type=float, default=-1.0, help="lambda; below 0, it lowers isotropy")
options = parser.parse_args()


class PenaltySFTTrainer(PenaltyMixin, SFTTrainer):  # istar
    """trl's SFTTrainer with a penalty."""

    task_loss_is_normalized = True  # istar


data = load_dataset(*options.data)
trainer = PenaltySFTTrainer(  # istar: instead of SFTTrainer
    model=options.model,
    args=SFTConfig(
        "outputs",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        learning_rate=options.learning_rate,
        bf16=False,
        logging_steps=10,
        save_strategy="no",
    ),
    train_dataset=data["train"],
    eval_dataset=data["validation"],
    penalty=istar.IStar(weight=options.weight, zeta=0.4),  # istar
)
watch = MonitorCallback(trainer, probe=8, measures=["isoscore", "inter_sim"])  # istar
trainer.add_callback(watch)  # istar
trainer.train()
print(f"IsoScore of the last layer: {trainer.evaluate()[f'eval_{watch.monitor.states[-1]}_isoscore']:.4f}")
