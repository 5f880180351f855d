"""The fastest way to train a program within a budget of memory."""
