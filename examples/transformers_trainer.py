"""Fine-tune a classifier of sentence pairs with I-STAR in transformers' Trainer."""

import argparse

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

import istar  # istar
from istar.integrations.transformers import MonitorCallback, PenaltyTrainer  # istar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="google-bert/bert-base-cased", help="name on the hub, or folder")
parser.add_argument("--data", nargs="+", default=["nyu-mll/glue", "rte"], help="name on the hub, or folder (README.md)")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=2e-5)
parser.add_argument("--weight", type=float, default=-1.0, help="lambda; below 0, it lowers isotropy")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
data = load_dataset(*options.data)
data = data.map(lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), batched=True)
model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)

trainer = PenaltyTrainer(  # istar: instead of Trainer
    model=model,
    args=TrainingArguments(
        "outputs",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        learning_rate=options.learning_rate,
        logging_steps=10,
        save_strategy="no",
    ),
    train_dataset=data["train"],
    eval_dataset=data["validation"],
    processing_class=tokenizer,
    penalty=istar.IStar(weight=options.weight, zeta=0.4),  # istar
)
watch = MonitorCallback(trainer, probe=8, measures=["isoscore", "inter_sim"])  # istar
trainer.add_callback(watch)  # istar
trainer.train()
print(f"IsoScore of the last layer: {trainer.evaluate()[f'eval_{watch.monitor.states[-1]}_isoscore']:.4f}")
