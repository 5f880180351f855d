"""A program run as one rank of a world in which no other exists, and what was seen."""
