"""What ranks compare, so that no two of them run different programs in silence."""
