"""Plans beside reality: ten transformers, planned and run, and the page that shows both."""
