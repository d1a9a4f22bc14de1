"""Fine-tune a classifier of sentence pairs with I-STAR in Lightning."""

import argparse

import lightning
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

import istar  # istar
from istar.integrations.lightning import MonitorCallback, PenaltyCallback  # istar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="google-bert/bert-base-cased", help="name on the hub, or folder")
parser.add_argument("--data", nargs="+", default=["nyu-mll/glue", "rte"], help="name on the hub, or folder (README.md)")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=2e-5)
parser.add_argument("--weight", type=float, default=-1.0, help="lambda; below 0, it lowers isotropy")
options = parser.parse_args()


class Classifier(lightning.LightningModule):
    """A classifier with a penalty."""

    def __init__(self, penalty):
        super().__init__()
        self.model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2).train()
        self.penalty = penalty  # istar

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss + self.penalty.loss()  # istar

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=options.learning_rate)


tokenizer = AutoTokenizer.from_pretrained(options.model)
data = load_dataset(*options.data)
data = data.map(lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), batched=True)
data = data.select_columns([*tokenizer.model_input_names, "label"])
collator = DataCollatorWithPadding(tokenizer)
loader = DataLoader(data["train"], batch_size=32, shuffle=True, collate_fn=collator)
validation_loader = DataLoader(data["validation"], batch_size=32, collate_fn=collator)

penalty = PenaltyCallback(istar.IStar(weight=options.weight, zeta=0.4))  # istar
watch = MonitorCallback(probe=8, measures=["isoscore", "inter_sim"])  # istar
trainer = lightning.Trainer(
    max_epochs=options.epochs, devices=1, callbacks=[penalty, watch], log_every_n_steps=10, enable_checkpointing=False
)
trainer.fit(Classifier(penalty), loader, validation_loader)
print(f"IsoScore of the last layer: {trainer.callback_metrics[f'val/{watch.monitor.states[-1]}/isoscore']:.4f}")
