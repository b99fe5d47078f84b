"""How a layer is executed: a plan says what its execution needs, and four ways execute a plan.

`plain`: the model's own call. `append`: one new token put behind its past. `compact`: the computed tokens gathered, the rest left alone.
`masked`: everything computed, then undone.
"""
