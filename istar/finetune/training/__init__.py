"""Fine-tuning with Lightning: the LightningModule, the data module and the callbacks."""
