"""What a user would pick instead: published methods, on the same runtime where they can be. One method, one file."""
