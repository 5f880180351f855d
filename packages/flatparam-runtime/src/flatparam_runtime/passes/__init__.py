"""What happens to units in a forward and in a backward pass, in the order in which it happens."""
