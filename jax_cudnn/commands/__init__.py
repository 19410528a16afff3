"""Commands of the shell, one a module: arguments, and what is printed."""
