"""The comparisons that ranks make, so that no two of them diverge in silence."""
