"""Fine-tuning with, and measuring of, the geometry of language-model representations."""

__version__ = "0.1.0"
