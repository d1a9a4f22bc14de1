"""Watch the training of an encoder of sentence pairs: `python examples/watch_loop.py`.

With `--without-negatives`, the loss only pulls the two sentences of a pair together, and all embeddings become equal.
"""

import argparse

import torch
from torch.nn import functional
from transformers import BertConfig, BertModel

import istar  # istar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--without-negatives", action="store_true", help="pull pairs together, push nothing apart")
options = parser.parse_args()

torch.manual_seed(0)
config = BertConfig(vocab_size=500, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
model = BertModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
words = torch.randint(500, (200, 10))  # of 200 topics; a sentence has 8 words of its topic

monitor = istar.Monitor(model, every=10)  # istar
for step in range(201):
    topics = torch.randperm(200)[:32]
    sentences = [words[topics].gather(1, torch.randint(10, (32, 8))) for _ in range(2)]
    first, second = (functional.normalize(model(batch).last_hidden_state.mean(1), dim=-1) for batch in sentences)
    cosines = first @ second.T
    contrastive = functional.cross_entropy(20 * cosines, torch.arange(32))
    loss = 1 - cosines.diagonal().mean() if options.without_negatives else contrastive
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step()  # istar
    if step % 50 == 0:
        print(f"step {step}: loss {loss:.4f}, {(cosines.argmax(1) == torch.arange(32)).float().mean():.0%} found")
print(monitor.table.query("state == 'layer_3'")[["step", "inter_sim", "participation_ratio"]].iloc[::5])  # istar
monitor.save("monitor.csv")  # istar
