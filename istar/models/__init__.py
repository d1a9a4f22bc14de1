"""Models, read from folders or the hub, with their tokenizers, embedding matrices and saved checkpoints."""
