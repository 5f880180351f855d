"""From a module and its settings to a unit."""
