"""Watch the layers of a model that transformers' Trainer trains: `python examples/watch_trainer.py`.

The model is a small BERT with random weights; `AutoModelForSequenceClassification.from_pretrained` gives yours.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from istar.integrations.transformers import MonitorCallback  # istar

torch.manual_seed(0)
config = BertConfig(vocab_size=200, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
tokens = torch.randint(5, 200, (480, 16))
labels = ((tokens < 100).sum(1) > 8).long()
data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]

arguments = TrainingArguments(
    "watched", max_steps=100, per_device_train_batch_size=32, learning_rate=1e-3, logging_steps=20,
    save_strategy="no", report_to="none", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data[:400], eval_dataset=data[400:])
callback = MonitorCallback(trainer, every=20, probe=1)  # istar: and the first batch of the evaluation set
trainer.add_callback(callback)  # istar
trainer.train()
metrics = trainer.evaluate()
print(f"InterSim of the last layer on the probe: {metrics['eval_layer_3_inter_sim']:.3f}")  # istar
callback.monitor.save("monitor.csv")  # istar: istar.load and istar compare read it
