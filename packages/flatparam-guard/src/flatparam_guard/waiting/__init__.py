"""The waits of ranks for each other: who waits in what, and which waits cannot end."""
