"""Models as Hugging Face libraries keep them."""
