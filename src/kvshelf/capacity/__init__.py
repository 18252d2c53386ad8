"""What bounds a shelf: how much is on it, what may go, and who deletes it."""
