"""How fast a device computes, moves memory and reaches others."""
