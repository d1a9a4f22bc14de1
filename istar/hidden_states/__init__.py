"""The reader of a model's hidden states, and what uses it: `attach`, and the covariance Sigma_S.

This package depends on torch only.
"""

from istar.hidden_states.attach import HiddenStatePenalty, attach, attach_with_settings
from istar.hidden_states.attached_penalty import AttachedPenalty, PenaltySettings, weight_at
from istar.hidden_states.embedding_penalty import EmbeddingPenalty
from istar.hidden_states.shrinkage import shrinkage_covariance

__all__ = [
    "AttachedPenalty",
    "EmbeddingPenalty",
    "HiddenStatePenalty",
    "PenaltySettings",
    "attach",
    "attach_with_settings",
    "shrinkage_covariance",
    "weight_at",
]
