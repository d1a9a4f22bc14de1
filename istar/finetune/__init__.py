"""Fine-tuning runs and sweeps: the code that `train.py` calls."""
