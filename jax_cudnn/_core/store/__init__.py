"""Plans on disk."""
