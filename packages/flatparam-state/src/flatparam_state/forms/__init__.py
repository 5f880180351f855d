"""The forms in which the tensors of a state are spread over ranks: full, in chunks, or as their owners hold them."""
