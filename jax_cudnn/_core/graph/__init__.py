"""GraphSpec, and the tracing of a user's function to one."""
