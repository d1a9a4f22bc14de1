"""Compare the hidden states of a model before and after its training: `python examples/compare_models.py`.

The model is a small BERT with random weights; `AutoModel.from_pretrained` gives yours.
"""

import copy

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import istar

torch.manual_seed(0)
config = BertConfig(
    vocab_size=200, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, num_labels=2
)
base = BertForSequenceClassification(config)
tokens = torch.randint(5, 200, (400, 16))
labels = ((tokens < 100).sum(1) > 8).long()
dataset = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
loader = DataLoader(dataset, batch_size=40)

tuned = copy.deepcopy(base)
optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-3)
for _ in range(5):
    for batch in loader:
        optimizer.zero_grad()
        tuned(**batch).loss.backward()
        optimizer.step()

ids = range(len(dataset))  # equal ids: the differences are paired, and CKA can be computed
comparison = istar.compare(
    {"base": istar.measure(base, loader, ids=ids), "tuned": istar.measure(tuned, loader, ids=ids)}
)
isoscores = comparison.table.query("measure == 'isoscore'").set_index("state")
print(isoscores[["first", "other", "difference", "low", "high", "method"]].round(3))
print(comparison.similarity["base", "tuned"].round(2))
print("\n".join(comparison.findings))
