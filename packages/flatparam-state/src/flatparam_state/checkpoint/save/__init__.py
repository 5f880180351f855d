"""Saving: what each rank contributes and writes, and the commit that makes a checkpoint of it."""
