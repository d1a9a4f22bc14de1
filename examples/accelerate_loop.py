"""Fine-tune a classifier of sentence pairs with I-STAR in a loop with accelerate, on one device or several."""

import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

import istar  # istar
from istar.measures import isoscore_from_covariance  # istar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="google-bert/bert-base-cased", help="name on the hub, or folder")
parser.add_argument("--data", nargs="+", default=["nyu-mll/glue", "rte"], help="name on the hub, or folder (README.md)")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=2e-5)
parser.add_argument("--weight", type=float, default=-1.0, help="lambda; below 0, it lowers isotropy")
options = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2)
tokenizer = AutoTokenizer.from_pretrained(options.model)
with accelerator.main_process_first():
    data = load_dataset(*options.data)
    data = data.map(lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), batched=True)
data = data.select_columns([*tokenizer.model_input_names, "label"])
collator = DataCollatorWithPadding(tokenizer)
loader = DataLoader(data["train"], batch_size=16, shuffle=True, collate_fn=collator)
validation_loader = DataLoader(data["validation"], batch_size=16, collate_fn=collator)

model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
model, optimizer, prepared_loader = accelerator.prepare(model, optimizer, loader)

attached = istar.attach(model, istar.IStar(weight=options.weight, zeta=0.4))  # istar
model.train()
for _ in range(options.epochs):
    with accelerator.autocast():  # istar
        attached.refresh(loader)  # istar: the loader that is not prepared
    for batch in prepared_loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss + attached.loss()  # istar
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
attached.remove()  # istar

covariance = istar.shrinkage_covariance(model, validation_loader, num_points=None, layers="last")  # istar
accelerator.print(f"IsoScore of the last layer: {isoscore_from_covariance(covariance):.4f}")  # istar
