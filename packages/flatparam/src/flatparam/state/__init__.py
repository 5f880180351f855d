"""The state of wrapped models and their optimizers, through torch's own interfaces."""
