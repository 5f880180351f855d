"""The transfer of flat parameters: a gather into their buffers, a reduction out of them, each a value that is owned."""
