"""From graphs to graphs: tangents, transposes, batches, and pruning of unused results."""
