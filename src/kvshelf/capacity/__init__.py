"""Bounds of a shelf: how much is on it, what may be deleted, and which process deletes it."""
