"""From graphs to graphs: tangents, transposes, batches, and what is left of unused results."""
