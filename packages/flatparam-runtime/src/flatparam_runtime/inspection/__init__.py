"""Full parameters outside of a pass."""
