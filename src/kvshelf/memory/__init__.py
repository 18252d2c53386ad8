"""Objects in bounded host memory: names and bytes, nothing of engines."""
