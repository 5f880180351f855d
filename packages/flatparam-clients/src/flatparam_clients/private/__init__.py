"""FSDP1's private modules: façades with the names that programs in the wild take from there.

`flatparam.install()` puts them into torch's modules of the same names. Nothing of ours imports them.
"""
