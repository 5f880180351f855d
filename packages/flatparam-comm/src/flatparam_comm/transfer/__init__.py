"""The transfer of flat parameters: a gather into their buffers and a reduction out of them, each with one owner."""
