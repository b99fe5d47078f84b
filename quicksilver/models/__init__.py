"""Frozen models: embedded ones (`reference/`), local folders, hub ids."""
