"""Measure vectors, whiten them, and say what that changed: `python examples/measure_vectors.py [vectors.npy]`."""

import sys

import numpy as np

import istar


def make_passages(num_documents: int = 300, num_passages: int = 4, width: int = 48) -> np.ndarray:
    """Return vectors with a common direction and few strong directions, as many sentence embeddings have."""
    generator = np.random.default_rng(0)
    topics = generator.normal(size=(num_documents, width)).repeat(num_passages, axis=0)
    passages = topics + generator.normal(size=topics.shape)
    return (passages / np.arange(1, width + 1) ** 0.5 + 0.3 * generator.normal(size=width)).astype("float32")


vectors = np.load(sys.argv[1]) if len(sys.argv) > 1 else make_passages()
documents = None if len(sys.argv) > 1 else np.arange(len(vectors)) // 4  # rows of a document depend on each other

geometry = istar.measure(vectors, groups=documents, measures="all")
print(geometry)
print("\n".join(geometry.findings))
print(geometry.interval("isoscore").round(3))

first_half, second_half = np.array_split(vectors, 2)
whitened = istar.Whitening().fit(first_half).transform(second_half)
print(istar.measure({"before": second_half, "whitened": whitened}))
