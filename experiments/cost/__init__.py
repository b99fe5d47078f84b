"""Time by component, energy, memory, and serving."""
