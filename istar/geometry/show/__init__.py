"""Pages, figures and tables of the measures of one model or several, or of the checkpoints of a training."""
