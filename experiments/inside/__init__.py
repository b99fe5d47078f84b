"""What is decided about single tokens, layer by layer."""
