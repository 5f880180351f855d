"""What a program will cost on its ranks, found by running it without memory and without communication."""
