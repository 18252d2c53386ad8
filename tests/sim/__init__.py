"""Simulated time and threads for tests."""
