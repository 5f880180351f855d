"""The ranks that share and copy parameters, and the engines that connect them."""
