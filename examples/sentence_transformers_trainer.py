"""Fine-tune a sentence encoder on similarities of sentences with I-STAR in sentence-transformers."""

import argparse

import torch
from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

import istar  # istar
from istar.integrations.sentence_transformers import PenaltyLoss, PenaltyLossCallback  # istar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="name on the hub, or folder")
parser.add_argument(
    "--data", nargs="+", default=["sentence-transformers/stsb"], help="name on the hub, or folder (README.md)"
)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=2e-5)
parser.add_argument("--weight", type=float, default=-0.1, help="lambda; below 0, it lowers isotropy")
options = parser.parse_args()

data = load_dataset(*options.data)
model = SentenceTransformer(options.model)
loss = CosineSimilarityLoss(model)
loss = PenaltyLoss(model, loss, istar.IStar(weight=options.weight, zeta=0.4))  # istar

trainer = SentenceTransformerTrainer(
    model,
    SentenceTransformerTrainingArguments(
        "outputs",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        learning_rate=options.learning_rate,
        logging_steps=10,
        save_strategy="no",
    ),
    train_dataset=data["train"],
    loss=loss,
    callbacks=[PenaltyLossCallback(loss)],  # istar
)
trainer.train()
states = model.encode(data["validation"]["sentence1"][:], output_value="token_embeddings")
print(f"IsoScore of the last layer: {istar.isoscore(torch.cat(states)):.4f}")  # istar
