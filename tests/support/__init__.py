"""What tests share: waits, clocks, prompts, formats, storages with faults, and engines."""
