"""Fine-tune a classifier of sentence pairs with I-STAR in a plain loop of torch."""

import argparse

import torch
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

tokenizer = AutoTokenizer.from_pretrained(options.model)
data = load_dataset(*options.data)
data = data.map(lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), batched=True)
data = data.select_columns([*tokenizer.model_input_names, "label"])
collator = DataCollatorWithPadding(tokenizer)
loader = DataLoader(data["train"], batch_size=32, shuffle=True, collate_fn=collator)
validation_loader = DataLoader(data["validation"], batch_size=32, collate_fn=collator)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

attached = istar.attach(model, istar.IStar(weight=options.weight, zeta=0.4))  # istar
model.train()
for _ in range(options.epochs):
    attached.refresh(loader)  # istar
    for step, batch in enumerate(loader):
        task_loss = model(**batch.to(device)).loss
        loss = task_loss + attached.loss()  # istar
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(step, {name: round(float(term), 3) for name, term in attached.terms(task_loss).items()})  # istar
attached.remove()  # istar

covariance = istar.shrinkage_covariance(model, validation_loader, num_points=None, layers="last")  # istar
print(f"IsoScore of the last layer: {isoscore_from_covariance(covariance):.4f}")  # istar
