"""What can stand around any engine: each decorator changes one thing, and passes on the rest."""
