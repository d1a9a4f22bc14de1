"""Fine-tuning runs and sweeps: what stands behind `train.py`."""
