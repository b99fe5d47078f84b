"""A static site of everything that was written."""
