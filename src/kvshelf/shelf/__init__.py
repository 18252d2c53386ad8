"""Objects on a storage: what writes, finds, reads and keeps them.

Imports nothing, so that :mod:`kvshelf.shelf.shelf` can be used without torch.
"""
