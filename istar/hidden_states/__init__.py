"""How a penalty reads the hidden states of a model: `attach`, hooks, layers, and the covariance Sigma_S.

This package depends on torch only.
"""

from istar.hidden_states.attach import Watch, attach
from istar.hidden_states.embedding_watch import EmbeddingWatch, attach_to_target
from istar.hidden_states.shrinkage import shrinkage_covariance

__all__ = ["EmbeddingWatch", "Watch", "attach", "attach_to_target", "shrinkage_covariance"]
