"""The checkpoint directory without ranks: its names, lock and manifest, its reader and writer, and each rank's part."""
