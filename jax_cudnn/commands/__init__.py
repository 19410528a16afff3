"""Commands of the shell that need nothing but the core."""
