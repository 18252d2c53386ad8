"""Tests that other projects run on what they add to kvshelf; they need pytest and hypothesis."""
