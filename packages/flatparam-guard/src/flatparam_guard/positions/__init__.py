"""The positions of the ranks of one host: what each has issued, in memory that the others read."""
