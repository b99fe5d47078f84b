"""Gold annotation: words with part-of-speech tags, constituents, and which sub-words of a model they are made of.

A treebank is read as running text with an `Annotation` beside it, so that it is a dataset like any other.
"""
