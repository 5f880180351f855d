"""Plans predict the cost of a program on its ranks; they run it without memory and without communication."""
