"""Models, tokenizers and texts, read from folders or the hub: what training and measuring have in common."""
