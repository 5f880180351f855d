"""The steps that units take in a forward and in a backward pass, in order."""
