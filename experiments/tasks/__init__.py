"""GLUE and SuperGLUE under adaptive inference."""
