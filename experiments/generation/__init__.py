"""What a reader of generated text would notice."""
