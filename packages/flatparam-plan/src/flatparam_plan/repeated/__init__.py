"""Many equal blocks, laid out from rehearsals of few."""
