"""The value that flows, GraphSpec, and how a user's function becomes one."""
