"""Which ranks share and copy parameters, and the engines that connect them."""
