"""Faster copies in front of a shelf, in memory and on local disks, and the views through them."""
