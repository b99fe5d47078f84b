"""One file a command. Its docstring is its help, `Options` its own keys, `main(words) -> int` what it does; it returns the exit code.

A file imports what is heavy (torch, transformers, pandas) inside of its functions: help, completion and refusals must not wait for that.
"""
